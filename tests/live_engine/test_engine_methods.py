"""`nwor-bench worth --arm` on real vLLM: two methods, each with an engine for all its counts."""

import json
from pathlib import Path
from typing import Any

import planted_arms
import pytest

from nwor_bench.analysis.findings.finding import FindingKind
from nwor_bench.analysis.measured_worth import MeasuredWorth
from nwor_bench.engine import arms as engine_arms
from nwor_bench.engine import memory
from nwor_bench.errors import ExitCode
from nwor_bench.instruments.device import FreeMemory
from nwor_bench.records.cell import Arm, MethodCount, engine_name
from nwor_bench.records.store import read_run
from nwor_bench.records.types import Phase, Verdict
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


def worth(folder: Path, arms: dict[str, Any], most: int, **settings: Any) -> ExitCode:
    content = {
        "name": "worth",
        "axes": {"pairs": ["tiny"], "requests": [2], "draft_tokens": [most], "nwor_modes": ["off"],
                 "scv_modes": ["off"]},
        "settings": {"draft_counts": [*range(most + 1)], "engines": True, "warmup": 0,
                     "max_warmup": 0, "max_new_tokens": 32, "arms": arms, **settings},
    }  # fmt: skip
    sweep = SweepFile.model_validate_json(json.dumps(content))
    return run_loaded(sweep, RunOptions(output=folder, quiet=True))


def measured_in(folder: Path) -> MeasuredWorth:
    (measured,) = swept_worths(swept_runs(SweepIndex.open(folder))).values()
    return measured


def test_both_methods_draft_their_counts_and_give_plain_decodings_tokens(tmp_path: Path) -> None:
    folder, arms = tmp_path / "worth", {SMALL: {"method": SMALL}, LOOKUP: {"method": LOOKUP}}
    assert worth(folder, arms, 2, batches=3) is ExitCode.OK
    (run,) = [read_run(path.parent) for path in sorted(folder.glob("*/run.json"))]
    found = run.header.engine.arms
    assert found is not None
    assert set(found) == {SMALL, LOOKUP, "A/A"}
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
    measured = measured_in(folder)
    assert {rate.count for rate in measured.worth.rates} == set(counts) - {0, None}
    assert not measured.worth.best  # of three blocks
    text = (folder / "summary.md").read_text()
    assert "draft_model k=0 takes" in text
    assert "(3 blocks, a verdict needs 5)" in text


@pytest.mark.long
def test_methods_that_do_not_fit_at_once_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for two engines: plain decoding and one method, whose A/A is the first one again."""
    room = FreeMemory(int(2.5 * memory.RUNTIME_BYTES["host"]), "host")
    monkeypatch.setattr(memory, "free_memory", lambda ranks: room)
    folder, arms = tmp_path / "worth", {SMALL: {"method": SMALL}, LOOKUP: {"method": LOOKUP}}
    assert worth(folder, arms, 1, batches=3, max_new_tokens=16) is ExitCode.OK
    assert SweepIndex.open(folder).sweep.axes.engines_at_once == (SMALL, LOOKUP)
    runs = [read_run(path.parent) for path in sorted(folder.glob("*/run.json"))]
    for run, name in zip(runs, (SMALL, LOOKUP), strict=True):
        assert set(run.header.engine.arms or ()) == {name}
        gate = {batch.cell.label: batch.parity for batch in run.batches if batch.phase == "gate"}
        assert list(gate) == ["k = 0", f"{name} k=0", f"{name} k=1", "off x off (A/A)"]
        assert set(gate.values()) == {"reference", "exact"}
    plain = [[b.token_digests for b in run.batches if b.cell.is_baseline] for run in runs]
    assert plain[0] == plain[1]  # the same prompts
    worth_found = measured_in(folder).worth
    assert all(rate.ratio is not None for rate in worth_found.rates)
    assert {rate.method for rate in worth_found.rates} == {SMALL, LOOKUP}
    assert not worth_found.best  # of three blocks
    text = (folder / "summary.md").read_text()
    for said in (f"{SMALL}: k = 0 over itself", f"{LOOKUP}: k = 0 over itself", "its own plain"):
        assert said in text


@pytest.mark.long
def test_planted_arms_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One arm three times, each with another plant in its engine's process.

    The slow one sleeps for many times a forward. 2 % would not do here: two engines on two busy
    cores differ by more from themselves. Those are found on a GPU, in one engine
    (test_two_percent_at_one_count_are_found), and in records (test_method_arms.py).
    """
    launch, serve = engine_arms._launch, engine_arms._serve

    def planting(pair: Any, specs: Any, arm: Arm | None, log: Path | None) -> Any:
        plant = getattr(planted_arms, engine_name(arm), serve)
        monkeypatch.setattr(engine_arms, "_serve", plant)
        return launch(pair, specs, arm, log)

    monkeypatch.setattr(engine_arms, "_launch", planting)
    folder, arms = tmp_path / "worth", {n: {"method": SMALL} for n in ("slow", "shifted", "wrong")}
    code = worth(folder, arms, 1, batches=8, max_new_tokens=16)
    assert code is ExitCode.CORRECTNESS_BROKEN
    measured = measured_in(folder)
    rates = {(rate.method, rate.drafts): rate for rate in measured.worth.rates}
    assert rates["slow", 0].verdict == rates["slow", 1].verdict == Verdict.SLOWER
    assert (rates["slow", 0].time_ratio or 0) > 4 * (rates["shifted", 0].time_ratio or 9)
    assert (rates["slow", 1].tokens or 0) > 1.2
    assert (rates["shifted", 1].tokens or 9) < 1.05
    assert [key for key, rate in rates.items() if rate.verdict == Verdict.INVALID] == [("wrong", 1)]
    assert rates["wrong", 1].ratio is None
    assert measured.worth.best[2] not in (MethodCount("wrong", 1), MethodCount("slow", 1))
    (analysis,) = measured.analyses
    parity = {cell.label: cell.parity for cell in analysis.cells}
    assert parity["shifted k=1"] == parity["slow k=1"] == "exact"
    (finding,) = (f for f in analysis.findings if f.kind == FindingKind.ACCEPTANCE)
    assert "first drafts of shifted were accepted" in finding.message
    text = (folder / "summary.md").read_text()
    assert "INVALID: 1 draft count failed the checks" in text
    assert "wrong k=1 at 2 requests" in text
