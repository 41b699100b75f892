"""The sweep on a stand-in engine: gate first and greedy, every batch stored as it ends."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, events_but_gates
from toy_run import BASELINE, STAGE, Runner, blocks_of, encode, of_phase

from nwor_bench.analysis.analyse import analyse
from nwor_bench.records.store import RunData, read_run
from nwor_bench.records.types import Cell, NworMode, Phase, ScvMode, Verdict

pytestmark = pytest.mark.slow  # whole runs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_warm_up_then_gate_then_blocks_in_the_planned_order(folder: Path) -> None:
    runner = Runner(folder, FakeEngine(), warmup=2)
    run = runner.run()
    last = Cell("toy", NworMode.STAGE, ScvMode.ADAPTIVE)  # of the gate: without instruments
    timed = [cell for block in runner.plan.blocks for cell in block.order]
    planned = [BASELINE] * 2 + [*runner.plan.gate.order, last, *timed]
    assert [call.cell for call in runner.engine.calls] == planned
    assert [batch.cell for batch in run.batches] == planned
    assert [batch.phase for batch in run.batches] == ["warmup"] * 2 + ["gate"] * 8 + ["timed"] * 21
    assert [batch.batch for batch in run.batches] == list(range(31))
    again = runner.plan.gate.order.index(last)
    orders = [0, 0, *range(7), again, *list(range(7)) * 3]
    assert [batch.order for batch in run.batches] == orders
    assert len(runner.log.done) == runner.plan.num_batches == 31
    for entry in run.header.blocks:
        ran = [b for b in run.batches if b.phase != "warmup" and b.block == entry.block]
        assert list(entry.order) == [batch.cell.label for batch in ran][:7]
        assert len(entry.prompt_ids) == 2


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_gate_is_greedy_whatever_the_temperature(folder: Path, temperature: float) -> None:
    runner = Runner(folder, FakeEngine(), temperature=temperature)
    run = runner.run()
    gate = runner.engine.calls[1:9]
    assert {(c.sampling.temperature, c.sampling.top_p) for c in gate} == {(0.0, 1.0)}
    timed = runner.engine.calls[9:]
    assert {(c.sampling.temperature, c.sampling.top_p) for c in timed} == {(temperature, 0.9)}
    assert {batch.temperature for batch in of_phase(run, "gate")} == {0.0}
    assert [b.parity for b in of_phase(run, "gate")] == ["reference"] + ["exact"] * 7


def test_all_cells_of_a_block_get_the_same_prompts_and_seed(folder: Path) -> None:
    runner = Runner(folder, FakeEngine(), temperature=0.8, seed=5)
    run = runner.run()
    asked: dict[int, set[Any]] = {}
    for batch, call in zip(run.batches, runner.engine.calls, strict=True):
        if batch.phase == "timed":
            asked.setdefault(batch.block, set()).add((call.prompts, call.sampling))
    assert sorted(asked) == [1, 2, 3]
    assert all(len(what) == 1 for what in asked.values())
    assert sorted({call.sampling.seed for call in runner.engine.calls}) == [5, 7, 9, 11]
    digests = {(b.block, b.prompt_digest) for b in run.batches if b.phase == "timed"}
    assert len(digests) == 3
    for block in runner.plan.blocks:
        prompts, sampling = next(iter(asked[block.number]))
        assert [list(p) for p in prompts] == encode(block.prompts)
        assert sampling.max_new_tokens == 8


def test_a_cell_with_other_tokens_is_invalid_and_never_timed(folder: Path) -> None:
    runner = Runner(folder, FakeEngine(wrong=lambda number, cell: cell == STAGE))
    run = runner.run()
    gate = {batch.cell: batch for batch in of_phase(run, "gate")}
    assert gate[STAGE].parity == "INVALID"
    assert "1 of 2 requests differ; first: request 1, output token 7" in str(
        gate[STAGE].first_mismatch
    )
    assert {b.parity for c, b in gate.items() if c != STAGE} == {"reference", "exact"}
    assert STAGE not in {batch.cell for batch in of_phase(run, "timed")}
    assert len(of_phase(run, "timed")) == 6 * 3
    assert list(runner.sweep.parity.broken) == [STAGE]
    assert any("gate: 2 of 5 cells acted" in line for line in runner.log.lines)
    assert any("stage x off gives another output" in line for line in runner.log.lines)
    verdicts = {(c.nwor_mode, c.scv_mode): c for c in analyse(run).cells}
    broken = verdicts["stage", "off"]
    assert broken.verdict == Verdict.INVALID
    assert broken.latency_ms_p50 is broken.ratio_to_off is broken.tokens_per_s is None


def test_parity_that_breaks_later_is_found_and_stops_the_cell(folder: Path) -> None:
    number_of_block_2 = 1 + 7 + 7

    def wrong(number: int, cell: Cell) -> bool:
        return cell == STAGE and number >= number_of_block_2

    runner = Runner(folder, FakeEngine(wrong=wrong))
    run = runner.run()
    timed = [batch.block for batch in of_phase(run, "timed") if batch.cell == STAGE]
    assert timed == [1, 2]
    assert [b.cell for b in of_phase(run, "timed")].count(BASELINE) == 3
    (event,) = events_but_gates(run)
    assert {k: event[k] for k in ("event", "pair", "nwor_mode", "scv_mode", "block")} == {
        "event": "parity_broken", "pair": "toy", "nwor_mode": "stage", "scv_mode": "off",
        "block": 2,
    }  # fmt: skip
    verdicts = {(c.nwor_mode, c.scv_mode, c.arm): c.verdict for c in analyse(run).cells}
    assert verdicts["stage", "off", None] == Verdict.INVALID
    assert list(verdicts.values()).count(Verdict.INVALID) == 1


def test_sampled_blocks_are_not_compared(folder: Path) -> None:
    """Above temperature 0 equal seeds need not give equal tokens; only the gate compares tokens."""

    def wrong(number: int, cell: Cell) -> bool:
        return cell == STAGE and number > 7

    runner = Runner(folder, FakeEngine(wrong=wrong), temperature=0.8)
    run = runner.run()
    assert events_but_gates(run) == []
    assert runner.sweep.parity.broken == {}
    assert len(of_phase(run, "timed")) == 21


def test_counters_are_switched_off_when_their_batch_fails(folder: Path) -> None:
    runner = Runner(folder, FakeEngine(), counters="dram")
    timed = 2 + len(runner.plan.cells) * (1 + len(runner.plan.blocks))
    runner.engine.failing[timed + 2] = RuntimeError("planted")
    with pytest.raises(RuntimeError, match="planted"):
        runner.run()
    assert runner.engine.switched == [(timed, "counters", True), (timed + 3, "counters", False)]
    assert len(of_phase(read_run(folder), "counters")) == 2


def run_interleaved(folder: Path, batches: int, **more: Any) -> tuple[Runner, RunData]:
    runner = Runner(folder / "run", FakeEngine(), interleave="windows", batches=batches, **more)
    return runner, runner.run()


@pytest.mark.parametrize(
    ("batches", "checked"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (20, [1, 8, 16])]
)
def test_every_block_is_interleaved_and_some_are_checked(
    tmp_path: Path, batches: int, checked: list[int]
) -> None:
    _, run = run_interleaved(tmp_path, batches)
    assert blocks_of(run, Phase.INTERLEAVED) == list(range(1, batches + 1))
    assert blocks_of(run, Phase.TIMED) == checked
    in_turn = Counter(batch.block for batch in run.batches if batch.phase == Phase.INTERLEAVED)
    assert set(in_turn.values()) == {1}


def test_windows_are_recorded_as_their_own_cells(tmp_path: Path) -> None:
    runner, run = run_interleaved(tmp_path, 2)
    batches = [batch for batch in run.batches if batch.phase == Phase.INTERLEAVED]
    assert len(batches) == 2
    for batch in batches:
        own = [window for window in run.windows if window.batch == batch.batch]
        told = [event for event in run.events if event["event"] == "interleaved"]
        (event,) = [event for event in told if event["batch"] == batch.batch]
        cells = [cell for cell in runner.plan.cells if cell.label in event["cells"]]
        order = runner.plan.window_order(runner.plan.blocks[batch.block - 1], cells)
        expected = [order.cells[place.cell] for place, _ in zip(order.places(), own, strict=False)]
        assert [window.cell for window in own] == expected
        assert batch.cell.is_baseline
        staged = sum(w.draft_tokens for w in own if w.cell.nwor_mode is NworMode.STAGE)
        assert batch.staged_tokens == staged > 0
