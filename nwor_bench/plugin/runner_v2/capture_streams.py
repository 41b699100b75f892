"""The streams on which our CUDA graphs are captured: each set of graphs has one of its own.

PyTorch frees memory per stream, also within a pool of graphs, and keeps a cuBLAS workspace per
stream. So the graphs of a set share memory only if all are captured on one stream, as vLLM captures
its own set. vLLM's context takes another stream each time it is entered.

Sets that end at different times must not share a stream. A captured matrix product holds the
address of its stream's workspace, and when a graph ends, PyTorch 2.14 frees the workspace of the
stream on which that graph was captured, even if others use it (`CUDAGraph::reset`, pytorch issue
193402). Once that memory is given back, a replay of the graphs that are left is an illegal memory
access. `torch.cuda.Stream` makes no streams: it hands out 32 of them in turn, again and again, to
vLLM's own captures too. So CUDA makes ours.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch

from nwor_bench.plugin.patching import Patch

_made: defaultdict[torch.device, list[int]] = defaultdict(list)
"""Handles of our streams. None is destroyed: PyTorch keeps memory by handle, and CUDA might give
the same one to somebody else."""

_given: "WeakSet[Any]" = WeakSet()
"""Streams from `unused_stream` that somebody still holds."""


def unused_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of ours that nobody holds. Hold it as long as graphs that were captured on it exist.

    Raises:
        RuntimeError: CUDA made none.
    """
    held, made = {each.cuda_stream for each in _given}, _made[device]
    handle = next((each for each in made if each not in held), None)
    if handle is None:
        handle = _new_stream(device)
        made.append(handle)
    stream: torch.cuda.Stream = torch.cuda.ExternalStream(handle, device)  # type: ignore[no-untyped-call]
    _given.add(stream)
    return stream


def _new_stream(device: torch.device) -> int:
    """One that does not wait for the default stream, as PyTorch's do not."""
    from cuda.bindings import runtime  # PyTorch's CUDA builds depend on it

    with torch.cuda.device(device):
        error, stream = runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)
    if int(error):
        raise RuntimeError(f"no stream for graphs of {device}: {error}")
    return int(stream)


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
