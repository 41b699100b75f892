"""Live A/B in one worker: its turns, groups and metrics, put together."""

from typing import Any

from nwor_bench.plugin.live.groups import LiveGroups
from nwor_bench.plugin.live.turns import LiveTurns
from nwor_bench.plugin.observe import metrics
from nwor_bench.plugin.runner_hook import RunnerHook
from nwor_bench.plugin.settings import PluginSettings
from nwor_bench.records.metrics import MetricFiles, labels_of, process_name
from nwor_bench.records.types import WindowCounts, WindowTimes
from nwor_bench.workload.window_order import Turn


class LiveTraffic:
    """Off and stage take turns in this worker, and /metrics shows their ratio.

    Args:
        hook: of the worker's runner; it is not attached yet.
        worker: vLLM's.
        settings: with `interleave`.
    """

    def __init__(self, hook: RunnerHook, worker: Any, settings: PluginSettings):
        self._turns = LiveTurns(hook, settings.scv_mode)
        self._groups = LiveGroups()
        self._publisher = None
        folder = metrics.folder_of()
        if folder is not None:
            from nwor_bench.plugin.live.publishing import Publisher  # scipy takes a second

            rank = metrics.global_rank(worker)
            pair = metrics.pair_name(worker.vllm_config)
            labels = labels_of(pair, settings.mode_name, settings.scv_mode, rank)
            files = MetricFiles(folder, f"{process_name(rank)}-live")
            self._publisher = Publisher(self._groups, self._turns, files, labels)
        hook.accumulator.turn_listener = self._add
        if hook.late is not None:
            hook.late.on_overcount = self._turns.overcounted

    def start(self) -> None:
        """Begin to take turns."""
        self._turns.start()
        if self._publisher is not None:
            self._publisher.start()

    def undo(self) -> None:
        """End it, because the hook could not be attached."""
        if self._publisher is not None:
            self._publisher.stop()

    def _add(self, counts: WindowCounts, times: WindowTimes, turn: Turn | None) -> None:
        self._turns.check(counts)
        self._groups.add(counts, times, turn)
