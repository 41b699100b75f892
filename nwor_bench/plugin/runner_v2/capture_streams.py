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


def unused_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream on which no graph that still exists was captured; its holder keeps it unused.

    Other graphs are found by the memory that was allocated on their streams.

    Raises:
        RuntimeError: all streams are in use.
    """
    snapshot = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    allocated_on = {segment["stream"] for segment in snapshot}
    for _ in range(POOL):
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if stream.cuda_stream not in allocated_on and stream not in _given:
            _given.add(stream)
            return stream
    raise RuntimeError(f"all {POOL} streams of {device} are in use: none is left for a CUDA graph")


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
