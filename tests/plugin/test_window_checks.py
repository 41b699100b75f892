"""Which captured windows the local gate checks; replaying them leaves one window's states."""

from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.slow  # vLLM's runner is imported

REQUESTS = 8


class Graph(Enum):
    """vLLM's CUDAGraphMode."""

    FULL = 1


class Descriptor(NamedTuple):
    """vLLM's of a full graph."""

    num_reqs: int
    uniform_token_count: int
    cg_mode: Graph = Graph.FULL

    @property
    def num_tokens(self) -> int:
        return self.num_reqs * self.uniform_token_count


class CheckingGraphs(SimpleNamespace):
    """An empty set, which captures the one shape that it is given."""

    def capture(self) -> None:
        self.shapes[self.only] = object()


def checks_of(descriptors: Any, recurrent: Any = None, batch: Any = None) -> Any:
    from nwor_bench.plugin.runner_v2.window_checks import GpuWindowChecks

    def plan(control: bool) -> tuple[Any, str]:
        return CheckingGraphs(shapes={}, only=None, unavailable=None), "checking"

    timed = SimpleNamespace(shapes=dict.fromkeys(descriptors))
    parts = SimpleNamespace(
        graphs=timed, control_graphs=timed, layers=[], states=None, plan=plan,
        staging=SimpleNamespace(trace=None, sets=[]), recurrent=recurrent or {},
        window=SimpleNamespace(batch=batch),
    )  # fmt: skip
    model = SimpleNamespace(prepare_attn=lambda *_: {})
    runner = SimpleNamespace(model_state=model, device=torch.device("cpu"))
    return GpuWindowChecks(runner, parts, ())


def checked(checks: Any, descriptor: Any, control: bool = False) -> int:
    chosen = [checks.planner("usual", control, descriptor) for _ in range(20)]
    return chosen.count("checking")


def test_every_draft_count_has_checked_windows_in_its_batch() -> None:
    """`worth --nwor-modes off,stage`: one engine has a graph of each count."""
    counts = {k: Descriptor(REQUESTS, k + 1) for k in (1, 2, 3, 4)}
    larger = [Descriptor(2 * REQUESTS, k + 1) for k in counts]
    checks = checks_of([*larger, *counts.values(), Descriptor(REQUESTS // 2, 3)])
    found = {}
    for k, descriptor in counts.items():
        checks.prepare(REQUESTS, False)
        found[k] = checked(checks, descriptor)
        checks.take()
    assert found == dict.fromkeys(counts, 2)
    assert [checked(checks, descriptor) for descriptor in larger] == [0] * 4


def test_every_mode_and_count_of_an_interleaved_batch_has_checked_windows() -> None:
    counts = [Descriptor(REQUESTS, k + 1) for k in (1, 2)]
    checks = checks_of(counts)
    for control in (False, True):
        checks.prepare(REQUESTS, control)
    found = [checked(checks, each, control) for control in (False, True) for each in counts]
    assert found == [2] * 4


STATE_SIZE, WINDOW = 3, 2


class Recurrent:
    """A layer whose forward adds a window's tokens to its states, and a graph that runs it."""

    def __init__(self, tables: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        self.kv_cache = tuple(torch.rand(9, STATE_SIZE, generator=generator) for _ in range(2))
        self.slots = torch.unique(tables).long()

    def forward(self, writes: int = 2) -> Tensor:
        """[4, STATE_SIZE]: it depends on the states, and moves those of `writes` caches."""
        found = sum(cache[self.slots].sum(0) for cache in self.kv_cache).expand(4, -1).clone()
        for cache in self.kv_cache[:writes]:
            cache[self.slots] = 2 * cache[self.slots] + 1
        return found


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("off_by", [0.0, 0.25])
def test_a_hybrids_timed_graph_is_compared_and_leaves_one_windows_states(
    staged: bool, off_by: float
) -> None:
    """A staged layer's state waits for the commit: its forward writes its convolution's only."""
    from nwor_bench.plugin.states import StateTables

    tables = torch.tensor([[2, 5], [7, 1], [0, 0]], dtype=torch.int32)  # the last one is padding
    writes = 1 if staged else 2
    layer, alike = Recurrent(tables), Recurrent(tables)
    alike.forward(writes)
    states = StateTables((tables,), torch.ones(2)) if staged else "left to stock"
    checks = checks_of([], {"net": layer}, SimpleNamespace(states=states))
    metadata = SimpleNamespace(spec_state_indices_tensor=tables, non_spec_state_indices_tensor=None)
    checks._metadata = {"net": metadata}
    checks._path, checks._input_batch = "full graph", SimpleNamespace(num_tokens=3)
    replayed = []

    def graph(name: str, error: float) -> Any:
        def replay(descriptor: Any) -> Tensor:
            replayed.append(name)
            return layer.forward(writes) + error

        return SimpleNamespace(replay=replay)

    checks._sets[False, "graph"] = graph("checking", 0.0), None, None
    checks.replay(graph("timed", off_by), False, "graph")
    assert replayed == ["timed", "timed", "checking"]
    assert checks._hidden == {"repeated": 0, "checking": 3 * STATE_SIZE if off_by else 0}
    for cache, once in zip(layer.kv_cache, alike.kv_cache, strict=True):
        assert torch.equal(cache, once)


def test_a_checked_window_reports_what_its_graphs_gave_and_what_copies_need() -> None:
    checks = checks_of([])
    checks._checks.ended = lambda *_: True
    checks._checks.windows = [{"path": "full graph"}]
    checks._input_batch, checks._path = SimpleNamespace(num_reqs=1), "full graph"
    checks._hidden, checks._needed = {"repeated": 0, "checking": 0}, 5
    checks.end(None, torch.ones(1))
    told = {"path": "full graph", "graphs": {"repeated": 0, "checking": 0}, "copies_need": 5}
    assert checks.take() == [told]


def test_states_without_room_are_not_replayed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = torch.tensor([[2, 5]], dtype=torch.int32)
    layer = Recurrent(tables)
    checks = checks_of([], {"net": layer})
    checks._metadata = {"net": SimpleNamespace(state_indices_tensor_d=tables)}
    checks._runner.device = torch.device("cuda")
    size = 2 * 2 * STATE_SIZE * 4
    for free, fits in ((2 * size - 1, False), (2 * size, True)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, free))
        assert (checks._states_written() is not None) is fits
        assert checks._needed == 2 * size
