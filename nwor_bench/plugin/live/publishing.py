"""The ratio of stage to off on /metrics, computed beside the engine: no step waits for it."""

import logging
from threading import Event, Thread

from nwor_bench.analysis.interleaved.robust import MIN_GROUPS, as_ratio, robust_location
from nwor_bench.plugin.live.groups import AA, LiveGroups, Snapshot
from nwor_bench.plugin.live.turns import LiveTurns
from nwor_bench.records.live_reasons import Guard, LeftOut
from nwor_bench.records.metrics import Labels, MetricFiles
from nwor_bench.workload.window_order import ALL

logger = logging.getLogger("vllm.nwor_bench")

EVERY_S = 2.0
"""How often new groups are looked for. Of 4,096 groups an estimate takes 10 ms of one core."""


class Publisher:
    """Writes what the groups say into metric files of its own.

    Args:
        groups: of this worker.
        turns: of this worker: do they go on?
        files: which no other thread writes.
        labels: of every sample.
    """

    def __init__(self, groups: LiveGroups, turns: LiveTurns, files: MetricFiles, labels: Labels):
        self._groups = groups
        self._turns = turns
        self._files = files
        self._labels = labels
        self._told: dict[tuple[str, str], int] = {}
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
        found = self._groups.snapshot()
        self._count(found)
        for name, effects in sorted(found.effects.items()):
            if len(effects) >= MIN_GROUPS:
                self._show(name, effects, str(found.clock))

    def _run(self) -> None:
        while not self._end.wait(EVERY_S):
            try:
                self.publish()
            except Exception:
                logger.exception("nwor: the ratio on /metrics stays as it is from now on")
                return

    def _count(self, found: Snapshot) -> None:
        for name, number in {ALL: 0, AA: 0, **found.groups}.items():
            metric, num_reqs = _metric(name, "groups")
            self._raise_to(metric, "num_reqs", num_reqs, number)
        for reason in LeftOut:
            number = found.left_out.get(reason, 0)
            self._raise_to("nwor_live_groups_left_out", "reason", reason, number)
        for guard in Guard:
            number = int(self._turns.stopped is guard)
            self._raise_to("nwor_live_staging_stopped", "reason", guard, number)

    def _raise_to(self, name: str, label: str, value: str, number: int) -> None:
        told = self._told.get((name, value))
        if told != number:
            self._told[name, value] = number
            self._files.add(name, (*self._labels, (label, str(value))), number - (told or 0))

    def _show(self, name: str, effects: list[float], clock: str) -> None:
        located = robust_location(effects)
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
