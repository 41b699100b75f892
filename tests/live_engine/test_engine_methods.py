"""`nwor-bench worth --arm` on real vLLM: two methods, each with an engine for all its counts."""

import json
from pathlib import Path

import pytest

from nwor_bench.errors import ExitCode
from nwor_bench.records.cell import MethodCount
from nwor_bench.records.store import read_run
from nwor_bench.records.types import Phase
from nwor_bench.report.sweep import swept_worths
from nwor_bench.run.run_options import RunOptions
from nwor_bench.run.sweep import run_loaded
from nwor_bench.run.sweep_folder import SweepIndex
from nwor_bench.run.sweep_summary import swept_runs
from nwor_bench.workload.sweep_file import SweepFile

pytestmark = [
    pytest.mark.engine,
    pytest.mark.usefixtures("environment_given_back", "figures_left_out"),
]

SMALL, LOOKUP = "draft_model", "ngram"


def test_both_methods_draft_their_counts_and_give_plain_decodings_tokens(tmp_path: Path) -> None:
    content = {
        "name": "worth",
        "axes": {"pairs": ["tiny"], "requests": [2], "draft_tokens": [2], "nwor_modes": ["off"],
                 "scv_modes": ["off"]},
        "settings": {"draft_counts": [0, 1, 2], "engines": True, "batches": 3, "warmup": 0,
                     "max_warmup": 0, "max_new_tokens": 32,
                     "arms": {SMALL: {"method": SMALL}, LOOKUP: {"method": LOOKUP}}},
    }  # fmt: skip
    sweep = SweepFile.model_validate_json(json.dumps(content))
    folder = tmp_path / "worth"
    assert run_loaded(sweep, RunOptions(output=folder, quiet=True)) is ExitCode.OK
    (run,) = [read_run(path.parent) for path in sorted(folder.glob("*/run.json"))]
    arms = run.header.engine.arms
    assert arms is not None
    assert set(arms) == {SMALL, LOOKUP, "A/A"}
    counts = [0, None, *(MethodCount(m, k) for m in (SMALL, LOOKUP) for k in (0, 1, 2))]
    gate = {batch.cell.drafts: batch for batch in run.batches if batch.phase == Phase.GATE}
    assert set(gate) == set(counts)
    assert {batch.parity for batch in gate.values()} == {"reference", "exact"}
    for count, batch in gate.items():
        number = count.number if isinstance(count, MethodCount) else 0
        windows = sum(n for n, _ in batch.request_acceptance)
        assert bool(batch.draft_tokens) == bool(number)
        assert batch.draft_tokens <= windows * number
        if isinstance(count, MethodCount) and count.method == SMALL:
            assert batch.draft_tokens == windows * number
    (measured,) = swept_worths(swept_runs(SweepIndex.open(folder))).values()
    assert {rate.count for rate in measured.worth.rates} == set(counts) - {0, None}
    assert measured.worth.next_best.keys() == {2}
    text = (folder / "summary.md").read_text()
    assert "draft_model k=0 takes" in text
