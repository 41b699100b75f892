"""The ratio of stage to off in a server: from its windows to /metrics, in bounded memory.

A group counts if no window was skipped, all used windows are timed, none fell back, and all are in
one class of batch size. The first window of each run is not used: it follows a switch. The ratio is
computed in a thread of its own.
"""

import logging
from collections import Counter, deque
from enum import StrEnum
from threading import Event, Lock, Thread
from typing import Any

from nwor_bench.instruments.robust import MIN_GROUPS, as_ratio, robust_location
from nwor_bench.plugin.interleaving import AGAIN, OFF, LiveInterleaving
from nwor_bench.plugin.observe import metrics
from nwor_bench.plugin.runner_hook import RunnerHook
from nwor_bench.plugin.settings import PluginSettings
from nwor_bench.records.fallback_reasons import Guard, LeftOut
from nwor_bench.records.metrics import Labels, MetricFiles, process_name
from nwor_bench.records.types import MeasuredWindow
from nwor_bench.records.window_order import ALL, WindowPlace, abba_effect, size_class

logger = logging.getLogger("vllm.nwor_bench")

KEPT = 4096
"""Groups of a class whose effects are kept: of a window of 8 ms, the last four and a half minutes
without a prefill."""

AA = "a/a"
"""The class of all groups in which off is compared with itself."""


class Clock(StrEnum):
    """Clock of the windows: CUDA events, or the host if there are none."""

    DEVICE = "device"
    HOST = "host"


class LiveGroups:
    """Collects windows into groups. One thread adds, another reads under `lock`.

    `effects` are the log ratios of each class, oldest first, and `left_out` groups without one.
    """

    def __init__(self) -> None:
        self.effects: dict[str, deque[float]] = {}
        self.groups: Counter[str] = Counter()
        self.left_out: Counter[LeftOut] = Counter()
        self.clock: Clock | None = None
        self.lock = Lock()
        self._members: list[tuple[MeasuredWindow, WindowPlace]] = []

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
        found = _effect(members)
        with self.lock:
            if isinstance(found, LeftOut):
                self.left_out[found] += 1
                return
            effect, self.clock = found
            is_aa = any(place.cell == AGAIN for _, place in members)
            for name in (AA,) if is_aa else (size_class(members[-1][0].num_reqs), ALL):
                self.effects.setdefault(name, deque(maxlen=KEPT)).append(effect)
                self.groups[name] += 1


def _effect(members: list[tuple[MeasuredWindow, WindowPlace]]) -> tuple[float, Clock] | LeftOut:
    """Mean log time of the other cell's windows less that of off, or why there is none."""
    places = [place for _, place in members]
    if [place.position for place in places] != 4 * list(range(places[0].run_length)):
        return LeftOut.INTERRUPTED
    used = [member for member in members if member[1].position]
    if any(window.fallback_reason is not None for window, _ in used):
        return LeftOut.FALLBACK
    if len({size_class(window.num_reqs) for window, _ in used}) > 1:
        return LeftOut.BATCH_SIZE
    for clock, field in ((Clock.DEVICE, "device_ms"), (Clock.HOST, "wall_ms")):
        values = [getattr(window, field) for window, _ in used]
        if all(value is not None and value > 0 for value in values):
            is_other = [place.cell != OFF for _, place in used]
            return abba_effect(zip(is_other, values, strict=True)), clock
        if any(value is not None for value in values):
            break  # never the one clock beside the other
    return LeftOut.UNTIMED


EVERY_S = 2.0
"""How often new groups are looked for. Of 4,096 groups an estimate takes 10 ms of one core."""


class Publisher:
    """Writes the groups' ratios into metric files of its own."""

    def __init__(
        self, groups: LiveGroups, interleaving: LiveInterleaving, files: MetricFiles, labels: Labels
    ):
        self._groups = groups
        self._interleaving = interleaving
        self._files = files
        self._labels = labels
        self._shown: dict[tuple[str, str], int] = {}
        self._end = Event()

    def start(self) -> None:
        """Show counters at 0, and begin."""
        self.publish()
        Thread(target=self._run, name="nwor-live", daemon=True).start()

    def stop(self) -> None:
        """End soon."""
        self._end.set()

    def publish(self) -> None:
        """Write what has changed since the last call."""
        found = self._groups
        with found.lock:
            groups, left_out = {ALL: 0, AA: 0, **found.groups}, dict(found.left_out)
            effects = {name: list(each) for name, each in found.effects.items()}
        for name, number in groups.items():
            metric, num_reqs = _metric(name, "groups")
            if self._raise_to(metric, "num_reqs", num_reqs, number):
                self._show(name, effects.get(name, []), str(found.clock))
        for reason in set(LeftOut) - {LeftOut.DRAFTS}:  # a server has one draft count
            number = left_out.get(reason, 0)
            self._raise_to("nwor_live_groups_left_out", "reason", reason, number)
        for guard in Guard:
            number = int(self._interleaving.stopped is guard)
            self._raise_to("nwor_live_staging_stopped", "reason", guard, number)

    def _run(self) -> None:
        while not self._end.wait(EVERY_S):
            try:
                self.publish()
            except Exception:
                logger.exception("nwor: the ratio on /metrics is no longer updated")
                return

    def _raise_to(self, name: str, label: str, value: str, number: int) -> bool:
        """Bring a counter to this number; True if it was another."""
        shown = self._shown.get((name, value))
        if shown == number:
            return False
        self._shown[name, value] = number
        self._files.add(name, (*self._labels, (label, str(value))), number - (shown or 0))
        return True

    def _show(self, name: str, effects: list[float], clock: str) -> None:
        located = robust_location(effects) if len(effects) >= MIN_GROUPS else None
        if located is None:
            return
        ratio = as_ratio(located)
        metric, num_reqs = _metric(name, "ratio")
        labels = (*self._labels, ("num_reqs", num_reqs), ("clock", clock))
        self._files.set(metric, labels, ratio.ratio)
        self._files.set(f"{metric}_low", labels, ratio.low)
        self._files.set(f"{metric}_high", labels, ratio.high)


def _metric(name: str, of: str) -> tuple[str, str]:
    """The metric of a class, and its label: A/A groups have metrics of their own."""
    return (f"nwor_live_aa_{of}", ALL) if name == AA else (f"nwor_live_{of}", name)


class LiveTraffic:
    """Off and stage are interleaved in this worker, and /metrics shows their ratio."""

    def __init__(self, hook: RunnerHook, worker: Any, settings: PluginSettings):
        self._interleaving = LiveInterleaving(hook, settings.scv_mode)
        self._groups = LiveGroups()
        self._publisher = None
        folder = metrics.folder_of()
        if folder is not None:
            labels = metrics.worker_labels(worker, settings.mode_name, settings.scv_mode)
            files = MetricFiles(folder, f"{process_name(metrics.global_rank(worker))}-live")
            self._publisher = Publisher(self._groups, self._interleaving, files, labels)
        hook.accumulator.listeners.append(self._add)
        hook.late.on_overcount = self._interleaving.overcounted

    def start(self) -> None:
        """Begin to interleave."""
        self._interleaving.start()
        if self._publisher is not None:
            self._publisher.start()

    def undo(self) -> None:
        """End it, because the hook could not be attached."""
        if self._publisher is not None:
            self._publisher.stop()

    def _add(self, window: MeasuredWindow, place: WindowPlace | None) -> None:
        self._interleaving.check(window)
        self._groups.add(window, place)
