"""The A/A arm as a sham: it switches as stage does and computes what off computes."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from interleaved_run import IN_TURN, Planted, interleaved_run
from synthetic_run import AA_CELL, analysed, summarised
from v2_pieces import make_hook, run_step

from nwor_bench.analysis.findings.table import FindingKind
from nwor_bench.plugin.interleaving import Interleaving
from nwor_bench.plugin.patching import Patch, PatchSet
from nwor_bench.records.cell import SHAM, SWITCHED
from nwor_bench.records.store import RunData
from nwor_bench.records.types import NworMode, ScvMode, Verdict
from nwor_bench.records.window_order import Turn

pytestmark = pytest.mark.slow  # vLLM's runner is imported

OFF, ARM, STAGE = ("off", "off"), (SHAM, "off"), ("stage", "off")
BIAS, LASTS = 1.06, 2
"""Planted: the windows that follow a patch's application take longer, so many of them."""


class Machine:
    """A hook with a patch whose application is felt, and graphs that say whose they are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, unavailable: str | None = None) -> None:
        self.biased = self.captures = 0
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
        self.biased = LASTS
        return lambda: original()

    def turns(self, *cells: tuple[str, str]) -> Interleaving:
        made = Interleaving(self.hook, cells, [(0, n) for n in range(1, len(cells))], "a")
        made.start()
        return made


def turn(cell: int) -> Turn:
    return Turn(cell, 0, 0, 2, 0)


def test_a_sham_patches_and_replays_graphs_of_its_own_in_mode_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)
    turns = machine.turns(OFF, ARM, STAGE)
    seen = []
    for number in (0, 1, 2, 1, 0):
        turns._take(turn(number))
        patched = machine.layer.forward is not machine.stock
        seen.append((str(machine.hook.nwor_mode), patched, machine.run_fullgraph("captured")))
        assert machine.layer.forward() == "stock"
    off, sham = ("off", False, "vLLM"), ("off", True, "sham")
    assert seen == [off, sham, ("stage", True, "vLLM"), sham, off]


def test_graphs_of_the_sham_are_captured_without_our_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)
    machine.hook.take_turn(NworMode.STAGE, ScvMode.OFF)
    assert machine.hook.prepare_sham() is None
    assert machine.captures == 1


def test_a_sham_turns_windows_count_as_off(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.turns(OFF, ARM)
    for _ in range(24):
        run_step(machine.hook, ["a-1", "b-2"])
    windows = machine.hook.drain(None)
    assert {window["cell"] for window in windows} == {0, 1}
    assert {(w["staged_tokens"], w["fallback_reason"]) for w in windows} == {(0, None)}


def test_a_sham_without_its_graphs_is_plain_off_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = "graph_capture:OutOfMemoryError"
    machine = Machine(monkeypatch, reason)
    turns = machine.turns(OFF, ARM)
    for number in (1, 1, 0, 1):
        turns._take(turn(number))
        assert machine.layer.forward is machine.stock
        assert machine.run_fullgraph("captured") == "vLLM"
    assert [facts.get(SHAM) for facts in turns.facts()] == [None, {reason: 3}]


def test_a_window_of_a_shape_that_was_not_captured_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)
    turns = machine.turns(OFF, ARM)
    step = SimpleNamespace(turn=turns._take(turn(1)))
    machine.hook._step = step
    assert machine.run_fullgraph("uneven") == "vLLM"
    machine.hook._step = None
    assert turns.facts()[1][SHAM] == {SWITCHED: 0, "full_graph_of_another_shape": 1}


@cache
def quiet() -> RunData:
    return interleaved_run(Planted({}), batches=12)


def with_bias(machine: Machine, arm: tuple[str, str]) -> RunData:
    """The quiet run, on a machine where a patch's application is felt by the windows behind it."""
    modes = [(str(cell.nwor_mode), str(cell.scv_mode)) for cell in IN_TURN]
    modes[IN_TURN.index(AA_CELL)] = arm
    turns, windows = machine.turns(*modes), []
    for window in quiet().windows:
        factor = 1.0
        if window.group is not None:
            turns._take(turn(IN_TURN.index(window.cell)))
            factor = BIAS if machine.biased else 1.0
            machine.biased = max(0, machine.biased - 1)
            assert window.device_ms is not None
            window = replace(window, device_ms=window.device_ms * factor)
        windows.append(window)
    facts: Mapping[str, Any] = turns.facts()[IN_TURN.index(AA_CELL)]
    events = list(quiet().events)
    place = next(n for n, event in enumerate(events) if event.get("event") == "interleaved")
    events[place] = {**events[place], "cells": {**events[place]["cells"], AA_CELL.label: facts}}
    return replace(quiet(), windows=tuple(windows), events=tuple(events))


def told(run: RunData) -> tuple[float, str, list[str]]:
    """The A/A cell's ratio and verdict, and what findings say of it."""
    cells = summarised(run)
    arm = next(cell for cell in cells if cell.cell == AA_CELL)
    found = [f.message for f in analysed(run, cells).findings if f.kind is FindingKind.AA_DIFFERS]
    assert arm.ratio_to_off is not None
    return arm.ratio_to_off, arm.verdict, found


def test_a_bias_of_switching_shows_in_the_sham_and_not_in_an_arm_that_switches_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ratio, verdict, found = told(with_bias(Machine(monkeypatch), OFF))
    assert abs(ratio - 1) < 0.003
    assert (verdict, found) == (Verdict.SAME, [])
    ratio, verdict, found = told(with_bias(Machine(monkeypatch), ARM))
    # The first of B's two runs follows a switch: 6 % of one in two, or in six, windows that count.
    assert 1.015 < ratio < 1.025
    assert verdict == Verdict.SLOWER
    assert len(found) == 1
    assert "switching itself may bias every ratio" in found[0]
