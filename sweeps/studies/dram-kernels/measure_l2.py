"""Check by DRAM counters whether L2 keeps written lines while weights stream through it.

    python sweeps/studies/dram-kernels/measure_l2.py [--output FILE.csv]

The question behind `--stage-l2 persist`, without an engine. A round writes a buffer of as many
bytes as an 8 x 4 window's copies, reads weights, and reads the buffer again, as a commit does. What
stays in L2 costs DRAM neither the write nor the read. Ways to ask for it:

- normal: nothing is asked for.
- window: CUDA's access-policy window on the stream, as `--stage-l2 persist` sets it.
- captured window: the same, in a CUDA graph that was captured on that stream.
- node window: a captured graph whose kernel nodes are given the window one by one.
- evict_last: the writing and reading kernels say so themselves (PTX's createpolicy), with and
  without L2 set aside.

What a captured graph's nodes hold is read back from it. `page_l2.py` makes persisting-l2.md.
Needs a GPU whose counters may be read, cupti-python and cuda-bindings.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from dram_count import LAYER_BYTES, DramBytes, dram_bytes, layer_weights
from l2_kernels import read_kernel, write_kernel
from measured_page import save_measured
from torch import Tensor

from nwor_bench.instruments.cupti_library import run_under_own_cupti
from nwor_bench.instruments.pm_sampling import PmSampler
from nwor_bench.plugin.runner_v2.persisting_l2 import PersistingL2

BUFFER_BYTES = 3_670_016
"""Copies of 8 requests x 4 drafts over the 28 layers of the 3B shape."""

MULTIPLES = (1, 2, 4, 8)
"""L2 that is set aside, over the buffer; `--stage-l2 persist` sets as much aside as it has."""

BLOCK = 1024


class Round:
    """The buffer, the weights, and a round over them: write, stream, read."""

    def __init__(self, slices: int):
        count = BUFFER_BYTES // 4
        self.buffer = torch.zeros(count, dtype=torch.int32, device="cuda")
        self._sums = torch.zeros(count // BLOCK, dtype=torch.int32, device="cuda")
        self._weights = layer_weights(torch.zeros((), dtype=torch.int64, device="cuda"))
        self._slices = slices

    def __call__(self, kept: bool = False, touches: bool = True) -> None:
        """`touches` false: the weights alone."""
        grid = (self.buffer.numel() // BLOCK,)
        if touches:
            write_kernel[grid](self.buffer, 7, KEPT=kept, BLOCK=BLOCK)
        for _, read in zip(range(self._slices), cycle(self._weights), strict=False):
            read()
        if touches:
            read_kernel[grid](self.buffer, self._sums, KEPT=kept, BLOCK=BLOCK)

    def is_right(self) -> bool:
        """The sums are those of what was written."""
        wanted = (torch.arange(self.buffer.numel(), device="cuda") + 7).view(-1, BLOCK).sum(1)
        return bool(torch.equal(self._sums.long(), wanted))


def capture(run: Callable[[], None], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A graph that is not yet instantiated, captured on a stream."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph


def nodes_of(graph: torch.cuda.CUDAGraph) -> list[Any]:
    """The graph's kernel nodes."""
    from cuda.bindings import runtime

    raw = runtime.cudaGraph_t(graph.raw_cuda_graph())
    _, _, count = runtime.cudaGraphGetNodes(raw)
    _, nodes, _ = runtime.cudaGraphGetNodes(raw, count)
    kernels = runtime.cudaGraphNodeType.cudaGraphNodeTypeKernel
    return [node for node in nodes if runtime.cudaGraphNodeGetType(node)[1] == kernels]


def windows_of(graph: torch.cuda.CUDAGraph) -> list[str]:
    """Each kernel node's access-policy window, in words."""
    from cuda.bindings import runtime

    attribute = runtime.cudaLaunchAttributeID.cudaLaunchAttributeAccessPolicyWindow
    found = []
    for node in nodes_of(graph):
        error, value = runtime.cudaGraphKernelNodeGetAttribute(node, attribute)
        if error != runtime.cudaError_t.cudaSuccess:
            found.append(error.name)
            continue
        window = value.accessPolicyWindow
        found.append(f"{window.num_bytes} bytes, ratio {window.hitRatio:g}, {window.hitProp.name}")
    return found


def give_windows(graph: torch.cuda.CUDAGraph, buffer: Tensor) -> None:
    """Set the window on every kernel node."""
    from cuda.bindings import runtime

    value = runtime.cudaKernelNodeAttrValue()
    window = value.accessPolicyWindow
    window.base_ptr, window.num_bytes, window.hitRatio = buffer.data_ptr(), BUFFER_BYTES, 1.0
    window.hitProp = runtime.cudaAccessProperty.cudaAccessPropertyPersisting
    window.missProp = runtime.cudaAccessProperty.cudaAccessPropertyStreaming
    attribute = runtime.cudaLaunchAttributeID.cudaLaunchAttributeAccessPolicyWindow
    for node in nodes_of(graph):
        error = runtime.cudaGraphKernelNodeSetAttribute(node, attribute, value)[0]
        if error != runtime.cudaError_t.cudaSuccess:
            print("node window:", error.name)


def new_stream() -> torch.cuda.Stream:
    """A new stream of its own."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


@contextmanager
def set_aside(l2: PersistingL2, multiple: int, *streams: torch.cuda.Stream) -> Iterator[None]:
    """So many times the buffer of L2 is set aside, and the streams' accesses to it persist."""
    assert l2.room is not None
    l2.room = replace(l2.room, set_aside_bytes=multiple * BUFFER_BYTES)
    l2.switch_on(*streams)
    print("L2:", l2.facts(), flush=True)
    try:
        yield
    finally:
        l2.switch_off()


def ways(
    turn: Round, l2: PersistingL2, nodes: list[str]
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each way, ready to run while the iterator stands on it; `nodes` gets what graphs hold."""
    current, side, alone = torch.cuda.current_stream(), new_stream(), new_stream()
    weights = capture(partial(turn, touches=False), side)
    plain = capture(turn, side)
    kept = capture(partial(turn, kept=True), side)
    for graph in (weights, plain, kept):
        graph.instantiate()
    yield "weights", weights.replay
    yield "normal", turn
    yield "normal, graph", plain.replay
    yield "evict_last", partial(turn, kept=True)
    for multiple in MULTIPLES:
        with set_aside(l2, multiple, current, side):
            yield f"{multiple} x set aside, window", turn
            covered = capture(turn, side)
            nodes += told("captured window", covered)
            covered.instantiate()
            yield f"{multiple} x set aside, captured window", covered.replay
            given = capture(turn, alone)
            nodes += told("captured on a stream without", given)
            give_windows(given, turn.buffer)
            nodes += told("node window", given)
            given.instantiate()
            yield f"{multiple} x set aside, node window", given.replay
        with set_aside(l2, multiple):
            yield f"{multiple} x set aside, evict_last", partial(turn, kept=True)
            yield f"{multiple} x set aside, evict_last, graph", kept.replay


def told(what: str, graph: torch.cuda.CUDAGraph) -> list[str]:
    """The windows of a graph's nodes, each different one once."""
    found = windows_of(graph)
    return [f"{what}: {found.count(each)} nodes: {each}" for each in dict.fromkeys(found)]


def measure(
    sampler: PmSampler, slices: int, rounds: int, nodes: list[str]
) -> list[dict[str, object]]:
    """A row a way: what a round moves beside the weights, MB."""
    turn = Round(slices)
    l2 = PersistingL2(turn.buffer)
    rows: list[dict[str, object]] = []
    nothing = DramBytes(0.0, 0.0)
    for way, run in ways(turn, l2, nodes):
        moved = dram_bytes(sampler, run, rounds)
        if way == "weights":
            nothing = moved
        elif not turn.is_right():
            raise SystemExit(f"{way}: wrong sums")
        given = l2.room.set_aside_bytes if l2.room and "set aside" in way else 0
        row: dict[str, object] = {"streamed_read_mb": slices * LAYER_BYTES / 1e6}
        row |= {"streamed_written_mb": 0.0, "way": way, "set_aside_mb": given / 1e6}
        row["written_mb"] = round((moved.write - nothing.write) / 1e6, 3)
        row["read_mb"] = round((moved.read - nothing.read) / 1e6, 3)
        row["refused"] = l2.unavailable or ""
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slices", default="1,2,4,28", help="layers' weights read in a round")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).with_name("persisting-l2.csv")
    )
    options = parser.parse_args()
    run_under_own_cupti()
    sampler = PmSampler(torch.cuda.current_device())
    rows: list[dict[str, object]] = []
    nodes: list[str] = []
    try:
        for slices in map(int, options.slices.split(",")):
            rows += measure(sampler, slices, max(200 // slices, 12), nodes)
    finally:
        sampler.close()
    save_measured(options.output, pd.DataFrame(rows), nodes=nodes)


if __name__ == "__main__":
    main()
