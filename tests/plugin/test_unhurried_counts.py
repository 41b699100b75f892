"""Late counts read without waiting for the device, and recorded a few at a time."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nwor_bench.plugin.late_counts import (
    COUNTED_A_STEP,
    READ_S,
    SEALED,
    Coming,
    LateCounts,
    read_without_waiting,
)
from nwor_bench.plugin.step import Accumulator, Step
from nwor_bench.records.window_order import WindowPlace

DRAFTS = 4


class Mark:
    """A CUDA event: has the device come to it?"""

    def __init__(self) -> None:
        self.passed = False

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


def counted() -> tuple[LateCounts, Accumulator]:
    accumulator = Accumulator()
    return LateCounts(accumulator, num_layers=3), accumulator


def run_steps(
    late: LateCounts, number: int, accepted: int = 1, certain: int | None = None
) -> list[Mark]:
    """Steps of one window each; the marks of their starts."""
    marks = []
    for _ in range(number):
        marks.append(Mark())
        late.step_started(0.0, marks[-1])
        late.add(
            Step(
                started=0.0,
                began=marks[-1],
                num_tokens=DRAFTS + 1,
                only_verifies=True,
                req_ids=["a-1"],
                drafts=np.array([DRAFTS], dtype=np.int32),
                num_sampled=torch.tensor([accepted + 1], dtype=torch.int32),
                staged_tokens=DRAFTS,
                certain=certain,
            )
        )
    return marks


def test_only_steps_that_the_device_has_finished_are_read() -> None:
    late, accumulator = counted()
    marks = run_steps(late, 10)
    for mark in marks[:6]:  # the sixth step's start ends the fifth step
        mark.passed = True
    late.read_finished()
    assert late.is_reading
    late.read_finished()
    assert not late.is_reading
    late.settle(100)
    assert len(accumulator.windows) == 5
    late.read_finished()
    assert not late.is_reading
    assert [window.device_ms for window in accumulator.windows] == [None, None, 3.0, 3.0, 3.0]


def test_a_copy_on_its_way_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    late, accumulator = counted()
    for mark in run_steps(late, 4):
        mark.passed = True
    begin = late._reader.begin
    slow = lambda *given: SlowCopy(**vars(begin(*given)))  # noqa: E731
    monkeypatch.setattr(late._reader, "begin", slow)
    late.read_finished()
    for _ in range(3):
        late.read_finished()
        late.settle(100)
    assert late.is_reading
    assert len(accumulator.windows) == 0
    monkeypatch.setattr(SlowCopy, "there", True)
    late.read_finished()
    late.settle(100)
    assert len(accumulator.windows) == 3


def test_nothing_is_lost_or_changes_its_order_when_all_is_read_at_once() -> None:
    late, accumulator = counted()
    for accepted in (1, 2, 3, 4):
        for mark in run_steps(late, 2, accepted):
            mark.passed = True
        if accepted == 2:
            late.read_finished()  # a copy of the first three is on its way
    late.resolve(None)
    accepted_tokens = [counts.accepted_tokens for counts in accumulator.windows]
    assert accepted_tokens == [1, 1, 2, 2, 3, 3, 4, 4]


def test_counters_are_read_as_they_stand_behind_a_sealed_step() -> None:
    """Commits of later steps may be running: their rows belong to the next reading."""
    late, accumulator = counted()
    flags, seen = torch.tensor([0, 7], dtype=torch.int32), []
    written = torch.zeros(3, dtype=torch.int32)
    late.read_with(flags, seen.append, written)
    marks = []
    for _ in range(SEALED + 3):
        written += 1
        marks += run_steps(late, 1, certain=0)
    for mark in marks:
        mark.passed = True
    late.read_finished()
    late.read_finished()
    late.settle(100)
    assert seen == [[0, 7]]
    assert [counts.committed_tokens for counts in accumulator.windows] == [1] * SEALED
    late.resolve(None)
    assert [counts.committed_tokens for counts in accumulator.windows] == [1] * (SEALED + 3)


def test_a_request_with_more_tokens_than_its_window_has_is_reported() -> None:
    late, _ = counted()
    calls: list[int] = []
    late.on_overcount = lambda: calls.append(1)
    run_steps(late, 1, accepted=DRAFTS)
    late.resolve(None)
    assert calls == []
    run_steps(late, 1, accepted=DRAFTS + 1)
    late.resolve(None)
    assert calls == [1]


def test_a_server_times_interleaved_windows_alone_and_keeps_no_request() -> None:
    late, accumulator = counted()
    late.in_server = True
    late.note_requests([], {"a-1": 7})
    run_steps(late, 4)
    for step in list(late._pending)[:3]:
        step.ended.passed = True
    late._pending[2].place = WindowPlace(1, 7, 3, 4, 2)
    late.resolve(None)
    windows = list(accumulator.windows)
    places = [(w.cell_number, w.group, w.run, w.run_length, w.position) for w in windows]
    assert places == [(None,) * 5, (None,) * 5, (1, 7, 3, 4, 2), (None,) * 5]
    assert [window.device_ms for window in windows] == [None, None, 3.0, None]
    assert [(w.committed_tokens, w.rejected_tokens) for w in windows] == [(1, DRAFTS - 1)] * 4
    assert [window.drafts_per_position for window in windows] == [()] * 4
    assert late._sampled_before == {}


def test_the_step_before_a_pause_has_no_time() -> None:
    late, accumulator = counted()
    marks = run_steps(late, 4)
    late.went_idle()
    for mark in [*marks, *run_steps(late, 1)]:
        mark.passed = True
    late.resolve(None)
    device_ms = [window.device_ms for window in accumulator.windows]
    assert device_ms == [None, None, 3.0, None, None]


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

    def step(tokens: int, after: float) -> list[str]:
        now[0] += after
        late.seen.clear()
        assert execute(SimpleNamespace(total_num_scheduled_tokens=tokens)) == "output"
        return list(late.seen)

    assert step(8, READ_S / 2) == []
    assert step(8, READ_S) == ["look"]
    assert step(8, 0.01) == []
    late.is_reading = True
    assert step(8, 0.01) == ["look"]
    assert step(0, 0.01) == ["wait"]
