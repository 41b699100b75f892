"""The effect of staging from the windows of a server, as they come, in bounded memory.

A group counts if none of its turns was skipped, and if its used windows are all timed, none fell
back, and all are in one class of batch size: requests come and go, so their number may change. The
first window of each run is not used: it follows a switch.
"""

from collections import Counter, deque
from dataclasses import dataclass
from enum import StrEnum
from math import log
from statistics import fmean
from threading import Lock

from nwor_bench.plugin.live.turns import AGAIN, OFF
from nwor_bench.records.live_reasons import LeftOut
from nwor_bench.records.types import WindowCounts, WindowTimes
from nwor_bench.workload.window_order import ALL, Turn, size_class

KEPT = 4096
"""Groups of a class whose effects are kept: of a window of 8 ms, the last four and a half minutes
without a prefill."""

AA = "a/a"
"""The class of all groups in which off is compared with itself."""


class Clock(StrEnum):
    """What timed the windows: CUDA events, or where there are none the host."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True)
class Snapshot:
    """What is known at one moment."""

    effects: dict[str, list[float]]
    """Log ratios of the classes that got a group since the last snapshot, oldest first."""

    groups: dict[str, int]
    """Groups of each class since the start."""

    left_out: dict[LeftOut, int]
    clock: Clock | None
    """None before the first group."""


class LiveGroups:
    """Collects windows into groups. One thread adds, another takes snapshots."""

    def __init__(self) -> None:
        self._members: list[tuple[WindowCounts, WindowTimes, Turn]] = []
        self._effects: dict[str, deque[float]] = {}
        self._groups: Counter[str] = Counter()
        self._left_out: Counter[LeftOut] = Counter()
        self._changed: set[str] = set()
        self._clock: Clock | None = None
        self._lock = Lock()

    def add(self, counts: WindowCounts, times: WindowTimes, turn: Turn | None) -> None:
        """Take a finished window; windows come in the order in which they ran."""
        if turn is None:
            return
        if self._members and self._members[0][2].group != turn.group:
            self._close()
        self._members.append((counts, times, turn))
        if turn.is_last:
            self._close()

    def snapshot(self) -> Snapshot:
        """What is known now."""
        with self._lock:
            changed, self._changed = self._changed, set()
            effects = {name: list(self._effects[name]) for name in changed}
            return Snapshot(effects, dict(self._groups), dict(self._left_out), self._clock)

    def _close(self) -> None:
        members, self._members = self._members, []
        found = _effect(members)
        with self._lock:
            if isinstance(found, LeftOut):
                self._left_out[found] += 1
                return
            effect, self._clock = found
            is_aa = any(turn.cell == AGAIN for _, _, turn in members)
            for name in (AA,) if is_aa else (size_class(members[-1][0].num_reqs), ALL):
                self._effects.setdefault(name, deque(maxlen=KEPT)).append(effect)
                self._groups[name] += 1
                self._changed.add(name)


def _effect(
    members: list[tuple[WindowCounts, WindowTimes, Turn]],
) -> tuple[float, Clock] | LeftOut:
    """Mean log time of the other cell's windows less that of off, or why there is none."""
    turns = [turn for _, _, turn in members]
    if [turn.position for turn in turns] != 4 * list(range(turns[0].run_length)):
        return LeftOut.INTERRUPTED
    used = [member for member in members if member[2].position]
    if any(counts.fallback_reason is not None for counts, _, _ in used):
        return LeftOut.FALLBACK
    if len({size_class(counts.num_reqs) for counts, _, _ in used}) > 1:
        return LeftOut.BATCH_SIZE
    for clock, field in ((Clock.DEVICE, "device_ms"), (Clock.HOST, "wall_ms")):
        values = [getattr(times, field) for _, times, _ in used]
        if all(value is not None and value > 0 for value in values):
            logs = [(turn.cell, log(ms)) for (_, _, turn), ms in zip(used, values, strict=True)]
            other = fmean(value for cell, value in logs if cell != OFF)
            return other - fmean(value for cell, value in logs if cell == OFF), clock
        if any(value is not None for value in values):
            break  # never the one clock beside the other
    return LeftOut.UNTIMED
