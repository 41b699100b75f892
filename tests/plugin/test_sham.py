"""The A/A arm as a sham: it switches as stage does and computes what off computes."""

from types import SimpleNamespace
from typing import Any

import pytest
from live_windows import switching
from v2_pieces import make_hook, run_step, scheduled

from nwor_bench.plugin.interleaving import ModeSwitch
from nwor_bench.plugin.patching import Patch, PatchSet
from nwor_bench.records.cell import SHAM, SWITCHED
from nwor_bench.records.window_order import WindowPlace

pytestmark = pytest.mark.slow  # vLLM's runner is imported

OFF, ARM, STAGE = ("off", "off"), (SHAM, "off"), ("stage", "off")


class Machine:
    """A hook with a patch, and graphs that say whose they are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, unavailable: str | None = None) -> None:
        self.captures = 0
        self.layer = SimpleNamespace(forward=lambda: "stock")
        self.hook: Any = make_hook(monkeypatch)
        self.hook.validator.warm_up = lambda drafts: None
        self.stock = self.layer.forward
        parts = self.hook._parts
        parts.attention = PatchSet([Patch(self.layer, "forward", self._patched)])
        shapes = {} if unavailable else {"captured": None}
        parts.sham_graphs = SimpleNamespace(
            capture=self._capture, give_up=lambda reason: None, unavailable=unavailable,
            shapes=shapes, replay=lambda desc: "sham",
        )  # fmt: skip
        self.run_fullgraph = self.hook._wrap_run_fullgraph(lambda desc: "vLLM")

    def _capture(self) -> None:
        assert self.layer.forward is self.stock
        self.captures += 1

    def _patched(self, original: Any) -> Any:
        return lambda: original()

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
            machine.hook._descriptor = SimpleNamespace(cg_mode=SimpleNamespace(name=mode))
        machine.hook.runner.prepare_attn(None)
        patched = machine.layer.forward is not machine.stock
        seen.append((str(machine.hook.nwor_mode), patched, machine.run_fullgraph("captured")))
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
    machine.hook._descriptor = SimpleNamespace(cg_mode=SimpleNamespace(name="FULL"))
    runner.prepare_attn(None)
    assert machine.layer.forward is machine.stock
    machine.hook.interleave(None)
    runner.execute_model(scheduled([]))  # no graph was asked for in this step yet
    runner.prepare_attn(None)
    assert machine.layer.forward is not machine.stock
    machine.hook.detach()
    assert machine.layer.forward is machine.stock


def test_a_sham_turns_windows_count_as_off(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.interleaving(OFF, ARM)
    for _ in range(24):
        run_step(machine.hook, ["a-1", "b-2"])
    windows = machine.hook.drain(None)
    assert {window.cell_number for window in windows} == {0, 1}
    assert {(w.staged_tokens, w.fallback_reason) for w in windows} == {(0, None)}


def test_a_sham_without_its_graphs_is_plain_off_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = "graph_capture:OutOfMemoryError"
    machine = Machine(monkeypatch, reason)
    interleaving = machine.interleaving(OFF, ARM)
    for number in (1, 1, 0, 1):
        interleaving.enter(number)
        assert machine.layer.forward is machine.stock
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
