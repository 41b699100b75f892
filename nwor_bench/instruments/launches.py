"""How often a window calls the driver: launches, graph launches, waits of the host. Pure.

Whoever recorded the calls (PyTorch's Kineto, Nsight Systems), they come here as name and time.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
"""What is counted, and the calls of CUDA's runtime and driver that it is."""

_SUFFIX = re.compile(r"(_v\d+|_ptsz|_ptds)+$")


@dataclass(frozen=True)
class HostCall:
    """A call of CUDA's runtime or driver; times on the same clock as the windows.

    Attributes:
        end_ns: None where only the start was recorded.
        to_pageable: copies from the GPU to memory that is not pinned, for which the host waits.
    """

    name: str
    start_ns: int
    end_ns: int | None = None
    to_pageable: bool = False


def kind_of(name: str) -> str | None:
    """What a call counts as; None for the many that count as nothing.

    Versions and stream variants are the same call: cudaLaunchKernel_v7000, cuMemcpyDtoHAsync_v2.
    """
    plain = _SUFFIX.sub("", name)
    return next((kind for kind, names in KINDS.items() if plain in names), None)


def count_calls(
    calls: Iterable[HostCall], starts_ns: Sequence[int], ends_ns: Sequence[int]
) -> list[dict[str, int]]:
    """How many calls of each kind began in each of the intervals, which do not overlap.

    Args:
        calls: in any order.
        starts_ns: ascending; an interval holds its start, not its end.
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
