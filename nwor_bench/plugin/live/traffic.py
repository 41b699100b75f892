"""Live A/B in one worker: its turns, groups and metrics, put together."""

import time
from collections.abc import Callable
from typing import Any

from nwor_bench.plugin.counts.late_counts import LateCounts
from nwor_bench.plugin.live.groups import LiveGroups
from nwor_bench.plugin.live.turns import LiveTurns
from nwor_bench.plugin.observe import metrics
from nwor_bench.plugin.patching import Patch, PatchSet
from nwor_bench.plugin.runner_hook import RunnerHook
from nwor_bench.plugin.settings import PluginSettings
from nwor_bench.records.metrics import MetricFiles, labels_of, process_name
from nwor_bench.records.types import WindowCounts, WindowTimes
from nwor_bench.workload.window_order import Turn

READ_S = 1.0
"""How often counts that are still on the device are read."""

RECORDED_A_STEP = 4
"""Windows that are recorded before a step: their counts come many at a time."""


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
        self._reading = PatchSet([])
        if hook.late is not None:
            hook.late.on_overcount = self._turns.overcounted
            read = read_without_waiting(hook.late)
            self._reading = PatchSet([Patch(hook.runner, "execute_model", read)])
            self._reading.apply()

    def start(self) -> None:
        """Begin to take turns."""
        self._turns.start()
        if self._publisher is not None:
            self._publisher.start()

    def undo(self) -> None:
        """End it, because the hook could not be attached."""
        self._reading.undo()
        if self._publisher is not None:
            self._publisher.stop()

    def _add(self, counts: WindowCounts, times: WindowTimes, turn: Turn | None) -> None:
        self._turns.check(counts)
        self._groups.add(counts, times, turn)


def read_without_waiting(
    late: LateCounts, clock: Callable[[], float] = time.perf_counter
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Read counts of steps that the device has finished, and the rest when work runs out."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        last = clock()

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal last
            if not scheduler_output.total_num_scheduled_tokens:
                late.resolve(None)
            elif late.is_reading or clock() - last > READ_S:
                late.read_finished()
                last = clock()
            late.settle(RECORDED_A_STEP)
            return original(scheduler_output, *args, **kwargs)

        return execute_model

    return wrap
