"""The gate's interleaved batches, and what timed ones are compared with; no engine."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, FakeKvCache
from toy_run import Runner, of_phase

from nwor_bench.analysis.analyse import analyse
from nwor_bench.analysis.parity.kv import TOO_BLUNT
from nwor_bench.analysis.parity.required import GATE_DID_NOT
from nwor_bench.engine.protocol import BatchOutput, Sampling
from nwor_bench.errors import ExitCode
from nwor_bench.records.cell import INTERLEAVED
from nwor_bench.records.store import RunData
from nwor_bench.records.types import Cell, NworMode, Phase
from nwor_bench.records.window_order import WindowOrder
from nwor_bench.report.run_report import exit_code_of
from nwor_bench.run.gate.block import MAX_INTERLEAVED, GateBlock

pytestmark = pytest.mark.slow  # whole runs

GPU = {"device": "cuda:0", "dtype": "bfloat16"}
RULES = [{}, GPU]
"""Rules of a CPU and of a GPU."""


def in_interleaved(cell: Cell | None) -> bool:
    return cell is not None and cell.arm == INTERLEAVED


def swept(folder: Path, engine: FakeEngine) -> tuple[Runner, RunData]:
    runner = Runner(folder / "run", engine, interleave="windows", batches=1)
    return runner, runner.run()


def check_all_are_invalid(runner: Runner, run: RunData, words: str) -> None:
    """Every cell that differs from stock is INVALID for these words, since all were interleaved."""
    broken = runner.sweep.parity.broken
    suspects = {cell for cell in runner.plan.cells if not cell.is_baseline and cell.arm is None}
    assert set(broken) == suspects
    for reason in broken.values():
        assert reason.startswith("in interleaved windows: ")
        assert words in reason
    found = analyse(run)
    assert {cell.cell for cell in found.cells if cell.verdict == "INVALID"} == suspects
    assert exit_code_of(found) is ExitCode.CORRECTNESS_BROKEN


@pytest.mark.parametrize("rule", RULES)
def test_a_sound_run_interleaves_in_its_gate_and_passes(
    tmp_path: Path, rule: dict[str, Any]
) -> None:
    runner, run = swept(tmp_path, FakeEngine(**rule))
    assert runner.sweep.parity.broken == {}
    batch, last = of_phase(run, Phase.INTERLEAVED_GATE)  # 60 windows: every cell ran
    assert batch.temperature == last.temperature == 0
    own = {window.cell for window in run.windows if window.batch == batch.batch}
    assert {cell.nwor_mode for cell in own} == set(NworMode)
    last_of_gate = max(each.batch for each in of_phase(run, Phase.GATE))
    first_timed = min(each.batch for each in of_phase(run, Phase.INTERLEAVED))
    assert last_of_gate < batch.batch < last.batch < first_timed
    events = [e for e in run.events if e["event"] == "kv_gate" and e["arm"] == INTERLEAVED]
    assert [event["batch"] for event in events] == [batch.batch, last.batch]
    for event in events:
        assert event["verdict"] in ("equal bit for bit", "within tolerance")
    assert unchecked(run) == {}


def unchecked(run: RunData) -> dict[Cell, str]:
    """Cells that have no verdict because of the gate, and why."""
    reasons = {cell.cell: cell.reason or "" for cell in analyse(run).cells}
    return {cell: reason for cell, reason in reasons.items() if GATE_DID_NOT in reason}


def test_a_cell_without_a_turn_in_the_gate_has_no_verdict(tmp_path: Path) -> None:
    """The cache that was compared is that of a batch in which other cells ran."""
    _, run = swept(tmp_path, FakeEngine())
    (timed,) = of_phase(run, Phase.INTERLEAVED)
    staged = {w.cell for w in run.windows if w.batch == timed.batch and w.staged_tokens}
    events = tuple(
        {**event, "batch": timed.batch} if event.get("arm") == INTERLEAVED else event
        for event in run.events
    )
    reasons = unchecked(replace(run, events=events))
    assert reasons == dict.fromkeys(staged, "the gate did not run it in an interleaved batch")


def test_a_path_is_gated_only_if_the_cache_was_compared_behind_it(tmp_path: Path) -> None:
    """Windows of SCV adaptive are ready in the gate's last batch only."""
    _, run = swept(tmp_path, FakeEngine(**GPU))
    last = max(each.batch for each in of_phase(run, Phase.INTERLEAVED_GATE))

    def with_last(**changed: Any) -> dict[str, str | None]:
        events = tuple({**e, **changed} if e.get("batch") == last else e for e in run.events)
        refused = analyse(replace(run, events=events)).cells
        return {cell.label: cell.reason for cell in refused if cell.verdict == "AMBIGUOUS"}

    missed = with_last(verdict="not run", reason="nothing was there")
    assert missed["stage x adaptive"] == (
        "timed on a path that the gate did not compare: full graph, ours, ready"
    )
    found = with_last(verdict="not run", reason=TOO_BLUNT)["stage x adaptive"]
    assert "path" not in (found or "")


class NoLayers(FakeEngine):
    """Checks no layer on its own inputs."""

    def check_layers(self, requests: int | None) -> list[list[dict[str, Any]]]:
        return []


def test_a_gate_that_checks_no_layer_gives_no_verdict(tmp_path: Path) -> None:
    _, run = swept(tmp_path, NoLayers())
    found = unchecked(run)
    assert {cell.nwor_mode for cell in found} == {NworMode.STAGE}
    assert all("check its layers on their own inputs" in reason for reason in found.values())


@pytest.mark.parametrize("unwatched", [True, False])
def test_only_a_cell_whose_timed_path_was_gated_has_a_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unwatched: bool
) -> None:
    """Interleaved windows count for their own cells: those of SCV adaptive are ready."""
    if not unwatched:
        monkeypatch.setattr(GateBlock, "_run_unwatched", lambda *_: None)
    _, run = swept(tmp_path, FakeEngine())
    reason = "timed on a path that the gate did not compare: full graph, ours, ready"
    found = {cell.label: cell.reason for cell in analyse(run).cells if cell.verdict == "AMBIGUOUS"}
    refused = [label for label, told in found.items() if told == reason]
    assert refused == ([] if unwatched else ["stage x adaptive"])


def test_a_run_of_whole_batches_has_no_interleaved_gate(tmp_path: Path) -> None:
    run = Runner(tmp_path / "run", FakeEngine()).run()
    assert of_phase(run, Phase.INTERLEAVED_GATE) == []


@pytest.mark.parametrize("rule", RULES)
def test_wrong_rows_after_an_interleaved_batch(tmp_path: Path, rule: dict[str, Any]) -> None:
    runner, run = swept(tmp_path, FakeEngine(kv=FakeKvCache(wrong=in_interleaved), **rule))
    check_all_are_invalid(runner, run, "K/V: layer 1")
    timed = {window.cell.nwor_mode for window in run.windows if window.block}
    assert timed == {NworMode.OFF}


def in_batch(wanted: int) -> Callable[[int, Cell], bool]:
    """True for a run's interleaved batch of that number, from 1."""
    seen: list[int] = []

    def wrong(number: int, cell: Cell) -> bool:
        if in_interleaved(cell):
            seen.append(number)
        return in_interleaved(cell) and len(seen) == wanted

    return wrong


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("number", [1, 2])  # the second one runs without instruments
def test_other_tokens_in_the_gates_interleaved_batches(
    tmp_path: Path, rule: dict[str, Any], number: int
) -> None:
    runner, run = swept(tmp_path, FakeEngine(wrong=in_batch(number), **rule))
    check_all_are_invalid(runner, run, "1 of 2 requests differ")


class EarlyWrites(FakeEngine):
    """Writes a staged row before its commit, in interleaved batches."""

    def watch_writes(self, on: bool) -> list[dict[str, int]]:
        seen = {"windows": 0, "early": 3, "uneven": 0, "written": 0, "without_slot": 0}
        return [seen] if in_interleaved(self.cell) else []


def test_an_early_write_in_interleaved_windows(tmp_path: Path) -> None:
    runner, run = swept(tmp_path, EarlyWrites())
    check_all_are_invalid(runner, run, "writes: 3 staged rows were written before their commit")


class OtherAcceptance(FakeEngine):
    """Accepts no draft in interleaved batches in which a cell stages."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, **more: Any
    ) -> BatchOutput:
        output = super().generate(prompts, sampling, **more)
        cells = self.order.cells if self.order is not None else ()
        if any(cell.nwor_mode is NworMode.STAGE for cell in cells):
            none = (0,) * len(output.counters.accepted_per_position)
            object.__setattr__(output.counters, "accepted_per_position", none)
        return output


@pytest.mark.parametrize("rule", RULES)
def test_other_acceptance_in_interleaved_windows(tmp_path: Path, rule: dict[str, Any]) -> None:
    runner = Runner(
        tmp_path / "run", OtherAcceptance(**rule), interleave="windows", batches=1, requests=8
    )
    run = runner.run()
    check_all_are_invalid(runner, run, "accepted per position")


@pytest.mark.parametrize("rule", RULES)
def test_a_timed_interleaved_batch_is_compared_with_off(
    tmp_path: Path, rule: dict[str, Any]
) -> None:
    """Tokens differ in the timed batch only; block 1 has whole batches too."""
    engine = FakeEngine(wrong=in_batch(3), **rule)
    runner = Runner(tmp_path / "run", engine, interleave="windows", batches=1, temperature=0.0)
    check_all_are_invalid(runner, runner.run(), "1 of 2 requests differ")


class ShortBatches(FakeEngine):
    """Runs too few windows for more than one pair of cells."""

    def _windows(self, asked: Any) -> list[dict[str, Any]]:
        return super()._windows(asked)[:4] if in_interleaved(self.cell) else super()._windows(asked)

    def interleave(self, order: WindowOrder) -> None:
        super().interleave(order)
        self.orders = [*getattr(self, "orders", []), order]

    def check_layers(self, requests: int | None) -> list[list[dict[str, Any]]]:
        if requests is None:
            self.watched = len(self.orders)
        return super().check_layers(requests)


def test_cells_without_a_turn_get_another_batch(tmp_path: Path) -> None:
    engine = ShortBatches()
    runner, run = swept(tmp_path, engine)
    gate = of_phase(run, Phase.INTERLEAVED_GATE)[: engine.watched]
    acting = {cell for cell in runner.plan.cells if cell.nwor_mode is not NworMode.OFF}
    left = set(acting)
    for batch, order in zip(gate, engine.orders, strict=False):
        assert set(order.cells) >= left
        left -= {window.cell for window in run.windows if window.batch == batch.batch}
    assert 1 < len(gate) <= MAX_INTERLEAVED
    told = [line for line in runner.log.lines if line.startswith("gate: not run in")]
    assert bool(told) is bool(left)


def test_a_gate_cut_behind_its_interleaved_batch_is_not_finished(tmp_path: Path) -> None:
    _, run = swept(tmp_path, FakeEngine())
    *_, last = of_phase(run, Phase.INTERLEAVED_GATE)
    stored = [batch for batch in run.batches if batch.batch <= last.batch]
    of_gate = [batch.batch for batch in stored if batch.phase != Phase.WARMUP]
    cut = replace(run, batches=tuple(stored), finished=frozenset())
    assert cut.cut_blocks() == {(Phase.GATE, 0): of_gate}


def test_a_staged_draft_count_gets_another_batch_with_its_twin(tmp_path: Path) -> None:
    """A window between two groups counts as its draft count's in mode off. Without that cell it was
    the staged one's that held nothing back, and the cell INVALID (seen on an H200)."""
    engine = ShortBatches()
    runner = Runner(
        tmp_path / "run", engine, interleave="windows", batches=1, draft_counts=[0, 1, 2],
        nwor_modes="off,stage", scv_modes="off",
    )  # fmt: skip
    runner.run()
    assert len(engine.orders) > 1
    for order in engine.orders:
        staged = {cell for cell in order.cells if cell.nwor_mode is NworMode.STAGE}
        assert {cell.stock_twin for cell in staged} <= set(order.cells)
    assert any(cell.nwor_mode is NworMode.STAGE for cell in engine.orders[1].cells)
