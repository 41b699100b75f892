"""Interleaving in a server: prefills end a group, guards end staging, every rank does the same."""

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from live_windows import IDLE, PREFILL, WINDOWS, counts_of, next_place, switching

from nwor_bench.plugin.interleaving import LiveModes, miscount
from nwor_bench.records.fallback_reasons import Fault, Guard
from nwor_bench.records.types import SETTLING, NworMode, ScvMode


class FakeHook:
    """Remembers the modes that it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, NworMode, ScvMode]] = []
        self.interleaving: Any = None
        self.validator = SimpleNamespace(counters=Counter(), fallbacks=Counter())

    @property
    def mode(self) -> NworMode:
        return self.calls[-1][1]

    def set_modes(self, nwor_mode: NworMode, scv_mode: ScvMode) -> None:
        self.calls.append(("set", nwor_mode, scv_mode))

    def switch_to(self, nwor_mode: NworMode, scv_mode: ScvMode) -> None:
        self.calls.append(("place", nwor_mode, scv_mode))

    def interleave(self, interleaving: Any) -> None:
        self.interleaving = interleaving


def started(settled: bool = True) -> tuple[LiveModes, FakeHook]:
    hook = FakeHook()
    interleaving = LiveModes(hook, ScvMode.GRAPH)
    interleaving.start()
    if settled:
        settle(interleaving)
    return interleaving, hook


def settle(interleaving: LiveModes) -> None:
    for _ in range(SETTLING - 1):  # the first window of a group is not used either
        assert next_place(interleaving, WINDOWS) is None


def test_both_modes_are_set_once_and_the_turns_begin_in_off() -> None:
    interleaving, hook = started(settled=False)
    off = ("set", NworMode.OFF, ScvMode.OFF)
    assert hook.calls == [off, ("set", NworMode.STAGE, ScvMode.GRAPH), off, off]
    assert hook.interleaving is interleaving


def test_windows_are_interleaved_in_groups_of_eight() -> None:
    interleaving, hook = started()
    given = []
    for _ in range(400):
        given.append(next_place(interleaving, WINDOWS))
        assert hook.mode is (NworMode.STAGE if given[-1].cell == 1 else NworMode.OFF)
    assert [place.group for place in given] == [n // 8 for n in range(400)]
    assert {tuple(place.cell for place in given[n : n + 8]) for n in range(0, 400, 8)} == {
        (0, 0, 1, 1, 1, 1, 0, 0),
        (1, 1, 0, 0, 0, 0, 1, 1),
        (0, 0, 2, 2, 2, 2, 0, 0),
        (2, 2, 0, 0, 0, 0, 2, 2),
    }
    assert Counter(place.cell for place in given) == {0: 200, 1: 160, 2: 40}
    for first in range(0, 400, 40):  # of each five groups one is A/A
        assert sum(place.cell == 2 for place in given[first : first + 40]) == 4


@pytest.mark.parametrize("other", [PREFILL, IDLE], ids=["prefill", "idle"])
@pytest.mark.parametrize("before", range(10))
def test_a_step_that_is_more_than_windows_ends_the_group(other: Any, before: int) -> None:
    interleaving, _ = started()
    given = [next_place(interleaving, WINDOWS) for _ in range(before)]
    assert next_place(interleaving, other) is None
    settle(interleaving)
    after = next_place(interleaving, WINDOWS)
    assert (after.run, after.position) == (0, 0)
    assert after.group == len({place.group for place in given})


def test_every_rank_draws_the_same_turns_whatever_its_windows_were() -> None:
    draw, ranks = random.Random(1), [started()[0] for _ in range(2)]
    for _ in range(2000):
        step = PREFILL if draw.random() < 0.05 else WINDOWS
        first, second = (next_place(interleaving, step) for interleaving in ranks)
        assert first == second


@pytest.mark.parametrize(
    ("reason", "guard"),
    [
        ("commit:planted", Guard.COMMIT_REFUSED),
        ("rank_1:commit:RuntimeError", Guard.COMMIT_REFUSED),
        ("device_refused:slot", Guard.COMMIT_REFUSED),
        ("rank_1:device_refused:slot", Guard.COMMIT_REFUSED),
        ("staging_stopped", Guard.COMMIT_REFUSED),
        (Fault.RANKS_DIFFER.value, Guard.RANKS_DIFFER),
        ("counts_do_not_add_up:staged_more_than_drafted", Guard.COUNTS),
        ("rank_0:counts_do_not_add_up:x", Guard.COUNTS),
        (None, None),
        ("kv_transfer", None),
        ("stage:overflow", None),
        ("step_not_finished", None),
        ("validate:sampled_ids_shape", None),
    ],
)
def test_which_reasons_stop_staging(reason: str | None, guard: Guard | None) -> None:
    interleaving, hook = started()
    while hook.mode is not NworMode.STAGE:
        next_place(interleaving, WINDOWS)
    interleaving.ended(reason)
    assert interleaving.stopped is guard
    given = [next_place(interleaving, WINDOWS) for _ in range(40)]
    if guard is None:
        assert NworMode.STAGE in [mode for _, mode, _ in hook.calls[-20:]]
        assert None not in given
    else:
        assert hook.calls[-1] == ("set", NworMode.OFF, ScvMode.OFF)
        assert hook.calls[-2][0] == "place"  # once
        assert given == [None] * 40


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, None),
        ({"staged_tokens": 0, "committed_tokens": 0, "rejected_tokens": 0}, None),
        ({"accepted_tokens": 9}, "accepted_more_than_drafted"),
        ({"rejected_tokens": 5}, "staged_is_not_committed_and_rejected"),
        ({"committed_tokens": 9, "rejected_tokens": -1}, "staged_is_not_committed_and_rejected"),
        ({"staged_tokens": 9, "rejected_tokens": 7}, "staged_more_than_drafted"),
        ({"accepted_tokens": 3}, "committed_is_not_accepted"),
    ],
)
def test_counts_that_do_not_add_up_raise_the_alarm(
    changed: dict[str, int], problem: str | None
) -> None:
    counts = counts_of(**changed)
    assert miscount(counts) == problem
    interleaving, _ = started()
    interleaving.check(counts)
    interleaving.check(counts_of())
    assert interleaving.alarm == (problem and f"{Guard.COUNTS}:{problem}")
    assert interleaving.stopped is None  # the ranks vote on it in the next staged window


def test_the_voted_alarm_stops_staging_and_is_not_raised_again() -> None:
    interleaving, _ = started()
    interleaving.overcounted()
    interleaving.ended(interleaving.alarm)
    interleaving.overcounted()
    assert (interleaving.stopped, interleaving.alarm) == (Guard.COUNTS, None)


def test_in_a_batch_a_step_with_a_prefill_runs_in_mode_off() -> None:
    """A window without a place is recorded as off x off: seen staged on an H100, where a request
    waited for another's blocks."""
    hook = FakeHook()
    interleaving = switching(hook, [("off", "off"), ("stage", "graph")])
    interleaving.start()
    while hook.mode is not NworMode.STAGE or hook.calls[-1][0] != "place":
        assert next_place(interleaving, WINDOWS) is not None
    counters = interleaving.cells[1].counters
    assert hook.validator.counters is counters
    assert next_place(interleaving, PREFILL) is None
    assert hook.mode is NworMode.OFF
    assert hook.validator.counters is not counters
    assert next_place(interleaving, PREFILL) is None
    assert hook.calls[-2:].count(("place", NworMode.OFF, ScvMode.OFF)) == 1
    assert next_place(interleaving, WINDOWS) is None  # it still waits for the prefill
    place = next_place(interleaving, WINDOWS)
    assert place is not None
    assert hook.mode is interleaving.cells[place.cell].nwor_mode
