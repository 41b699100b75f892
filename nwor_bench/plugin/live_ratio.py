"""The ratio of stage to off in a server: from its windows to /metrics, in bounded memory.

A group counts if none of its used windows fell back. The first window of each run is not used: it
follows a switch. The ratio is computed in a thread of its own.
"""

from collections.abc import Sequence
from typing import Any

from nwor_bench.plugin.interleaving import AGAIN, LiveInterleaving
from nwor_bench.plugin.live_groups import Groups, LivePublisher
from nwor_bench.plugin.observe import metrics
from nwor_bench.plugin.runner_hook import RunnerHook
from nwor_bench.plugin.settings import PluginSettings
from nwor_bench.records.fallback_reasons import Guard, LeftOut
from nwor_bench.records.metrics import Labels, MetricFiles
from nwor_bench.records.types import MeasuredWindow
from nwor_bench.records.window_order import ALL, WindowPlace, size_class
from nwor_bench.stats.robust import MIN_GROUPS, robust_location

KEPT = 4096
"""Groups of a class whose effects are kept: of a window of 8 ms, the last four and a half minutes
without a prefill."""

AA = "a/a"
"""The class of all groups in which off is compared with itself."""


class LiveGroups(Groups[str]):
    """Groups of off and stage, by class of batch sizes."""

    def __init__(self) -> None:
        super().__init__(KEPT)

    def names(self, members: Sequence[tuple[MeasuredWindow, WindowPlace]]) -> Sequence[str]:
        """The class and all, or A/A."""
        if any(place.cell == AGAIN for _, place in members):
            return (AA,)
        return size_class(members[-1][0].num_reqs), ALL

    def is_used(self, place: WindowPlace) -> bool:
        """False for the first window of a run."""
        return place.position > 0

    def problem(self, window: MeasuredWindow, place: WindowPlace) -> LeftOut | None:
        """A staged window must have been staged."""
        return None if window.fallback_reason is None else LeftOut.FALLBACK


class Publisher(LivePublisher):
    """Writes the groups' ratios into metric files of its own."""

    every_s = 2.0
    """Of 4,096 groups an estimate takes 10 ms of one core."""

    def __init__(
        self, groups: LiveGroups, interleaving: LiveInterleaving, files: MetricFiles, labels: Labels
    ):
        super().__init__(files, labels)
        self._groups = groups
        self._interleaving = interleaving

    def publish(self) -> None:
        """Write what has changed since the last call."""
        found = self._groups
        with found.lock:
            groups, left_out = {ALL: 0, AA: 0, **found.groups}, dict(found.left_out)
            effects = {name: list(each) for name, each in found.effects.items()}
        for name, number in groups.items():
            metric, num_reqs = _metric(name, "groups")
            if self._raise_to(metric, (("num_reqs", num_reqs),), number):
                self._show_ratio(name, effects.get(name, []), str(found.clock))
        for reason in set(LeftOut) - {LeftOut.DRAFTS}:  # this server has one draft count
            number = left_out.get(reason, 0)
            self._raise_to("nwor_live_groups_left_out", (("reason", str(reason)),), number)
        for guard in Guard:
            number = int(self._interleaving.stopped is guard)
            self._raise_to("nwor_live_staging_stopped", (("reason", str(guard)),), number)

    def _show_ratio(self, name: str, effects: list[float], clock: str) -> None:
        located = robust_location(effects) if len(effects) >= MIN_GROUPS else None
        if located is not None:
            metric, num_reqs = _metric(name, "ratio")
            self._show(metric, (("num_reqs", num_reqs), ("clock", clock)), located.exp())


def _metric(name: str, of: str) -> tuple[str, str]:
    """The metric of a class, and its label: A/A groups have metrics of their own."""
    return (f"nwor_live_aa_{of}", ALL) if name == AA else (f"nwor_live_{of}", name)


class LiveTraffic:
    """Off and stage are interleaved in this worker, and /metrics shows their ratio."""

    def __init__(self, hook: RunnerHook, worker: Any, settings: PluginSettings):
        self._interleaving = LiveInterleaving(hook, settings.scv_mode)
        self._groups = LiveGroups()
        self._publisher = None
        own = metrics.live_files(worker, settings)
        if own is not None:
            self._publisher = Publisher(self._groups, self._interleaving, *own)
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
