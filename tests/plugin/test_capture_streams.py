"""A set is captured on one stream, and no set that lives shares it with one that ends."""

import gc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch

from nwor_bench.plugin.runner_v2 import capture_streams
from nwor_bench.plugin.runner_v2.capture_streams import unused_stream

pytestmark = pytest.mark.slow  # vLLM's graph managers are imported

GPU = torch.device("cuda", 0)
POOL = 32
"""Streams that PyTorch hands out."""
SHAPES = 37
"""Full graphs of 64 requests and four drafts: more than PyTorch has streams."""


class Stream:
    """A handle of PyTorch's streams, or of one that CUDA made."""

    device = GPU

    def __init__(self, handle: int, device: torch.device = GPU) -> None:
        assert device == GPU
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

        self.next, self.made, self.current = 0, 0, [Stream(-1)]
        self.workspaces: dict[int, object] = {-1: object()}
        monkeypatch.setattr(torch.cuda, "ExternalStream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current[-1])
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 1))
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda: None)
        monkeypatch.setattr(cudagraph_utils, "graph_capture", self.vllms)
        monkeypatch.setattr(capture_streams, "_given", WeakSet())
        monkeypatch.setattr(capture_streams, "_made", defaultdict(list))
        monkeypatch.setattr(capture_streams, "_new_stream", self.make)

    def make(self, device: torch.device) -> int:
        """CUDA's handle of a new stream."""
        self.made += 1
        return POOL + self.made

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()

    @contextmanager
    def vllms(self, device: torch.device) -> Iterator[None]:
        """vLLM's context: PyTorch's next stream each time."""
        self.next += 1
        with self.on(Stream(self.next % POOL)):
            yield


class Graph:
    """A captured matrix product; as it ends, its stream's workspace is freed."""

    def __init__(self, device: Device) -> None:
        self.device, self.stream = device, device.current[-1].cuda_stream
        self.workspace = device.workspaces.setdefault(self.stream, object())

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
    held = [unused_stream(GPU) for _ in range(2 * POOL)]
    assert len(set(held)) == 2 * POOL
    ended = held.pop(7).cuda_stream
    gc.collect()
    assert unused_stream(GPU).cuda_stream == ended


def test_a_set_keeps_its_stream_as_long_as_its_graphs(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs in a cycle end some time later, and free their stream's workspace then."""
    ended = set_of(device, monkeypatch)
    manager = ended._manager
    manager.itself = manager
    ended.give_up("checked")
    del ended, manager
    after = set_of(device, monkeypatch)
    gc.collect()
    replay_all(after)


def test_engines_and_gates_of_a_process_have_as_many_streams_as_sets_live_at_once(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM captures on any of PyTorch's streams; an H100 was left without one after 30 gates."""
    for _ in range(2):
        stock = []
        for _ in range(POOL):
            with device.vllms(GPU):
                stock.append(Graph(device))
        stage = set_of(device, monkeypatch)
        for _ in range(POOL):
            set_of(device, monkeypatch, only=0).give_up("checked")
        replay_all(stage)
        for graph in stock:
            graph.replay()
        stage.give_up("closed")  # what is patched outlives the test
        del stock, graph
    assert device.made == 2


@pytest.mark.gpu
def test_graphs_on_streams_that_cuda_made() -> None:
    """More sets than PyTorch has streams; each multiplies as it did after others ended."""
    weights = torch.randn(256, 256, device=GPU)
    given, sets = torch.randn(8, 256, device=GPU), []
    pools = {torch.cuda.Stream(GPU).cuda_stream for _ in range(POOL)}
    for _ in range(POOL + 8):
        stream, graph = unused_stream(GPU), torch.cuda.CUDAGraph()
        assert stream.cuda_stream not in pools
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            given @ weights  # cuBLAS sets up
        with torch.cuda.graph(graph, stream=stream):
            out = given @ weights
        sets.append((stream, graph, out))
    assert len({stream.cuda_stream for stream, *_ in sets}) == POOL + 8
    del sets[::2], stream, graph, out
    torch.cuda.empty_cache()
    given.normal_()
    for _, graph, out in sets:
        out.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(out, given @ weights)
