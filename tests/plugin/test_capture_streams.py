"""A set is captured on one stream, and no set that lives shares it with one that ends."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch

from nwor_bench.plugin.runner_v2 import capture_streams
from nwor_bench.plugin.runner_v2.capture_streams import POOL, note_stocks_graphs, unused_stream

pytestmark = pytest.mark.slow  # vLLM's graph managers are imported

GPU = torch.device("cuda", 0)
SHAPES = 37
"""Full graphs of 64 requests and four drafts: more than PyTorch has streams."""


class Stream:
    """A handle of PyTorch's streams."""

    device = GPU

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return self.cuda_stream

    def wait_stream(self, other: "Stream") -> None:
        assert other != self


class Device:
    """PyTorch's streams, and the cuBLAS workspaces that captured kernels hold by stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.v1.worker.gpu import cudagraph_utils

        import nwor_bench.plugin.runner_v2.graph_sets  # noqa: F401  (annotations need the real one)

        self.next, self.current = 0, [Stream(-1)]
        self.workspaces: dict[int, object] = {-1: object()}
        self.graphs: WeakSet[Graph] = WeakSet()
        monkeypatch.setattr(torch.cuda, "Stream", self.take)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current[-1])
        monkeypatch.setattr(torch.cuda, "memory_snapshot", self.segments)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 1))
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda: None)
        monkeypatch.setattr(cudagraph_utils, "graph_capture", self.vllms)
        monkeypatch.setattr(capture_streams, "_given", capture_streams.WeakSet())
        monkeypatch.setattr(capture_streams, "_ours", set[int]())

    def take(self, device: torch.device) -> Stream:
        assert device == GPU
        self.next += 1
        return Stream(self.next % POOL)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()

    @contextmanager
    def vllms(self, device: torch.device) -> Iterator[None]:
        """vLLM's context: another stream each time."""
        with self.on(self.take(device)):
            yield

    def segments(self) -> list[dict[str, Any]]:
        """Graphs have memory in a pool of their own."""
        pools = [(stream, (0, 0)) for stream in self.workspaces]
        pools += [(graph.stream, (0, 1)) for graph in self.graphs]
        return [{"stream": stream, "segment_pool_id": pool} for stream, pool in pools]


class Graph:
    """A captured matrix product; as it ends, its stream's workspace is freed."""

    def __init__(self, device: Device) -> None:
        self.device, self.stream = device, device.current[-1].cuda_stream
        self.workspace = device.workspaces.setdefault(self.stream, object())
        device.graphs.add(self)

    def replay(self) -> None:
        assert self.device.workspaces.get(self.stream) is self.workspace, "illegal memory access"

    def __del__(self) -> None:
        self.device.workspaces.pop(self.stream, None)


class Manager:
    """A manager of graphs like vLLM's: each capture enters its context."""

    def __init__(self, device: Device) -> None:
        self.device, self.graphs = device, dict[Any, Graph]()
        self._capture_descs: Any = {}

    def capture(self, *_: Any, **__: Any) -> None:
        from vllm.v1.worker.gpu import cudagraph_utils

        with cudagraph_utils.graph_capture(device=GPU):
            for descs in self._capture_descs.values():
                self.graphs |= {desc: Graph(self.device) for desc in descs}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def set_of(device: Device, monkeypatch: pytest.MonkeyPatch, only: Any = None) -> Any:
    """A captured set of all shapes, or of one."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    from nwor_bench.plugin.runner_v2.graph_sets import StockGraphs

    shapes = [
        BatchExecutionDescriptor(CUDAGraphMode.FULL, 5 * n, n, uniform_token_count=5)
        for n in range(1, SHAPES + 1)
    ]
    wanted = ("model model_state input_buffers intermediate_tensors block_tables attn_groups "
              "kv_cache_config lora_config use_aux_hidden_state_outputs")  # fmt: skip
    stock = SimpleNamespace(graphs=dict.fromkeys(shapes))
    runner = SimpleNamespace(cudagraph_manager=stock, device=GPU, **dict.fromkeys(wanted.split()))
    none: Any = None
    graphs = StockGraphs(runner, none, none, none, 0)
    graphs.only = None if only is None else shapes[only]
    monkeypatch.setattr(graphs, "_make_manager", lambda: Manager(device))
    monkeypatch.setattr(graphs, "_padding", lambda desc: desc)
    graphs.capture()
    assert graphs.unavailable is None
    return graphs


def replay_all(graphs: Any) -> None:
    for graph in graphs._manager.graphs.values():
        graph.replay()


def test_a_set_is_captured_on_one_stream(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu import cudagraph_utils

    vllms = cudagraph_utils.graph_capture
    graphs = set_of(device, monkeypatch)
    assert len(graphs.shapes) == SHAPES
    assert len({graph.stream for graph in graphs._manager.graphs.values()}) == 1
    assert device.current == [Stream(-1)]
    assert cudagraph_utils.graph_capture == vllms


def test_graphs_outlive_those_of_a_set_that_ends(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with device.vllms(GPU):
        stock = Graph(device)
    stage = set_of(device, monkeypatch)
    checking = set_of(device, monkeypatch, only=0)  # the gate's
    sham = set_of(device, monkeypatch)
    checking.give_up("checked")
    gc.collect()
    stock.replay()
    replay_all(stage)
    replay_all(sham)
    sham.give_up("graph_capture:OutOfMemoryError")
    gc.collect()
    stock.replay()
    replay_all(stage)


def test_a_stream_serves_again_only_when_nobody_holds_it(device: Device) -> None:
    held = [unused_stream(GPU) for _ in range(POOL)]
    assert len(set(held)) == POOL
    with pytest.raises(RuntimeError, match="all 32 streams of cuda:0 are in use"):
        unused_stream(GPU)
    ended = held.pop(7).cuda_stream
    gc.collect()
    assert unused_stream(GPU).cuda_stream == ended


def test_a_stream_with_memory_is_left_to_its_owner(device: Device) -> None:
    device.workspaces = dict.fromkeys(range(POOL - 1), object())
    assert unused_stream(GPU).cuda_stream == POOL - 1


def test_later_engines_of_a_process_keep_their_streams(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's next engine may capture where a gate of the one before did."""
    for others in range(POOL):
        stock = []
        for _ in range(3):  # the target's, the drafter's and an encoder's
            with device.vllms(GPU):
                stock.append(Graph(device))
        for _ in range(others):
            device.take(GPU)
        note_stocks_graphs()
        stage, checking = set_of(device, monkeypatch), set_of(device, monkeypatch, only=0)
        checking.give_up("checked")
        replay_all(stage)
        for graph in stock:
            graph.replay()
        stage.give_up("closed")  # what is patched outlives the test
        del stock, graph
        device.workspaces |= {stream: object() for stream in capture_streams._ours}


def test_memory_that_outlives_a_set_does_not_keep_its_stream(device: Device) -> None:
    """Gates have sets of their own; an H100 was left without a stream after some thirty."""
    for _ in range(3 * POOL):
        device.workspaces[unused_stream(GPU).cuda_stream] = object()
    with device.vllms(GPU):
        stock = Graph(device)
    held = unused_stream(GPU)
    assert held != stock.stream
