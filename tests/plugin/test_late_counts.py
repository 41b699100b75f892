"""Windows counted after the fact, without waiting for the device, and kept until a drain."""

from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nwor_bench.plugin import late_counts
from nwor_bench.plugin import step as of_step
from nwor_bench.plugin.late_counts import (
    COUNTED_A_STEP,
    MAX_PENDING,
    READ_S,
    SEALED,
    Coming,
    LateCounts,
    read_without_waiting,
)
from nwor_bench.plugin.step import Accumulator, Step, per_position
from nwor_bench.records.types import WindowRecord
from nwor_bench.records.window_order import WindowPlace

LAYERS, DRAFTS = 3, 4


def step(requests: str, sampled: list[int], drafts: int | list[int] = 0, **values: Any) -> Step:
    """A step of "a b": requests by letter, which sampled so many tokens; 0 drafts: a prefill."""
    names = [f"{name}-x" for name in requests.split()]
    each = np.full(len(names), drafts, dtype=np.int32)
    return Step(
        started=values.pop("started", 0.0),
        req_ids=names,
        num_sampled=torch.tensor(sampled, dtype=torch.int32),
        drafts=each if each.any() else None,
        **values,
    )


class Counted:
    """Late counts, and what they recorded."""

    def __init__(self, *steps: Step) -> None:
        self.accumulator = Accumulator()
        self.late = LateCounts(self.accumulator, LAYERS)
        self.add(*steps)

    def add(self, *steps: Step) -> None:
        for one in steps:
            self.late.add(one)

    def windows(self, lengths: dict[str, int] | None = None) -> list[WindowRecord]:
        """All of them, after waiting for the device."""
        self.late.resolve(lengths)
        return list(self.accumulator.drain())

    def numbers(self, name: str, lengths: dict[str, int] | None = None) -> list[Any]:
        return [getattr(window, name) for window in self.windows(lengths)]


def test_a_staged_window_is_settled_from_the_devices_counts() -> None:
    (window,) = Counted(step("a b", [5, 1], 4, staged_tokens=8)).windows()
    assert window.num_reqs == 2
    assert (window.draft_tokens, window.accepted_tokens) == (8, 4)
    assert (window.committed_tokens, window.rejected_tokens) == (4, 4)
    assert window.stage_operations == 8 * LAYERS
    assert window.accepted_per_position == (1, 1, 1, 1)
    assert window.drafts_per_position == (2, 2, 2, 2)
    assert window.uncounted_draft_tokens == 0


def test_prefill_only_requests_accept_nothing_and_acceptance_never_exceeds_drafts() -> None:
    (window,) = Counted(step("a b c", [0, 3, 9], [0, 2, 4])).windows()
    assert (window.accepted_tokens, window.num_reqs) == (0 + 2 + 4, 2)


def test_windows_past_a_requests_last_token_are_counted_apart() -> None:
    """a returned 5 tokens: 1, 3, and 1 of the 2 of its last window; nobody got that draft. Its next
    window ran although it had finished. c stopped with the first token of a window."""
    counted = Counted(
        step("a b c", [1, 1, 1]),
        step("a b c", [3, 2, 5], 4),
        step("a b", [2, 5], 4),
        step("b a", [2, 4], 4),
    )
    windows = counted.windows({"a": 5, "b": 100, "c": 2})
    assert [w.uncounted_draft_tokens for w in windows] == [0, 0, 4]
    assert [w.uncounted_accepted_tokens for w in windows] == [0, 0, 3]
    assert [w.undelivered_tokens for w in windows] == [4, 1, 0]
    assert windows[2].accepted_per_position == (1, 0, 0, 0)  # only b's
    assert windows[2].accepted_tokens == 1 + 3
    assert counted.late.by_request == {"a": [2, 3, 2], "b": [3, 6, 6], "c": [1, 4, 0]}


def test_in_a_server_the_scheduler_says_what_nobody_got() -> None:
    counted = Counted(step("a", [3], 4, undelivered=2), step("a", [3], 4))
    counted.late.in_server = True
    counted.late.resolve(None)
    undelivered = [window.undelivered_tokens for window in counted.accumulator.windows]
    assert undelivered == [2, None]


KINDS = {
    "w": ("a", [1], 2), "p": ("a", [1]), "b": ("a b", [1, 0], [2, 0])
}  # fmt: skip
"""A window, a prefill, and a window beside a prefill."""


@pytest.mark.parametrize(
    ("steps", "timed"),
    [
        # Two windows must come before one that is timed, and nobody saw the end of the last.
        ("wwww", "..t."),
        ("wwwpwwww", "..t..t."),
        # Beside a prefill a window lasts as long as that; those behind it are not timed either.
        ("wwbwww", "..t..."),
    ],
)
def test_a_window_lasts_until_the_next_step_begins(steps: str, timed: str) -> None:
    counted = Counted()
    for place, kind in enumerate(steps):
        began = 10.0 + place / 4
        counted.late.step_started(began)
        counted.add(
            step(*KINDS[kind], started=began, num_tokens=3 if kind == "w" else 30,
                 only_verifies=kind == "w")
        )  # fmt: skip
    assert counted.numbers("wall_ms", {}) == [250.0 if at == "t" else None for at in timed]
    counted.late.step_started(99.0)  # the next batch is no part of it
    assert counted.windows() == []


BATCH = 5_000
"""Steps of a long batch, more than twice what may wait on the device."""


@pytest.mark.slow
def test_a_long_batch_is_counted_exactly_with_few_tensors_on_the_device() -> None:
    """b ends after 10 tokens, with two windows past its end; a goes on to the last step."""
    counted, alive = Counted(), []
    for number in range(BATCH):
        one = step("a b", [1, 2], 4) if number < 7 else step("a", [1], 4)
        alive.append(ref(one.num_sampled))
        counted.add(one)
        del one
    assert sum(tensor() is not None for tensor in alive) <= MAX_PENDING
    windows = counted.windows({"a": BATCH, "b": 10})
    assert len(windows) == BATCH
    assert [w.uncounted_draft_tokens for w in windows[:7]] == [0] * 5 + [4, 4]
    assert [w.uncounted_accepted_tokens for w in windows[:7]] == [0] * 5 + [1, 1]
    assert sum(w.uncounted_draft_tokens for w in windows) == 8


def test_a_request_that_starts_again_has_what_the_scheduler_says() -> None:
    """Preempted with a step in flight whose tokens the scheduler dropped: 3 of 8 are left."""
    counted = Counted(step("a", [3], 4), step("a", [5], 4))  # the 5 are sampled again
    counted.late.note_requests(set(), {"a-x": 3})
    counted.add(*(step("a", [n], 4) for n in (1, 4, 1)))  # the last one is past the end
    assert counted.numbers("uncounted_draft_tokens", {"a": 8})[2:] == [0, 0, 4]


def test_only_the_last_windows_are_kept_if_nobody_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_step, "MAX_UNDRAINED", 30)
    monkeypatch.setattr(late_counts, "MAX_PENDING", 10)
    counted = Counted(*(step("a", [1], 4) for _ in range(500)))
    assert len(counted.windows()) == 30
    # Now somebody drains: from here on nothing is left out.
    counted.add(*(step("b", [1], 4) for _ in range(500)))
    assert counted.numbers("uncounted_draft_tokens", {"b": 400}) == [0] * 400 + [4] * 100


@given(
    requests=st.lists(
        st.integers(0, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=8
    )
)
def test_per_position_counts_requests(requests: list[tuple[int, int]]) -> None:
    drafts, kept = tuple(n for n, _ in requests), [m for _, m in requests]
    positions = range(max(drafts, default=0))
    accepted_at, drafted_at = per_position(drafts, kept)
    assert list(accepted_at) == [sum(m > j for m in kept) for j in positions]
    assert list(drafted_at) == [sum(n > j for n in drafts) for j in positions]


# Without waiting for the device.


class Mark:
    """A CUDA event: has the device come to it?"""

    passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        assert self.passed, "waited for the device"

    def elapsed_time(self, _: "Mark") -> float:
        return 3.0


class SlowCopy(Coming):
    """A copy that arrives when a test says so."""

    there = False

    def is_there(self) -> bool:
        return self.there


class Timed(Counted):
    """Steps of one window each, with marks of their starts."""

    def run(self, number: int, accepted: int = 1, **values: Any) -> list[Mark]:
        marks = []
        for _ in range(number):
            marks.append(Mark())
            self.late.step_started(0.0, marks[-1])
            self.add(
                step("a", [accepted + 1], DRAFTS, began=marks[-1], num_tokens=DRAFTS + 1,
                     only_verifies=True, staged_tokens=DRAFTS, **values)
            )  # fmt: skip
        return marks

    def finish(self, marks: list[Mark]) -> None:
        """The device has passed these."""
        for mark in marks:
            mark.passed = True

    def recorded(self, name: str) -> list[Any]:
        return [getattr(window, name) for window in self.accumulator.windows]


def test_only_steps_that_the_device_has_finished_are_read() -> None:
    timed = Timed()
    late = timed.late
    timed.finish(timed.run(10)[:6])  # the sixth step's start ends the fifth step
    late.read_finished()
    assert late.is_reading
    late.read_finished()
    assert not late.is_reading
    late.settle(100)
    late.read_finished()
    assert not late.is_reading
    assert timed.recorded("device_ms") == [None, None, 3.0, 3.0, 3.0]


def test_a_copy_on_its_way_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Timed()
    late = timed.late
    timed.finish(timed.run(4))
    begin = late._reader.begin
    slow = lambda *given: SlowCopy(**vars(begin(*given)))  # noqa: E731
    monkeypatch.setattr(late._reader, "begin", slow)
    late.read_finished()
    for there, windows in ((False, 0), (False, 0), (True, 3)):
        monkeypatch.setattr(SlowCopy, "there", there)
        late.read_finished()
        late.settle(100)
        assert (late.is_reading, len(timed.accumulator.windows)) == (not there, windows)


def test_nothing_is_lost_or_changes_its_order_when_all_is_read_at_once() -> None:
    timed = Timed()
    for accepted in (1, 2, 3, 4):
        timed.finish(timed.run(2, accepted))
        if accepted == 2:
            timed.late.read_finished()  # a copy of the first three is on its way
    timed.late.resolve(None)
    assert timed.recorded("accepted_tokens") == [1, 1, 2, 2, 3, 3, 4, 4]


def test_counters_are_read_as_they_stand_behind_a_sealed_step() -> None:
    """Commits of later steps may be running: their rows belong to the next reading."""
    timed = Timed()
    late = timed.late
    flags, seen = torch.tensor([0, 7], dtype=torch.int32), []
    written = torch.zeros(LAYERS, dtype=torch.int32)
    late.read_with(flags, seen.append, written)
    marks = []
    for _ in range(SEALED + 3):
        written += 1
        marks += timed.run(1, certain=0)
    timed.finish(marks)
    late.read_finished()
    late.read_finished()
    late.settle(100)
    assert seen == [[0, 7]]
    assert timed.recorded("committed_tokens") == [1] * SEALED
    late.resolve(None)
    assert timed.recorded("committed_tokens") == [1] * (SEALED + 3)


def test_a_request_with_more_tokens_than_its_window_has_is_reported() -> None:
    timed, calls = Timed(), []
    timed.late.on_overcount = lambda: calls.append(1)
    for accepted in (DRAFTS, DRAFTS + 1):
        timed.run(1, accepted)
        timed.late.resolve(None)
        assert len(calls) == accepted - DRAFTS


def test_a_server_times_only_interleaved_windows_and_keeps_no_request() -> None:
    timed = Timed()
    late = timed.late
    late.in_server = True
    late.note_requests([], {"a-x": 7})
    timed.run(4)
    timed.finish([one.ended for one in list(late._pending)[:3]])
    place = WindowPlace(1, 7, 3, 4, 2)
    late._pending[2].place = place
    late.resolve(None)
    windows = list(timed.accumulator.windows)
    places = [(w.cell_number, w.group, w.run, w.run_length, w.position) for w in windows]
    assert places == [(None,) * 5, (None,) * 5, (1, 7, 3, 4, 2), (None,) * 5]
    assert timed.recorded("device_ms") == [None, None, 3.0, None]
    assert [(w.committed_tokens, w.rejected_tokens) for w in windows] == [(1, DRAFTS - 1)] * 4
    assert timed.recorded("drafts_per_position") == [()] * 4
    assert late._sampled_before == {}


def test_the_step_before_a_pause_has_no_time() -> None:
    timed = Timed()
    marks = timed.run(4)
    timed.late.went_idle()
    timed.finish([*marks, *timed.run(1)])
    assert timed.numbers("device_ms") == [None, None, 3.0, None, None]


class Late:
    """Counts how it is read."""

    is_reading = False

    def __init__(self) -> None:
        self.seen: list[str] = []

    def resolve(self, lengths: Any) -> None:
        assert lengths is None
        self.seen.append("wait")

    def read_finished(self) -> None:
        self.seen.append("look")

    def settle(self, most: int) -> None:
        assert most == COUNTED_A_STEP


def test_a_busy_server_never_waits_and_an_idle_one_reads_the_rest() -> None:
    late, now = Late(), [0.0]
    execute = read_without_waiting(late, lambda: now[0])(lambda step: "output")

    def seen(tokens: int, after: float) -> list[str]:
        now[0] += after
        late.seen.clear()
        assert execute(SimpleNamespace(total_num_scheduled_tokens=tokens)) == "output"
        return list(late.seen)

    assert seen(8, READ_S / 2) == []
    assert seen(8, READ_S) == ["look"]
    assert seen(8, 0.01) == []
    late.is_reading = True
    assert seen(8, 0.01) == ["look"]
    assert seen(0, 0.01) == ["wait"]
