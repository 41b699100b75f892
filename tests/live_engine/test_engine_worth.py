"""`nwor-bench worth` on real vLLM: draft counts that alternate, and planted faults of one count."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from nwor_bench.analysis.analyse import analyse
from nwor_bench.analysis.worth import Measured, same_places, worth_of
from nwor_bench.errors import ExitCode
from nwor_bench.records.store import RunData, read_run
from nwor_bench.records.types import Phase
from nwor_bench.run.run_options import RunOptions
from nwor_bench.run.sweep import run_loaded
from nwor_bench.run.sweep_folder import SweepIndex
from nwor_bench.run.sweep_summary import sweep_result, swept_runs
from nwor_bench.workload.sweep_file import SweepFile

pytestmark = [
    pytest.mark.engine,
    pytest.mark.usefixtures("environment_given_back", "figures_left_out"),
]


def worth(folder: Path, pair: str, **settings: Any) -> tuple[ExitCode, list[RunData]]:
    content = {
        "name": "worth",
        "axes": {"pairs": [pair], "requests": [1, 3], "draft_tokens": [2],
                 "nwor_modes": ["off"], "scv_modes": ["off"]},
        "settings": {"draft_counts": [0, 1, 2], "batches": 3, "max_new_tokens": 48, "warmup": 0,
                     "max_warmup": 0, **settings},
    }  # fmt: skip
    sweep = SweepFile.model_validate_json(json.dumps(content))
    code = run_loaded(sweep, RunOptions(output=folder, quiet=True))
    return code, [read_run(path.parent) for path in sorted(folder.glob("*/run.json"))]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any, int], None]], None]:
    """Lets a function act on vLLM's rejection sampling: on its output, and the window's drafts."""

    def patch(act: Callable[[Any, int], None]) -> None:
        from vllm.v1.sample.rejection_sampler import RejectionSampler

        original = RejectionSampler.forward

        def forward(sampler: Any, metadata: Any, *args: Any, **named: Any) -> Any:
            output = original(sampler, metadata, *args, **named)
            act(output, metadata.max_spec_len)
            return output

        monkeypatch.setattr(RejectionSampler, "forward", forward)

    return patch


@pytest.mark.parametrize("pair", ["tiny", pytest.param("tiny-mtp", marks=pytest.mark.long)])
def test_draft_counts_alternate_and_give_the_same_tokens(tmp_path: Path, pair: str) -> None:
    code, runs = worth(tmp_path / "worth", pair, batches=2)
    assert code is ExitCode.OK
    assert [run.header.scenario["requests"] for run in runs if run.header.scenario] == [1, 3]
    for run in runs:
        engine = run.header.engine
        assert engine is not None
        assert engine.attention_backend == "CPUAttentionBackendImpl"  # stock's own
        gate = [batch for batch in run.batches if batch.phase == Phase.GATE]
        assert [b.cell.label for b in gate] == ["k = 0", "k = 1", "k = 2", "off x off (A/A)"]
        assert {b.parity for b in gate} <= {"reference", "exact", "explained"}
        assert set(gate[0].request_acceptance) == {(0, 0)}
        for batch in gate:
            if batch.cell.drafts:
                windows, accepted = map(sum, zip(*batch.request_acceptance, strict=True))
                assert windows * batch.cell.drafts == batch.draft_tokens
                assert accepted == batch.accepted_tokens > 0
        placed = [window for window in run.windows if window.group is not None]
        assert {window.cell.drafts for window in placed} == {0, 1, 2, None}
        assert all(w.draft_tokens == w.num_reqs * (w.cell.drafts or 0) for w in placed)
        assert analyse(run).violations == ()
    found = worth_of([Measured(run, analyse(run).effects) for run in runs])
    assert 4 <= found.texts <= 12
    equal, compared = same_places(runs[0])
    assert equal == compared > 20  # the drafter's cache does not suffer from switching
    assert all(rate.tokens and rate.tokens > 1.2 for rate in found.rates)
    index = SweepIndex.open(tmp_path / "worth")
    told = sweep_result(index, swept_runs(index))["worth"]
    rows = pd.read_csv(tmp_path / "worth" / "worth.csv")
    assert [(r["requests"], r["drafts"]) for r in told["rates"]] == [(1, 1), (1, 2), (3, 1), (3, 2)]
    assert list(zip(rows.requests, rows.drafts, strict=True)) == [(1, 1), (1, 2), (3, 1), (3, 2)]
    document = (tmp_path / "worth" / "summary.md").read_text()
    assert "Acceptance by position" in document
    assert "Draft counts by batch size" in document


def test_a_count_that_changes_a_token_is_invalid(tmp_path: Path, plant: Any) -> None:
    def wrong(output: Any, drafts: int) -> None:
        if drafts == 2:
            output.sampled_token_ids[:, 0] = 97

    plant(wrong)
    code, runs = worth(tmp_path / "worth", "tiny", batches=1, max_new_tokens=12)
    assert code is ExitCode.CORRECTNESS_BROKEN
    for run in runs:
        verdicts = {cell.label: cell.verdict for cell in analyse(run).cells}
        assert verdicts["k = 2"] == "INVALID"
        assert verdicts["k = 1"] != "INVALID"
    assert "k = 2" in (tmp_path / "worth" / "summary.md").read_text().split("INVALID", 1)[1]


@pytest.mark.long
def test_a_slower_count_is_found(tmp_path: Path, plant: Any) -> None:
    """k = 2 takes 10 ms more; a window of the tiny pair takes as much. k = 1 must not show it."""

    def slow(_: Any, drafts: int) -> None:
        if drafts == 2:
            time.sleep(0.01)

    plant(slow)
    _, runs = worth(tmp_path / "worth", "tiny", batches=12)
    found = worth_of([Measured(run, analyse(run).effects) for run in runs])
    for one, two in zip(found.rates[::2], found.rates[1::2], strict=True):
        assert (one.drafts, two.drafts) == (1, 2)
        assert one.time_ratio is not None
        assert two.time_ratio is not None
        assert two.time_ratio > one.time_ratio + 0.3
    assert all(k < 2 for k in found.best.values())
