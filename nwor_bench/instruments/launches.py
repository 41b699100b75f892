"""Driver calls per window: kernel launches, graph launches, host waits, copies.

PyTorch's profiler (Kineto) records the calls as name and time; it needs no tool and no permission.
Recording costs host time per call, so such batches are never timed.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

LAUNCHES = frozenset(
    {
        *("cudaLaunchKernel", "cudaLaunchKernelExC", "cudaLaunchCooperativeKernel"),
        *("cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel"),
    }
)
GRAPH_LAUNCHES = frozenset({"cudaGraphLaunch", "cuGraphLaunch"})
HOST_SYNCS = frozenset(
    {
        *("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"),
        *("cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize"),
        *("cuMemcpyDtoH", "cuMemcpyHtoD", "cuMemcpy"),
    }
)
COPIES = frozenset(
    {
        *("cudaMemcpyAsync", "cudaMemcpy2DAsync", "cudaMemcpyPeerAsync"),
        *("cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuMemcpyDtoDAsync", "cuMemcpyAsync"),
    }
)
KINDS = {
    "kernel_launches": LAUNCHES,
    "graph_launches": GRAPH_LAUNCHES,
    "host_syncs": HOST_SYNCS,
    "async_copies": COPIES,
}
"""Kinds of calls, with the CUDA runtime and driver calls of each."""

STEP = "nwor-bench step"
"""Name of the mark at the start of each engine step."""

_SUFFIX = re.compile(r"(_v\d+|_ptsz|_ptds)+$")


@dataclass(frozen=True)
class HostCall:
    """A call of CUDA's runtime or driver; its time is on the same clock as the windows."""

    name: str
    start_ns: int


def kind_of(name: str) -> str | None:
    """The kind of a call; None if it is not counted.

    Version and stream suffixes are ignored: cudaLaunchKernel_v7000, cuMemcpyDtoHAsync_v2.
    """
    plain = _SUFFIX.sub("", name)
    return next((kind for kind, names in KINDS.items() if plain in names), None)


def count_calls(
    calls: Iterable[HostCall], starts_ns: Sequence[int], ends_ns: Sequence[int]
) -> list[dict[str, int]]:
    """Number of calls of each kind that began in each interval; intervals must not overlap.

    Args:
        calls: in any order.
        starts_ns: ascending; an interval includes its start, not its end.
        ends_ns: one for each start.
    """
    counts = [dict.fromkeys(KINDS, 0) for _ in starts_ns]
    for call in calls:
        kind = kind_of(call.name)
        if kind is None:
            continue
        place = bisect_right(starts_ns, call.start_ns) - 1
        if place >= 0 and call.start_ns < ends_ns[place]:
            counts[place][kind] += 1
    return counts


def open_profiler() -> Any:
    """PyTorch's profiler for host calls and, with a GPU, device activity; not started."""
    from torch import cuda
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities, acc_events=True)


def read_calls(profiler: Any) -> tuple[list[HostCall], list[int]]:
    """Counted calls, and the times of the step marks, from a stopped profiler."""
    calls, marks = [], []
    for event in profiler.profiler.kineto_results.events():
        name = event.name()
        if name == STEP:
            marks.append(event.start_ns())
        elif kind_of(name) is not None:
            calls.append(HostCall(name, event.start_ns()))
    return calls, sorted(marks)
