"""A server's interleaving on the V2 runner's hook: both modes, and a refused commit."""

from collections import Counter
from typing import Any

import pytest
from v2_pieces import K, make_hook, run_step

from nwor_bench.plugin.interleaving import LiveModes
from nwor_bench.plugin.live_groups import MODES, Groups
from nwor_bench.plugin.rank_vote import RankVote
from nwor_bench.records.fallback_reasons import Guard
from nwor_bench.records.types import NworMode, ScvMode
from nwor_bench.records.window_order import ALL

pytestmark = pytest.mark.slow  # vLLM's runner is imported

REQUESTS = ["a-1", "b-2"]


class Started:
    """A hook whose windows are interleaved, and the windows that it recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, vote: RankVote | None = None) -> None:
        self.hook: Any = make_hook(monkeypatch, vote)
        self.interleaving = LiveModes(self.hook, ScvMode.OFF)
        self.groups = Groups(MODES)
        self.windows: list[Any] = []
        self.hook.accumulator.listeners.append(self.record)
        self.interleaving.start()

    def record(self, window: Any, place: Any) -> None:
        self.windows.append((window, place))
        self.interleaving.check(window)
        self.groups.add(window, place)

    def run(self, steps: int) -> list[Any]:
        """Run `steps` steps, read as a server reads them; returns the recorded windows."""
        before = len(self.windows)
        for _ in range(steps):
            run_step(self.hook, REQUESTS)
        self.hook.late.resolve(None)
        return self.windows[before:]


def test_two_windows_in_five_are_staged_and_timed_groups_come_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = Started(monkeypatch)
    windows = started.run(1 + 10 * 8 + 1)
    interleaving = [(place.cell, counts.staged_tokens) for counts, place in windows if place]
    assert Counter(interleaving[:80]) == {(0, 0): 40, (1, 2 * K): 32, (2, 0): 8}
    assert started.groups.groups == {("2", 1): 8, (ALL, 1): 8, ("2", 0): 2, (ALL, 0): 2}
    assert started.groups.left_out == {}


def test_a_refused_commit_ends_staging_and_loses_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch)
    started.run(9)
    started.hook.refusals.errors.fill_(1)
    started.run(8)  # the flags are read at their end
    later = started.run(40)
    assert started.interleaving.stopped is Guard.COMMIT_REFUSED
    assert started.hook.nwor_mode is NworMode.OFF
    assert len(later) == 40
    assert [counts.staged_tokens for counts, _ in later] == [0] * 40
    reasons = [counts.fallback_reason for counts, _ in later if counts.fallback_reason]
    assert len(reasons) == 1
    assert reasons[0].startswith("device_refused")
