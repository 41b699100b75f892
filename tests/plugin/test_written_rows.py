"""Rows that commits count themselves, beside those that the accepted counts ask for."""

from collections.abc import Callable
from threading import Barrier, Thread
from typing import Any

import numpy as np
import pytest
import torch
from test_live_on_v2 import REQUESTS, Started
from v2_pieces import LAYERS, K, run_step

from nwor_bench.plugin.late_counts import SEALED, WrittenRows
from nwor_bench.plugin.rank_vote import RankVote
from nwor_bench.plugin.step import Step
from nwor_bench.records.fallback_reasons import Fault, Guard
from nwor_bench.records.types import NworMode

DRAFTS = 4


def window(certain: int | None, in_commit: bool = False) -> Step:
    """Two requests of four drafts each."""
    drafts = np.array([DRAFTS, DRAFTS], dtype=np.int32)
    staged = 2 * DRAFTS
    return Step(
        0.0, True, drafts=drafts, staged_tokens=staged, certain=certain, decided_in_commit=in_commit
    )


def committed(now: list[int], *windows: tuple[Step, list[int]], before: int = 0) -> Any:
    """Drafts of each window that the commits say they wrote."""
    steps = [step for step, _ in windows]
    WrittenRows([before] * len(now)).settle(steps, [counts for _, counts in windows], now)
    return [step.committed_tokens for step in steps]


@pytest.mark.parametrize(
    ("certain", "in_commit", "rows"),
    [
        (0, False, 4 + 0),  # only drafts
        (0, True, 4 + 0),
        (1, False, 5 + 1),  # the whole step: each request's first row too
        (1, True, 5 + 1),
    ],
)
def test_rows_that_add_up_commit_what_was_accepted(
    certain: int, in_commit: bool, rows: int
) -> None:
    """A request got all four drafts and a bonus token, the other its own token."""
    assert committed([rows] * 3, (window(certain, in_commit), [5, 1])) == [4]


def test_a_request_that_sampled_nothing_has_a_certain_row_only_if_the_host_decided() -> None:
    assert committed([3 + 1], (window(1), [3, 0])) == [2]
    assert committed([3], (window(1, in_commit=True), [3, 0])) == [2]


def test_what_is_missing_is_taken_from_the_last_windows() -> None:
    pair = (window(0), [3, 3]), (window(0), [2, 2])  # 4 and 2 accepted
    assert committed([6, 6], *pair) == [4, 2]
    assert committed([0, 0], *pair) == [0, 0]
    assert committed([6, 5], *pair) == [4, 1]  # one layer lacks a row
    assert committed([6, 9], *pair) == [4, 2 + 3]  # one has too many


def test_windows_without_a_commit_ask_for_nothing() -> None:
    assert committed([4], (window(None), [5, 5]), (window(0), [3, 3])) == [None, 4]


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

    def vote(self) -> list[str | None]:
        """What each rank settles on."""
        found: list[str | None] = [None, None]

        def settle(rank: int) -> None:
            found[rank] = self.ranks[rank].settle(None)

        threads = [Thread(target=settle, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


AGREED = [None, None]
DIFFERED = [Fault.RANKS_DIFFER.value] * 2


@pytest.mark.slow
@pytest.mark.parametrize("differ", [False, True])
def test_the_hooks_tell_their_votes_what_they_counted(
    monkeypatch: pytest.MonkeyPatch, differ: bool
) -> None:
    both = Ranks(monkeypatch)
    for number, vote in enumerate(both.ranks):
        alone = monkeypatch.context()
        with alone as patch:
            patch.setattr(RankVote, "settle", lambda _, reason, *__: reason)
            started = Started(patch, vote)
            for _ in range(2 * SEALED):
                run_step(started.hook, REQUESTS)
            if differ and number:
                started.hook.late._pending[3].num_sampled -= 1
            started.hook.late.resolve(None)
    both.vote()
    assert both.vote() == (DIFFERED if differ else AGREED)
