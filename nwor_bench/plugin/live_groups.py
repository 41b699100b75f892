"""Groups of a server's windows, and the thread that writes what they give to /metrics.

A group counts if no window was skipped, all used windows are timed, and all are in one class of
batch size. What is compared (modes or draft counts) is the subclass's.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from enum import StrEnum
from threading import Event, Lock, Thread
from typing import ClassVar, Generic, TypeVar

from nwor_bench.records.fallback_reasons import LeftOut
from nwor_bench.records.metrics import Labels, MetricFiles
from nwor_bench.records.types import MeasuredWindow
from nwor_bench.records.window_order import WindowPlace, size_class
from nwor_bench.stats.interval import Interval
from nwor_bench.stats.paired import abba_effect

logger = logging.getLogger("vllm.nwor_bench")

Name = TypeVar("Name", bound=Hashable)

REFERENCE = 0
"""Number of the cell that all others are compared with."""


class Clock(StrEnum):
    """Clock of the windows: CUDA events, or the host if there are none."""

    DEVICE = "device"
    HOST = "host"


class Groups(ABC, Generic[Name]):
    """Collects windows into groups. One thread adds, another reads under `lock`.

    `effects` are log ratios by what they are of, oldest first, and `left_out` groups without one.

    Args:
        kept: groups whose effects are kept, of each name.
    """

    def __init__(self, kept: int) -> None:
        self.effects: dict[Name, deque[float]] = {}
        self.groups: Counter[Name] = Counter()
        self.left_out: Counter[LeftOut] = Counter()
        self.clock: Clock | None = None
        self.lock = Lock()
        self._kept = kept
        self._members: list[tuple[MeasuredWindow, WindowPlace]] = []

    @abstractmethod
    def names(self, members: Sequence[tuple[MeasuredWindow, WindowPlace]]) -> Sequence[Name]:
        """What the effect of a group is of."""

    @abstractmethod
    def is_used(self, place: WindowPlace) -> bool:
        """False for a window beside a switch."""

    @abstractmethod
    def problem(self, window: MeasuredWindow, place: WindowPlace) -> LeftOut | None:
        """Why a used window spoils its group; None if it does not."""

    def add(self, window: MeasuredWindow, place: WindowPlace | None) -> None:
        """Take a finished window; windows come in the order in which they ran."""
        if place is None:
            return
        if self._members and self._members[0][1].group != place.group:
            self._close()
        self._members.append((window, place))
        if place.is_last:
            self._close()

    def _close(self) -> None:
        members, self._members = self._members, []
        found = self._effect(members)
        with self.lock:
            if isinstance(found, LeftOut):
                self.left_out[found] += 1
                return
            effect, self.clock = found
            for name in self.names(members):
                self.effects.setdefault(name, deque(maxlen=self._kept)).append(effect)
                self.groups[name] += 1

    def _effect(
        self, members: Sequence[tuple[MeasuredWindow, WindowPlace]]
    ) -> tuple[float, Clock] | LeftOut:
        """Mean log time of the other cell's windows less the reference's, or why there is none."""
        places = [place for _, place in members]
        if [place.position for place in places] != 4 * list(range(places[0].run_length)):
            return LeftOut.INTERRUPTED
        used = [member for member in members if self.is_used(member[1])]
        problem = next(filter(None, (self.problem(*member) for member in used)), None)
        if problem is not None:
            return problem
        if len({size_class(window.num_reqs) for window, _ in used}) > 1:
            return LeftOut.BATCH_SIZE
        for clock, field in ((Clock.DEVICE, "device_ms"), (Clock.HOST, "wall_ms")):
            values = [getattr(window, field) for window, _ in used]
            if all(value is not None and value > 0 for value in values):
                is_other = [place.cell != REFERENCE for _, place in used]
                return abba_effect(zip(is_other, values, strict=True)), clock
            if any(value is not None for value in values):
                break  # never the one clock beside the other
        return LeftOut.UNTIMED


class LivePublisher(ABC):
    """Writes what has changed into metric files of its own, again and again, in a thread."""

    every_s: ClassVar[float]
    """How often it looks for something new."""

    def __init__(self, files: MetricFiles, labels: Labels):
        self._files = files
        self._labels = labels
        self._shown: dict[tuple[str, Labels], int] = {}
        self._end = Event()
        self._failed: set[str] = set()

    def start(self) -> None:
        """Show counters at 0, and begin."""
        self.publish()
        self.update()
        Thread(target=self._run, name="nwor-live", daemon=True).start()

    def stop(self) -> None:
        """End soon."""
        self._end.set()

    @abstractmethod
    def publish(self) -> None:
        """Write what has changed since the last call."""

    def update(self) -> None:
        """Publish, and show when; a failure is counted, and the next call tries again."""
        try:
            self.publish()
            self._files.set("nwor_live_updated_seconds", self._labels, time.time())
        except Exception as error:
            reason = type(error).__name__
            if reason not in self._failed:
                logger.exception("nwor: /metrics was not updated; it is tried again and again")
            self._failed.add(reason)
            self._files.add("nwor_live_failed_updates", (*self._labels, ("reason", reason)), 1)

    def _run(self) -> None:
        while not self._end.wait(self.every_s):
            self.update()

    def _raise_to(self, name: str, labels: Labels, number: int) -> bool:
        """Bring a counter to this number; True if it was another."""
        shown = self._shown.get((name, labels))
        if shown == number:
            return False
        self._files.add(name, (*self._labels, *labels), number - (shown or 0))
        self._shown[name, labels] = number
        return True

    def _show(self, name: str, labels: Labels, interval: Interval) -> None:
        """Set a gauge and the two with the ends of its interval."""
        every = (*self._labels, *labels)
        self._files.set(name, every, interval.value)
        self._files.set(f"{name}_low", every, interval.low)
        self._files.set(f"{name}_high", every, interval.high)
