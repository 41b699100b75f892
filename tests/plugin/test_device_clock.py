"""The device's clock in interleaved batches: phases of each window, by events used again."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from live_windows import switching
from v2_pieces import make_hook, run_step

from nwor_bench.records.window import WindowRecord

pytestmark = pytest.mark.slow  # vLLM's runner is imported

CELLS = [("off", "off"), ("stage", "off")]


class Device:
    """Events on a device that takes a millisecond from each to the next."""

    now, made = 0.0, 0

    def event(self, *, enable_timing: bool) -> "Event":
        assert enable_timing
        self.made += 1
        return Event(self)


class Event:
    """One of them."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self, stream: str) -> None:
        assert stream == "current"
        self.device.now += 1
        self.at = self.device.now

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """It has passed."""

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    return made


def hook_on_a_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    hook = make_hook(monkeypatch)
    hook.clock._device = torch.device("cuda")
    return hook


def windows_of(hook: Any, steps: int = 24) -> list[WindowRecord]:
    for _ in range(steps):
        run_step(hook, ["a-1", "b-2"])
    return list(hook.drain({}))


def phases(window: WindowRecord) -> list[float | None]:
    return [
        getattr(window, f"{name}_ms") for name in ("device", "forward", "sample", "mask", "commit")
    ]


def test_phases_of_both_cells_are_timed_between_the_same_events(
    monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    hook = hook_on_a_device(monkeypatch)
    switching(hook, CELLS).start()
    first, *windows, last = windows_of(hook)
    found = {window.cell_number: phases(window) for window in windows[1:]}
    # A step's start, the forward's start and each phase's end are a millisecond apart.
    assert found == {0: [5.0, 1.0, 1.0, None, 1.0], 1: [6.0, 1.0, 1.0, 1.0, 1.0]}
    assert phases(first) == [None] * 5  # it still waits for the prefill
    assert phases(last)[0] is None
    made = device.made
    assert len(windows_of(hook)) == 24
    assert device.made == made


def test_elsewhere_no_event_is_recorded(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    hook = hook_on_a_device(monkeypatch)
    assert {tuple(phases(window)) for window in windows_of(hook)} == {(None,) * 5}
    assert device.now == 0
    switching(hook, CELLS).start()
    hook.interleave(None)
    windows_of(hook)
    assert device.now == 0


def test_a_server_times_steps_and_no_phases(
    monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    hook = hook_on_a_device(monkeypatch)
    hook.count_without_waiting()
    switching(hook, CELLS).start()
    assert {tuple(phases(window)) for window in windows_of(hook)[2:-1]} == {(1.0, *[None] * 4)}


def test_what_the_gpu_waits_before_a_replay_is_no_work(
    monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    hook = hook_on_a_device(monkeypatch)
    full = SimpleNamespace(cg_mode=SimpleNamespace(name="FULL"))

    def passes(ms: float) -> None:
        device.now += ms

    hook._parts.graphs.replay = hook._parts.sham_graphs.replay = lambda desc: passes(5)
    hook._parts.sham_graphs.shapes = {}
    replay, prepare = hook._wrap_run_fullgraph(lambda desc: passes(5)), hook.runner.prepare_attn

    def prepare_and_replay(batch: Any) -> Any:
        hook._descriptor = full  # as vLLM's dispatch sets it in each step
        prepared = prepare(batch)
        passes(100)
        replay("desc")
        return prepared

    monkeypatch.setattr(hook.window, "replayed", lambda: None)  # `run_step` stages each layer
    monkeypatch.setattr(hook.runner, "prepare_attn", prepare_and_replay)
    switching(hook, [*CELLS, ("sham", "off")], [(0, 1), (0, 2)]).start()
    found = {window.cell_number: phases(window) for window in windows_of(hook, 48)[2:-1]}
    assert {cell: times[1] for cell, times in found.items()} == {0: 6.0, 1: 6.0, 2: 6.0}
    assert {cell: times[0] for cell, times in found.items()} == {0: 110.0, 1: 111.0, 2: 110.0}
