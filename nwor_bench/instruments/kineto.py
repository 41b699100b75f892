"""Launches and waits of a batch as PyTorch's own profiler (Kineto) records them.

It needs no tool and no permission, and runs wherever PyTorch runs. The calls that it records cost
host time each, so that batches counted in this way are never timed.
"""

from typing import Any

from nwor_bench.instruments.launches import HostCall, kind_of

STEP = "nwor-bench step"
"""Name of the mark at the start of each of the engine's steps."""


def open_profiler() -> Any:
    """PyTorch's profiler, host calls and device both where there is a device; not started."""
    from torch import cuda
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities, acc_events=True)


def read_calls(profiler: Any) -> tuple[list[HostCall], list[int]]:
    """The calls that count as something, and the times of the marks, from a stopped profiler."""
    calls, marks = [], []
    for event in profiler.profiler.kineto_results.events():
        name = event.name()
        if name == STEP:
            marks.append(event.start_ns())
        elif kind_of(name) is not None:
            calls.append(HostCall(name, event.start_ns()))
    return calls, sorted(marks)
