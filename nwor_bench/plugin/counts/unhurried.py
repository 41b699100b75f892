"""Read a server's late counts in time for /metrics, and never wait for a device that has work."""

import time
from collections.abc import Callable
from typing import Any

from nwor_bench.plugin.counts.late_counts import LateCounts
from nwor_bench.plugin.patching import Patch, PatchSet
from nwor_bench.plugin.runner_hook import RunnerHook

READ_S = 0.25
"""How often counts that are still on the device are read. A commit that wrote something else than
was accepted is found then, and staging stops: within a second."""

COUNTED_A_STEP = 2
"""Steps that are counted before a step: their counts come many at a time, and one that waited for
all of them would be late by tens of milliseconds."""


def patches(hook: RunnerHook) -> PatchSet:
    """What reads this hook's late counts, not yet applied; nothing where the host counts at once.

    Apply it before the hook is attached: the hook's wrappers must be the outer ones. The steps are
    marked from now on, since the marks show which of them the device has finished.
    """
    if hook.late is None:
        return PatchSet([])
    hook.clock.on = True
    return PatchSet([Patch(hook.runner, "execute_model", read_without_waiting(hook.late))])


def read_without_waiting(
    late: LateCounts, clock: Callable[[], float] = time.perf_counter
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Read counts of steps that the device has finished, and the rest when work runs out."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        last = clock()

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal last
            # vLLM runs one more step, an empty one, when its last request has finished.
            if not scheduler_output.total_num_scheduled_tokens:
                late.resolve(None)
            elif late.is_reading or clock() - last > READ_S:
                late.read_finished()
                last = clock()
            late.settle(COUNTED_A_STEP)
            return original(scheduler_output, *args, **kwargs)

        return execute_model

    return wrap
