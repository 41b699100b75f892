"""A run whose time budget the gate spent says so first, and which budget to write instead."""

from pathlib import Path
from typing import Any

import pytest
from report_runs import gpu_run, spent_by_gate
from swept_folder import save_sweep
from synthetic_run import analysed, change_batches, summarised, with_header, with_parts

from nwor_bench.records.store import RunData
from nwor_bench.records.types import RunStatus
from nwor_bench.report.answer import answer
from nwor_bench.report.document import Bullets
from nwor_bench.report.questions import questions
from nwor_bench.report.sweep import sweep_document
from nwor_bench.run.sweep_folder import SweepIndex
from nwor_bench.run.sweep_summary import swept_runs

WRONG = ("--batches", "--ci-width")


def next_step(run: RunData) -> str:
    return dict(questions(analysed(run)).entries)["What next?"]


def test_the_answer_names_gate_and_budget_and_what_to_write() -> None:
    run = spent_by_gate(counters="dram")
    found = answer(run.header, summarised(run))
    assert found.badge == "AMBIGUOUS"
    for words in ("66 s", "61 s", "budget of 60 s", "no block was timed", "DRAM"):
        assert words in found.sentence
    said = dict(questions(analysed(run)).entries)
    assert "--time-budget 5m" in said["What next?"]
    assert not any(flag in said["What next?"] for flag in WRONG)


@pytest.mark.parametrize("status", [RunStatus.PARTIAL, RunStatus.FAILED])
def test_a_run_that_did_not_end_by_its_clock_gets_no_such_advice(status: RunStatus) -> None:
    """One that Ctrl-C ended is to be resumed, whatever its clock said before."""
    run = with_parts(spent_by_gate(), status=status)
    assert "no block was timed both" in answer(run.header, summarised(run)).sentence
    assert "--time-budget" not in next_step(run)
    assert ("--resume" in next_step(run)) == (status is RunStatus.PARTIAL)


def invalid(run: RunData) -> RunData:
    def staged(batch: Any) -> bool:
        return bool((batch.nwor_mode, batch.scv_mode) == ("stage", "graph"))

    return change_batches(run, staged, parity="INVALID", first_mismatch="request 1: 2 not 3")


@pytest.mark.parametrize(
    ("changed", "badge", "then"),
    [
        (invalid, "INVALID", "Do not switch it on"),
        (lambda run: with_header(run, "engine", device="cpu"), "CPU RUN", "on the GPU"),
    ],
)
def test_what_outranks_the_clock_keeps_its_own_advice(changed: Any, badge: str, then: str) -> None:
    run = changed(spent_by_gate())
    assert answer(run.header, summarised(run)).badge == badge
    assert then in next_step(run)
    assert "--time-budget" not in next_step(run)


@pytest.mark.slow  # a sweep's folder
def test_a_sweep_names_its_runs_that_timed_nothing(tmp_path: Path) -> None:
    def at(requests: int) -> dict[str, object]:
        return {"requests": requests, "dtype": "bfloat16"}

    longer = spent_by_gate(measuring_s=300.0)
    sound = gpu_run(probed=False)
    runs = [(at(1), sound), (at(32), spent_by_gate()), (at(64), longer)]
    folder = save_sweep(tmp_path / "grid", runs)
    lead = sweep_document("grid", swept_runs(SweepIndex.open(folder))).lead
    lines = [line for block in lead if isinstance(block, Bullets) for line in block.items]
    (line,) = [line for line in lines if "--time-budget" in line]
    assert line.startswith("WARNING: ")
    assert line.endswith("(runs 2, 3)")
