"""Rows that commits count, beside those accepted, and commits that the device refused."""

import logging
from collections.abc import Callable
from functools import partial
from threading import Barrier, Thread
from typing import Any

import numpy as np
import pytest
import torch
from test_live_on_v2 import REQUESTS, Started
from v2_pieces import LAYERS, K, make_hook, run_step

from nwor_bench.plugin.late_counts import SEALED, WrittenRows
from nwor_bench.plugin.rank_vote import RankVote
from nwor_bench.plugin.runner_v2.staging import DeviceRefusals
from nwor_bench.plugin.step import Step
from nwor_bench.records.fallback_reasons import Fault, Guard
from nwor_bench.records.types import NworMode
from nwor_kernels.metadata import ERROR_OVERFLOW, ERROR_SLOT_RANGE

DRAFTS = 4


def window(certain: int | None, in_commit: bool = False) -> Step:
    """Two requests of four drafts each."""
    return Step(
        0.0, True, drafts=np.array([DRAFTS, DRAFTS], dtype=np.int32), staged_tokens=2 * DRAFTS,
        certain=certain, decided_in_commit=in_commit,
    )  # fmt: skip


def committed(now: list[int], *windows: tuple[Step, list[int]], before: int = 0) -> Any:
    """Drafts of each window that the commits say they wrote."""
    steps = [step for step, _ in windows]
    WrittenRows([before] * len(now)).settle(steps, [counts for _, counts in windows], now)
    return [step.committed_tokens for step in steps]


ONE_FULL = [5, 1]  # a request got all four drafts and a bonus token, the other its own token
PAIR = (window(0), [3, 3]), (window(0), [2, 2])  # 4 and 2 accepted


@pytest.mark.parametrize(
    ("now", "windows", "expected"),
    [
        ([4 + 0] * 3, [(window(0), ONE_FULL)], [4]),  # only drafts
        ([4 + 0] * 3, [(window(0, True), ONE_FULL)], [4]),
        ([5 + 1] * 3, [(window(1), ONE_FULL)], [4]),  # the whole step: each request's first row too
        ([5 + 1] * 3, [(window(1, True), ONE_FULL)], [4]),
        # A request that sampled nothing has a certain row only if the host decided.
        ([3 + 1], [(window(1), [3, 0])], [2]),
        ([3], [(window(1, True), [3, 0])], [2]),
        # What is missing is taken from the last windows.
        ([6, 6], PAIR, [4, 2]),
        ([0, 0], PAIR, [0, 0]),
        ([6, 5], PAIR, [4, 1]),  # one layer lacks a row
        ([6, 9], PAIR, [4, 2 + 3]),  # one has too many
        # Windows without a commit ask for nothing.
        ([4], [(window(None), [5, 5]), (window(0), [3, 3])], [None, 4]),
    ],
)
def test_rows_that_add_up_commit_what_was_accepted(
    now: list[int], windows: Any, expected: list[int | None]
) -> None:
    assert committed(now, *windows) == expected


def test_counters_may_wrap() -> None:
    assert committed([-(2**31) + 2], (window(0), [3, 3]), before=2**31 - 2) == [4]


def garbage(started: Started) -> None:
    """Counts that have nothing to do with what was committed."""
    rng = np.random.default_rng(1)
    for step in started.hook.late._pending:
        step.num_sampled = torch.from_numpy(rng.integers(1, K + 2, 2, dtype=np.int32))


def no_rows(started: Started) -> None:
    started.hook.buffers.written.zero_()


def a_layer_less(started: Started) -> None:
    started.hook.buffers.written[LAYERS - 1] -= 1


@pytest.mark.slow  # vLLM's runner is imported
@pytest.mark.parametrize("spoil", [garbage, no_rows, a_layer_less])
def test_counts_that_are_not_those_written_stop_staging(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Started], None]
) -> None:
    started = Started(monkeypatch)
    started.run(9)
    assert started.interleaving.alarm is None
    for _ in range(8):
        run_step(started.hook, REQUESTS)
    spoil(started)
    started.hook.late.resolve(None)
    assert (started.interleaving.alarm or "").startswith("counts_do_not_add_up:")
    later = started.run(40)
    assert started.interleaving.stopped is Guard.COUNTS
    assert started.hook.nwor_mode is NworMode.OFF
    assert sum(counts.staged_tokens for counts, _ in later) == 0


class Ranks:
    """Votes of two ranks in threads over stand-in collectives; a rank's group is its number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._said: list[Any] = [None, None]
        self.barrier = Barrier(2)
        self.ranks = [RankVote(rank) for rank in range(2)]
        monkeypatch.setattr("torch.distributed.all_reduce", self._all_reduce)
        monkeypatch.setattr("torch.distributed.all_gather_object", self._all_gather)
        monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 2)

    def _exchange(self, rank: int, own: Any) -> list[Any]:
        self._said[rank] = own
        self.barrier.wait(timeout=30)
        both = list(self._said)
        self.barrier.wait(timeout=30)
        return both

    def _all_reduce(self, votes: torch.Tensor, *_: Any, group: int) -> None:
        votes.copy_(torch.stack(self._exchange(group, votes.clone())).amax(0))

    def _all_gather(self, reasons: list[Any], reason: str | None, group: int) -> None:
        reasons[:] = self._exchange(group, reason)

    def run(self, *each: Callable[[], Any]) -> None:
        """Run what each rank does in a thread of its own; what one raises is raised here."""
        faults: list[BaseException] = []

        def rank(work: Callable[[], Any]) -> None:
            try:
                work()
            except BaseException as fault:
                faults.append(fault)
                self.barrier.abort()

        threads = [Thread(target=rank, args=[work]) for work in each]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert faults == []

    def vote(self) -> list[str | None]:
        """What each rank settles on."""
        found: dict[int, str | None] = {}

        def settle(rank: int) -> None:
            found[rank] = self.ranks[rank].settle(None)

        self.run(*(partial(settle, rank) for rank in range(2)))
        return [found[0], found[1]]


@pytest.mark.slow
@pytest.mark.parametrize("differ", [False, True])
def test_the_hooks_tell_their_votes_what_they_counted(
    monkeypatch: pytest.MonkeyPatch, differ: bool
) -> None:
    both = Ranks(monkeypatch)
    for number, vote in enumerate(both.ranks):
        with monkeypatch.context() as patch:
            patch.setattr(RankVote, "settle", lambda _, reason, *__: reason)
            started = Started(patch, vote)
            for _ in range(2 * SEALED):
                run_step(started.hook, REQUESTS)
            if differ and number:
                started.hook.late._pending[3].num_sampled -= 1
            started.hook.late.resolve(None)
    both.vote()
    assert both.vote() == [Fault.RANKS_DIFFER.value if differ else None] * 2


def reasons(hook: Any) -> list[str | None]:
    return [counts.fallback_reason for counts in hook.accumulator.windows]


@pytest.mark.slow  # vLLM's runner is imported
def test_a_server_stops_staging_once_it_has_read_a_refusal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hook = make_hook(monkeypatch)
    run_step(hook, REQUESTS)
    hook.buffers.errors[1] = ERROR_SLOT_RANGE  # what that window's commit left on the device
    run_step(hook, REQUESTS)
    commits = hook.buffers.commits
    with caplog.at_level(logging.ERROR, "vllm.nwor_bench"):
        hook.late.resolve(None)  # as a server does every few seconds
        for _ in range(3):
            run_step(hook, REQUESTS)
        hook.late.resolve(None)
    assert reasons(hook) == [None, None, "device_refused:slot_range"] + ["staging_stopped"] * 2
    assert hook.buffers.commits == commits == 2
    assert hook.nwor_mode == "stage"
    ours = [record for record in caplog.records if record.name == "vllm.nwor_bench"]
    (told,) = [record.getMessage() for record in ours]
    for word in ("slot_range", "1 of 2 layers", "may be wrong", "prefix cache"):
        assert word in told


@pytest.mark.slow
@pytest.mark.parametrize("early", [False, True])
def test_a_sweeps_drain_still_names_layers_and_flags(
    monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    """A reading before the drain changes nothing; told once."""
    hook = make_hook(monkeypatch)
    run_step(hook, REQUESTS)
    hook.buffers.errors[1] = ERROR_OVERFLOW
    if early:
        hook.late._read_pending()
        assert hook.buffers.errors.tolist() == [0, 0]
    hook.drain({"a": 9, "b": 9})
    assert hook.device_errors() == ["layer 1: overflow"]
    assert hook.device_errors() == []


@pytest.mark.slow
@pytest.mark.parametrize("late_rank_reads", [False, True])
def test_ranks_stop_with_the_same_window(
    monkeypatch: pytest.MonkeyPatch, late_rank_reads: bool
) -> None:
    """Each rank reads its own flags when it reads; the window's vote tells the others."""
    both = Ranks(monkeypatch)

    def rank(number: int) -> None:
        hook = hooks[number]
        for step in range(6):
            if number == 1 and step == 1:
                hook.buffers.errors[0] = ERROR_OVERFLOW
            if step == 3 and (number == 1 or late_rank_reads):
                hook.late.resolve(None)
            run_step(hook, REQUESTS)
        hook.late.resolve(None)

    with monkeypatch.context() as patch:
        patch.setattr(RankVote, "settle", lambda *_: None)  # while the hooks are made
        hooks = [make_hook(patch, vote) for vote in both.ranks]
    both.run(*(partial(rank, number) for number in range(2)))
    told = "rank_1:device_refused:overflow"
    expected = [None, None, None, told, "staging_stopped", "staging_stopped"]
    assert [reasons(hook) for hook in hooks] == [expected, expected]
    # The window of the vote had been committed: every draft of it was written again.
    assert [hook.buffers.direct_writes for hook in hooks] == [1, 1]


def test_flags_of_all_layers_are_one_bounded_reason() -> None:
    errors = torch.tensor([0, ERROR_OVERFLOW, ERROR_SLOT_RANGE], dtype=torch.int32)
    refusals = DeviceRefusals(errors)
    refusals.note([0, 0, 0])
    assert refusals.reason is None
    refusals.note(errors.tolist())
    assert refusals.reason == "device_refused:overflow+slot_range"
    for _ in range(1000):
        refusals.note([1, 1, 1])
    assert len(refusals.take()) <= 4 + 1
    assert refusals.reason == "device_refused:overflow+slot_range"
