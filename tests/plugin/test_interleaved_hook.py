"""Cells interleaved on the V2 runner's hook: the device's clock, and the A/A arm.

A sham switches as stage does and computes what off computes.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from live_windows import switching
from v2_pieces import make_hook, run_step, scheduled

from nwor_bench.plugin.interleaving import ModeSwitch
from nwor_bench.plugin.patching import Patch, PatchSet
from nwor_bench.records.cell import SHAM, SWITCHED
from nwor_bench.records.window import WindowRecord
from nwor_bench.records.window_order import WindowPlace

pytestmark = pytest.mark.slow  # vLLM's runner is imported

OFF, ARM, STAGE = ("off", "off"), (SHAM, "off"), ("stage", "off")
CELLS = [OFF, STAGE]
REQUESTS = ["a-1", "b-2"]


def full_graph(mode: str = "FULL") -> Any:
    """vLLM's descriptor of a step's graph."""
    return SimpleNamespace(cg_mode=SimpleNamespace(name=mode))


def windows_of(hook: Any, steps: int = 24) -> list[WindowRecord]:
    for _ in range(steps):
        run_step(hook, REQUESTS)
    return list(hook.drain({}))


# The device's clock.


class Device:
    """Events on a device that takes a millisecond from each to the next."""

    now, made = 0.0, 0

    def event(self, *, enable_timing: bool) -> "Event":
        assert enable_timing
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self, stream: str) -> None:
        assert stream == "current"
        self.device.now += 1
        self.at = self.device.now

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing to wait for: the event has passed."""

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    return made


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch, device: Device) -> Any:
    """A hook whose clock is the device's."""
    made = make_hook(monkeypatch)
    made.clock._device = torch.device("cuda")
    return made


def phases(window: WindowRecord) -> tuple[float | None, ...]:
    names = ("device", "forward", "sample", "mask", "commit")
    return tuple(getattr(window, f"{name}_ms") for name in names)


UNTIMED = (None,) * 5


def test_phases_of_both_cells_are_timed_between_the_same_events(hook: Any, device: Device) -> None:
    switching(hook, CELLS).start()
    first, *windows, last = windows_of(hook)
    found = {window.cell_number: phases(window) for window in windows[1:]}
    # A step's start, the forward's start and each phase's end are a millisecond apart.
    assert found == {0: (5.0, 1.0, 1.0, None, 1.0), 1: (6.0, 1.0, 1.0, 1.0, 1.0)}
    assert phases(first) == UNTIMED  # it still waits for the prefill
    assert phases(last)[0] is None
    made = device.made
    assert len(windows_of(hook)) == 24
    assert device.made == made


def test_elsewhere_no_event_is_recorded(hook: Any, device: Device) -> None:
    assert set(map(phases, windows_of(hook))) == {UNTIMED}
    assert device.now == 0
    switching(hook, CELLS).start()
    hook.interleave(None)
    windows_of(hook)
    assert device.now == 0


def test_a_server_times_steps_and_no_phases(hook: Any) -> None:
    hook.count_without_waiting()
    switching(hook, CELLS).start()
    assert set(map(phases, windows_of(hook)[2:-1])) == {(1.0, *UNTIMED[1:])}


def test_what_the_gpu_waits_before_a_replay_is_no_work(
    monkeypatch: pytest.MonkeyPatch, hook: Any, device: Device
) -> None:
    def passes(ms: float) -> None:
        device.now += ms

    hook._parts.graphs.replay = hook._parts.sham_graphs.replay = lambda desc: passes(5)
    hook._parts.sham_graphs.shapes = {}
    replay, prepare = hook._wrap_run_fullgraph(lambda desc: passes(5)), hook.runner.prepare_attn

    def prepare_and_replay(batch: Any) -> Any:
        hook._descriptor = full_graph()  # as vLLM's dispatch sets it in each step
        prepared = prepare(batch)
        passes(100)
        replay("desc")
        return prepared

    monkeypatch.setattr(hook.window, "replayed", lambda: None)  # `run_step` stages each layer
    monkeypatch.setattr(hook.runner, "prepare_attn", prepare_and_replay)
    switching(hook, [*CELLS, ARM], [(0, 1), (0, 2)]).start()
    found = {window.cell_number: phases(window) for window in windows_of(hook, 48)[2:-1]}
    assert {cell: times[1] for cell, times in found.items()} == {0: 6.0, 1: 6.0, 2: 6.0}
    assert {cell: times[0] for cell, times in found.items()} == {0: 110.0, 1: 111.0, 2: 110.0}


# The A/A arm.


class Machine:
    """A hook with a patch, and graphs that say whose they are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, unavailable: str | None = None) -> None:
        self.layer = SimpleNamespace(forward=lambda: "stock")
        self.hook: Any = make_hook(monkeypatch)
        self.hook.validator.warm_up = lambda drafts: None
        self.stock = self.layer.forward
        parts = self.hook._parts
        parts.attention = PatchSet([Patch(self.layer, "forward", lambda own: lambda: own())])
        parts.sham_graphs = SimpleNamespace(
            capture=self._capture, give_up=lambda reason: None, unavailable=unavailable,
            shapes={} if unavailable else {"captured": None}, replay=lambda desc: "sham",
        )  # fmt: skip
        self.run_fullgraph = self.hook._wrap_run_fullgraph(lambda desc: "vLLM")

    def _capture(self) -> None:
        assert not self.patched

    @property
    def patched(self) -> bool:
        return self.layer.forward is not self.stock

    def interleaving(self, *cells: tuple[str, str]) -> ModeSwitch:
        made = switching(self.hook, cells, [(0, n) for n in range(1, len(cells))])
        made.start()
        return made


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", None])
def test_a_sham_patches_and_replays_graphs_of_its_own_in_mode_off(
    monkeypatch: pytest.MonkeyPatch, mode: str | None
) -> None:
    """Layers are patched only for a forward that calls them: no full graph does."""
    machine = Machine(monkeypatch)
    interleaving = machine.interleaving(OFF, ARM, STAGE)
    seen = []
    for number in (0, 1, 2, 1, 0):
        interleaving.enter(number)
        if mode is not None:
            machine.hook._descriptor = full_graph(mode)
        machine.hook.runner.prepare_attn(None)
        replayed = machine.run_fullgraph("captured")
        seen.append((str(machine.hook.nwor_mode), machine.patched, replayed))
        assert machine.layer.forward() == "stock"
    calls_layers = mode != "FULL"
    off, sham = ("off", False, "vLLM"), ("off", calls_layers, "sham")
    assert seen == [off, sham, ("stage", calls_layers, "vLLM"), sham, off]


def test_a_switch_between_two_full_graphs_is_made_good_by_the_next_eager_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)
    interleaving = machine.interleaving(OFF, STAGE)
    runner = machine.hook.runner
    runner.prepare_attn(None)
    interleaving.enter(1)
    machine.hook._descriptor = full_graph()
    runner.prepare_attn(None)
    assert not machine.patched
    machine.hook.interleave(None)
    runner.execute_model(scheduled([]))  # no graph was asked for in this step yet
    runner.prepare_attn(None)
    assert machine.patched
    machine.hook.detach()
    assert not machine.patched


def test_a_shams_windows_count_as_off(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.interleaving(OFF, ARM)
    found = {(w.cell_number, w.staged_tokens, w.fallback_reason) for w in windows_of(machine.hook)}
    assert found == {(0, 0, None), (1, 0, None)}


def test_a_sham_without_its_graphs_is_plain_off_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = "graph_capture:OutOfMemoryError"
    machine = Machine(monkeypatch, reason)
    interleaving = machine.interleaving(OFF, ARM)
    for number in (1, 1, 0, 1):
        interleaving.enter(number)
        assert not machine.patched
        assert machine.run_fullgraph("captured") == "vLLM"
    assert [facts.get(SHAM) for facts in interleaving.facts()] == [None, {reason: 3}]


def test_a_window_of_a_shape_that_was_not_captured_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)
    interleaving = machine.interleaving(OFF, ARM)
    interleaving.enter(1)
    machine.hook._step = SimpleNamespace(place=WindowPlace(1, 0, 0, 2, 0))
    assert machine.run_fullgraph("uneven") == "vLLM"
    machine.hook._step = None
    assert interleaving.facts()[1][SHAM] == {SWITCHED: 0, "full_graph_of_another_shape": 1}
