"""A time budget that warm-up and gate spent: said with seconds, and with a budget that suffices."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import spent_by_gate
from synthetic_run import analysed, make_run, summarised, with_header, with_parts

from nwor_bench.analysis.findings.run import nothing_timed, sufficient_budget
from nwor_bench.analysis.findings.table import Finding, FindingKind, Severity
from nwor_bench.records.store import RunData
from nwor_bench.records.types import RunStatus
from nwor_bench.run.budget import WARMUP_SHARE
from nwor_bench.workload.options import seconds

CELLS = 7


def found_in(run: RunData) -> list[Finding]:
    return [f for f in analysed(run).findings if f.kind is FindingKind.TIME_BUDGET]


def test_what_was_spent_and_what_was_lost_are_named() -> None:
    (found,) = found_in(spent_by_gate())
    assert found.severity is Severity.WARNING
    for words in ("66 s", "61 s", "60 s", "no block was timed"):
        assert words in found.message
    assert "DRAM" not in found.message
    # 1.3 x (66.2 s + 10 blocks of 7 batches of 1 s) = 177 s
    assert found.remedy == "Write --time-budget 3m."


def test_counters_that_did_not_run_are_named_and_get_their_time() -> None:
    (found,) = found_in(spent_by_gate(counters="dram"))
    assert "no DRAM bytes were counted" in found.message
    assert found.remedy == "Write --time-budget 5m."  # ten more blocks


def test_a_short_budget_is_rounded_to_ten_seconds() -> None:
    run = spent_by_gate(measuring_s=8.25, batch_s=0.1)  # 1.3 x (8.25 + 7) = 19.8 s
    (found,) = found_in(run)
    assert "8.2 s" in found.message
    assert found.remedy == "Write --time-budget 20s."


OTHERS = {
    "interrupted": {"status": RunStatus.PARTIAL},
    "failed": {"status": RunStatus.FAILED},
    "no budget": {"spec": {"seed": 3}},
    "stopped by nothing": {"stopped": None},
    "an older run": {"measuring_s": None},
}


@pytest.mark.parametrize("parts", OTHERS.values(), ids=OTHERS)
def test_other_runs_without_a_block_get_no_such_advice(parts: dict[str, Any]) -> None:
    assert not found_in(with_parts(spent_by_gate(), **parts))


def test_a_run_with_a_timed_block_gets_no_such_advice() -> None:
    timed = make_run(blocks=1, device="cuda", aa=True)
    run = replace(spent_by_gate(), batches=timed.batches, windows=timed.windows)
    assert not found_in(run)
    assert nothing_timed(run.header, summarised(run)) is None


@given(measuring_s=st.floats(0.5, 5_000), batch_s=st.floats(0.01, 100), counters=st.booleans())
def test_the_budget_has_room_for_a_block_and_all_that_must_fit_behind_it(
    measuring_s: float, batch_s: float, counters: bool
) -> None:
    """Even if warm-up takes all of its share on top of what was spent."""
    run = spent_by_gate(measuring_s, batch_s, counters="dram" if counters else None)
    budget_s = seconds(sufficient_budget(run, summarised(run)))
    assert budget_s is not None
    block_s = CELLS * batch_s
    needed = measuring_s + ((10 if counters else 0) + 1) * block_s + batch_s
    assert (1 - WARMUP_SHARE) * budget_s >= needed


def took(**seconds_by_part: float) -> RunData:
    run = with_header(make_run(blocks=3), "spec", time_budget_s=60.0)
    return with_parts(run, spent_s={k.replace("_", " "): s for k, s in seconds_by_part.items()})


def test_checks_that_took_more_than_a_third_are_said_with_a_budget_that_suffices() -> None:
    parts = {"gate": 15.0, "whole_batches": 9.0, "interleaved_batches": 30.0}
    found = [f for f in analysed(took(**parts)).findings if f.kind is FindingKind.CHECKS]
    (finding,) = found
    assert finding.severity is Severity.NOTE
    assert "took 24 s of the time budget of 60 s" in finding.message
    assert finding.remedy == "Write --time-budget 80s."  # 3 x 24 s = 72 s
    enough = took(**{**parts, "gate": 10.0})
    assert not [f for f in analysed(enough).findings if f.kind is FindingKind.CHECKS]
    only_whole = took(gate=15.0, whole_batches=40.0)  # nothing is interleaved
    assert not [f for f in analysed(only_whole).findings if f.kind is FindingKind.CHECKS]
