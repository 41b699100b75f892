"""Windows to groups: what counts, what is left out and why."""

from dataclasses import replace
from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interleaved_run import CONTROL, OFF, STAGE_GRAPH, group_windows
from synthetic_run import AA_CELL, CELLS

from nwor_bench.analysis.groups import Group, find_groups, pair_of
from nwor_bench.records.cell import Drafts
from nwor_bench.records.fallback_reasons import LeftOut
from nwor_bench.records.types import Cell, NworMode, WindowRecord

PAIR = (OFF, STAGE_GRAPH)


def left_out(windows: list[WindowRecord]) -> LeftOut | None:
    found = find_groups(windows)
    reasons = [reason for own in found.left_out.values() for reason in own]
    assert len(found.counted) + len(reasons) == 1
    return reasons[0] if reasons else None


def only(windows: list[WindowRecord]) -> Group:
    (group,) = find_groups(windows).counted
    return group


def changed(place: int, **changes: object) -> list[WindowRecord]:
    """A group of runs of four, of which one window differs; 16 windows, the second run from 4."""
    windows = group_windows(PAIR, 4)
    return [replace(w, **changes) if n == place else w for n, w in enumerate(windows)]


def test_a_quiet_group_counts_without_its_first_windows() -> None:
    group = only(group_windows(PAIR, 4))
    assert (group.host, group.device, group.run_length) == (0, 0, 4)
    assert (group.pair.reference, group.pair.treated) == PAIR


@pytest.mark.parametrize("place", [0, 4, 8, 12])
def test_what_happens_in_a_settling_window_does_not_matter(place: int) -> None:
    windows = changed(place, device_ms=900.0, wall_ms=900.0, num_reqs=1, draft_tokens=3)
    assert only(windows).device == 0


@pytest.mark.parametrize(
    ("place", "changes", "reason"),
    [
        (5, {"fallback_reason": "mixed_batch", "staged_tokens": 0}, LeftOut.FALLBACK),
        (5, {"num_reqs": 1}, LeftOut.BATCH_SIZE),
        (2, {"draft_tokens": 7}, LeftOut.BATCH_SIZE),
        (2, {"wall_ms": None}, LeftOut.UNTIMED),
        (2, {"device_ms": None}, LeftOut.UNTIMED),
        (2, {"run_length": 8}, LeftOut.INTERRUPTED),
    ],
)
def test_left_out(place: int, changes: dict[str, object], reason: LeftOut) -> None:
    assert left_out(changed(place, **changes)) is reason


def test_a_group_of_another_form_is_incomplete_and_control_must_act() -> None:
    whole = group_windows(PAIR, 4)
    for missing in range(16):
        assert left_out([w for n, w in enumerate(whole) if n != missing]) is LeftOut.INTERRUPTED
    a, b = OFF, STAGE_GRAPH  # A A B B does not cancel drift
    windows = [
        replace(window, nwor_mode=str(cell.nwor_mode), scv_mode=str(cell.scv_mode))
        for window, cell in zip(group_windows(PAIR, 2), [a, a, a, a, b, b, b, b], strict=True)
    ]
    assert left_out(windows) is LeftOut.INTERRUPTED
    windows = group_windows((OFF, CONTROL), 2)
    assert left_out(windows) is None
    assert left_out([replace(w, control_tokens=0) for w in windows]) is LeftOut.FALLBACK
    outside = find_groups([replace(w, group=None, position=None) for w in windows])
    assert (outside.counted, outside.left_out) == ((), {})


ZERO, TWO, FOUR = (replace(OFF, arm=Drafts(k)) for k in (0, 2, 4))
STAGED = replace(FOUR, nwor_mode=NworMode.STAGE)


@pytest.mark.parametrize(
    ("cells", "reference"),
    [
        ((OFF, STAGE_GRAPH), OFF),
        ((OFF, AA_CELL), OFF),
        ((OFF, CONTROL), OFF),
        ((CONTROL, STAGE_GRAPH), CONTROL),
        ((ZERO, TWO), ZERO),
        ((ZERO, AA_CELL), ZERO),
        ((FOUR, STAGED), FOUR),
        ((ZERO, STAGED), ZERO),
        ((OFF,), None),
        ((STAGE_GRAPH, CELLS[1]), None),
        ((OFF, CONTROL, STAGE_GRAPH), None),
        ((FOUR, TWO), None),
    ],
)
def test_the_reference_of_a_pair(cells: tuple[Cell, ...], reference: Cell | None) -> None:
    for order in (cells, cells[::-1]):
        pair = pair_of(order)
        assert (pair and pair.reference) == reference
        if pair is not None and STAGED in cells:
            assert pair.is_over_stock == (FOUR in cells)


def test_groups_without_a_device_clock_are_left_out_beside_others_that_have_one() -> None:
    timed = group_windows(PAIR, 2)
    host_only = [replace(w, group=1, device_ms=None) for w in group_windows(PAIR, 2)]
    found = find_groups([*timed, *host_only])
    assert len(found.counted) == 1
    assert next(iter(found.left_out.values())) == {LeftOut.UNTIMED: 1}
    assert only(host_only).device is None


@given(
    effect=st.floats(-0.5, 0.5),
    slope=st.floats(-0.1, 0.1),
    length=st.sampled_from([2, 4, 8]),
    reversed_=st.booleans(),
)
def test_drift_that_is_linear_in_log_time_cancels(
    effect: float, slope: float, length: int, reversed_: bool
) -> None:
    windows = [
        replace(w, device_ms=time, wall_ms=time)
        for n, w in enumerate(group_windows(PAIR, length, STAGE_GRAPH if reversed_ else OFF))
        for time in [10 * exp(slope * n + (effect if w.cell == STAGE_GRAPH else 0))]
    ]
    assert only(windows).device == pytest.approx(effect, abs=1e-9)


def drafts_group(length: int = 4) -> list[WindowRecord]:
    """k = 0 and k = 2 of three requests; nothing differs but the count."""
    return [
        replace(
            window, arm=str((TWO if treated else ZERO).arm), nwor_mode="off", scv_mode="off",
            staged_tokens=0, committed_tokens=0, rejected_tokens=0, num_reqs=3,
            draft_tokens=6 * treated, accepted_tokens=3 * treated,
        )
        for window in group_windows(PAIR, length)
        for treated in [window.cell == STAGE_GRAPH]
    ]  # fmt: skip


def slower(length: int, *positions: int) -> Group:
    """A group of draft counts in whose windows at these places k = 2 takes twice as long."""
    return only(
        [
            replace(w, wall_ms=20.0, device_ms=20.0)
            if w.arm == "k=2" and w.position in positions
            else w
            for w in drafts_group(length)
        ]
    )


@pytest.mark.parametrize("length", [3, 4, 5])
def test_draft_counts_are_compared_without_both_ends_of_their_runs(length: int) -> None:
    """The first window follows a switch, the last one drafts for the next run."""
    group = slower(length, 0, length - 1)
    assert (group.host, group.device, group.num_reqs) == (0, 0, 3)
    assert group.tokens == pytest.approx(log(2))  # 3 and 3 accepted over 3
    assert slower(length, 1).device == pytest.approx(log(2) / (length - 2))
    assert slower(length, *range(1, length - 1)).host == pytest.approx(log(2))
    old = slower(2, 1)  # older groups of runs of two have only first windows
    assert (old.host, old.switch) == (0, None)
    assert slower(2, 0).host == pytest.approx(log(2))


def test_the_first_window_over_the_compared_ones_is_what_a_switch_costs() -> None:
    """Both runs of k = 2 begin with twice the time, those of k = 0 do not."""
    assert slower(4).switch == 0
    assert slower(4, 0).switch == pytest.approx(log(2) / 2)
    assert slower(4, 3).switch == 0  # the last window is neither
    assert slower(4, 1).switch == pytest.approx(-log(2) / 4)
    untimed = [replace(w, device_ms=None) if w.position == 0 else w for w in drafts_group()]
    group = only(untimed)
    assert (group.device, group.switch) == (0, None)


@pytest.mark.parametrize("place", [0, 5, 7])
def test_a_window_that_verified_another_count_leaves_its_group_out(place: int) -> None:
    windows = drafts_group()
    windows[place] = replace(windows[place], draft_tokens=3)
    assert left_out(windows) in (LeftOut.DRAFTS, LeftOut.BATCH_SIZE)
    every = [replace(w, draft_tokens=w.draft_tokens // 2) for w in drafts_group()]
    assert left_out(every) is not None


@pytest.mark.parametrize("place", range(8))
def test_of_a_staged_count_the_first_window_of_each_run_is_left_out(place: int) -> None:
    """Modes alternate, not counts: the first window follows the switch, the last one counts."""
    windows = [replace(w, draft_tokens=4 * w.num_reqs) for w in group_windows((FOUR, STAGED), 2)]
    windows[place] = replace(windows[place], wall_ms=20.0, device_ms=20.0)
    group = only(windows)
    assert group.pair.is_over_stock
    counts = place % 2 == 1
    sign = 1 if place in (3, 5) else -1
    assert group.host == pytest.approx(sign * log(2) / 2 if counts else 0)
