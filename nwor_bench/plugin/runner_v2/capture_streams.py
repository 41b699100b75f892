"""The streams on which our CUDA graphs are captured: each set of graphs has one of its own.

PyTorch frees memory per stream, also within a pool of graphs, and keeps a cuBLAS workspace per
stream. So the graphs of a set share memory only if all are captured on one stream, as vLLM captures
its own set. vLLM's context takes another stream each time it is entered.

Sets that end at different times must not share a stream. A captured matrix product holds the
address of its stream's workspace, and when a graph ends, PyTorch 2.14 frees the workspace of the
stream on which that graph was captured, even if others use it (`CUDAGraph::reset`, pytorch issue
193402). Once that memory is given back, a replay of the graphs that are left is an illegal memory
access. `torch.cuda.Stream` makes no streams: it hands out POOL of them in turn, again and again.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch

from nwor_bench.plugin.patching import Patch

POOL = 32
"""Streams that PyTorch hands out on a device."""

_given: "WeakSet[Any]" = WeakSet()
"""Streams from `unused_stream` that somebody still holds."""

_ours: set[int] = set()
"""Handles of those that were given, and on which nobody else has captured a graph since."""


def note_stocks_graphs() -> None:
    """vLLM has captured an engine's graphs, in a process that had others before perhaps on streams
    that were ours: memory in a pool of graphs shows those that still exist."""
    if not _ours:
        return
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    captured = {each["stream"] for each in segments if any(each["segment_pool_id"])}
    _ours.difference_update(captured - {each.cuda_stream for each in _given})


def unused_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream on which no graph that still exists was captured; its holder keeps it unused.

    Graphs of others are found by the memory that was allocated on their streams. One of ours serves
    again once nobody holds it: memory on it may outlive its graphs.

    Raises:
        RuntimeError: all streams are in use.
    """
    snapshot = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    others = {segment["stream"] for segment in snapshot} - _ours
    streams = [torch.cuda.Stream(device) for _ in range(POOL)]  # type: ignore[no-untyped-call]
    free = [each for each in streams if each not in _given and each.cuda_stream not in others]
    if not free:
        raise RuntimeError(f"all {POOL} streams of {device} are in use: none is left for a graph")
    stream = min(free, key=lambda each: each.cuda_stream in _ours)
    _given.add(stream)
    _ours.add(stream.cuda_stream)
    return stream


@contextmanager
def capturing_on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Let vLLM's graph managers capture on this stream, and all else run there meanwhile."""
    from vllm.v1.worker.gpu import cudagraph_utils

    before = torch.cuda.current_stream(stream.device)
    enter_vllms = cudagraph_utils.graph_capture
    again = Patch(cudagraph_utils, "graph_capture", lambda _: lambda device: nullcontext())
    with enter_vllms(device=stream.device):  # once for all graphs of a set, as vLLM does
        stream.wait_stream(before)
        again.apply()
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            again.undo()
            before.wait_stream(stream)
