"""What cells become in a run whose batches were interleaved: ratios, counts, verdicts, faults."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from interleaved_run import CONTROL, FIRST_BATCH, OFF, STAGE_GRAPH, Planted, interleaved_run
from synthetic_run import (
    change_batches,
    change_windows,
    faults_of,
    kept,
    summarised,
)

from nwor_bench.analysis.analyse import noise_floor
from nwor_bench.analysis.invariants import counter_checks, find_violations
from nwor_bench.records.store import RunData
from nwor_bench.records.types import AA, BatchRecord, Cell, CellResult, Phase, Verdict, WindowRecord
from nwor_bench.run.budget import half_widths

pytestmark = pytest.mark.slow  # whole runs


EFFECTS = {"stage x graph": 0.972, "control x off": 0.985}
WHOLE = {"graph": 0.972, "control": 0.985}


@pytest.fixture(scope="module")
def run() -> RunData:
    return interleaved_run(Planted(EFFECTS), whole=WHOLE)


def cell_of(run: RunData, cell: Cell) -> CellResult:
    return next(found for found in summarised(run) if found.cell == cell)


def interleaved(record: WindowRecord | BatchRecord) -> bool:
    return record.batch >= FIRST_BATCH


def test_the_ratio_is_that_of_windows(run: RunData) -> None:
    cell = cell_of(run, STAGE_GRAPH)
    assert (cell.interleaved, cell.compared, cell.verdict) == ("windows", "device_ms", "FASTER")
    assert (cell.groups, cell.batches) == (96, 3)
    assert cell.ratio is not None
    assert cell.sure is not None
    assert cell.whole is not None
    assert cell.ratio.value == pytest.approx(0.972, abs=0.002)
    assert cell.ratio.half_width < 0.002
    assert cell.whole.value == pytest.approx(0.972, abs=0.01)
    assert cell.whole.half_width > 4 * cell.ratio.half_width
    assert cell.p_value_holm is not None
    assert cell.p_value_holm < 0.001
    assert cell.sure.low < cell.ratio.low
    floor = noise_floor(summarised(run))
    assert floor is not None
    assert (floor["compared"], floor["groups"], floor["blocks"]) == ("device_ms", 96, 3)
    assert floor["floor"] < 0.003
    untimed = kept(run, lambda record: record.block == 0 or interleaved(record))
    cell = cell_of(untimed, STAGE_GRAPH)
    assert (cell.interleaved, cell.ratio_batches, cell.verdict) == ("windows", None, "FASTER")


def test_a_slow_down_of_a_third_of_a_per_cent_is_called_slower() -> None:
    """The A/A arm in the same run is SAME, by the margin of 1 %."""
    run = interleaved_run(Planted({"stage x graph": 1.003}, noise=0.002), whole={"graph": 1.003})
    cell = cell_of(run, STAGE_GRAPH)
    assert cell.verdict == Verdict.SLOWER
    assert cell.ratio_ci_low < 1.003 < cell.ratio_ci_high
    assert cell_of(run, replace(OFF, arm=AA)).verdict == Verdict.SAME


def test_whole_batches_decide_if_they_disagree() -> None:
    cell = cell_of(interleaved_run(Planted(EFFECTS), whole={**WHOLE, "graph": 1.1}), STAGE_GRAPH)
    assert (cell.interleaved, cell.compared) == ("batches", "window_ms")
    assert cell.ratio_to_off == pytest.approx(1.1, abs=0.02)
    assert cell.ratio_to_off == cell.ratio_batches
    assert cell.verdict == Verdict.SLOWER
    assert "disagree" in (cell.reason or "")


def test_too_few_groups_and_blocks_say_how_many_groups_there_are() -> None:
    run = interleaved_run(Planted(EFFECTS), batches=1, groups=16, whole=WHOLE)
    few = kept(run, lambda record: record.block < 2 or interleaved(record))
    cell = cell_of(few, STAGE_GRAPH)
    assert (cell.verdict, cell.groups, cell.ratio_ci_low) == (Verdict.AMBIGUOUS, 2, None)
    assert "groups of windows are 2" in (cell.reason or "")


def test_counts_take_a_cells_windows_of_both_kinds(run: RunData) -> None:
    own = [w for w in run.windows if w.cell == STAGE_GRAPH and w.block > 0]
    assert any(map(interleaved, own))
    assert not all(map(interleaved, own))
    cell = cell_of(run, STAGE_GRAPH)
    assert cell.windows == len(own)
    assert cell.nwor_total_staged == sum(w.staged_tokens for w in own)
    assert cell.nwor_total_committed == sum(w.committed_tokens for w in own)
    assert cell.draft_tokens == sum(w.draft_tokens for w in own)
    assert cell.accepted_tokens == sum(w.accepted_tokens for w in own)
    turns = sum(map(interleaved, own))
    timed = [b for b in run.batches if b.cell == STAGE_GRAPH and b.phase == Phase.TIMED]
    hits = sum(b.scv_counters["scv_graph_hits"] for b in timed)
    assert cell.scv_graph_hits == turns + hits
    assert (cell.scv_status, cell.nwor_fallback_count) == ("ok", 3)


def test_fallbacks_in_turn_are_counted_and_leave_their_groups_out(run: RunData) -> None:
    def early(window: WindowRecord) -> bool:
        own = window.cell == STAGE_GRAPH and interleaved(window) and window.block == 1
        return own and window.position == 1

    changed = change_windows(
        run, early, fallback_reason="mixed_batch", staged_tokens=0, committed_tokens=0,
        rejected_tokens=0, stage_operations=0,
    )  # fmt: skip
    windows = [w for w in changed.windows if w.batch == FIRST_BATCH]
    changed = of_first(
        staged_tokens=sum(w.staged_tokens for w in windows),
        committed_tokens=sum(w.committed_tokens for w in windows),
    )(changed)
    cell = cell_of(changed, STAGE_GRAPH)
    number = sum(map(early, run.windows))
    assert cell.fallbacks == {"mixed_batch": 3 + number}
    assert 0 < (cell.groups or 0) < 96


def test_control_that_never_acted_is_ineffective(run: RunData) -> None:
    assert cell_of(run, CONTROL).verdict == Verdict.FASTER
    idle = change_windows(run, lambda w: w.cell == CONTROL, control_tokens=0)
    cell = cell_of(idle, CONTROL)
    assert (cell.verdict, cell.ratio_to_off) == (Verdict.INEFFECTIVE, None)


def staged(number: int) -> Callable[[RunData], RunData]:
    def change(run: RunData) -> RunData:
        return change_windows(
            run,
            lambda w: w.batch == FIRST_BATCH and w.window == 1,
            staged_tokens=number, committed_tokens=number, stage_operations=30 * number,
        )  # fmt: skip

    return change


def of_first(**changes: object) -> Callable[[RunData], RunData]:
    return lambda run: change_batches(run, lambda b: b.batch == FIRST_BATCH, **changes)


@pytest.mark.parametrize(
    ("change", "words", "blamed"),
    [
        (of_first(vllm_draft_tokens=3), "3 in vLLM", "stage x graph"),
        (of_first(vllm_accepted_tokens=3), "accepted tokens", "stage x graph"),
        (of_first(accepted_tokens=3), "its batch record", "control x off"),
        (of_first(rank_disagreement="rank 1 counted less"), "rank 1", "stage x off"),
        (staged(4), "4 staged tokens in mode off", "off x off"),
    ],
)
def test_counts_that_do_not_add_up(
    run: RunData, change: Callable[[RunData], RunData], words: str, blamed: str
) -> None:
    assert faults_of(run) == []
    assert all(check.agrees for check in counter_checks(run))
    found = find_violations(change(run))
    assert any(words in each.text and each.cell.label == blamed for each in found)
    assert words == "4 staged tokens in mode off" or all(
        not each.cell.is_baseline and each.cell.arm is None for each in found
    )


def test_a_stage_window_that_staged_a_part_is_a_fault(run: RunData) -> None:
    turn = next(w for w in run.windows if w.cell == STAGE_GRAPH and interleaved(w))
    changed = change_windows(
        run, lambda w: w is turn, staged_tokens=6, committed_tokens=5, rejected_tokens=1,
        stage_operations=180,
    )  # fmt: skip
    assert any("6 staged of 8 draft tokens" in each.text for each in find_violations(changed))
    assert cell_of(changed, STAGE_GRAPH).verdict == Verdict.INVALID


def test_other_tokens_than_those_of_off_are_a_fault(run: RunData) -> None:
    same = of_first(prompt_digest="prompts-1")(run)
    assert faults_of(same) == []
    other = of_first(token_digests=("x", "b1"))
    found = find_violations(other(same))
    assert {each.cell for each in found} >= {STAGE_GRAPH, CONTROL}
    assert OFF not in {each.cell for each in found}
    assert "1 of 2 requests gave other tokens" in found[0].text
    assert faults_of(other(run)) == []  # other prompts


def test_the_stopping_rule_sees_groups_up_to_its_block(run: RunData) -> None:
    few, all_ = half_widths(run, 6), half_widths(run, 12)
    assert len(few) == len(all_) == 7
    assert max(w for w in all_ if w is not None) < 0.003
    assert sum(w for w in few if w) > 1.2 * sum(w for w in all_ if w)
