"""A resumed run goes on with the sums of ties and acceptance that its first part had."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from test_parity_gate import accepted, flip, gpu_engine, one_less
from toy_run import Log, Runner, encode

from nwor_bench.records.cell import INTERLEAVED
from nwor_bench.records.store import RunStore
from nwor_bench.records.types import Cell
from nwor_bench.run.blocks import BlockRunner
from nwor_bench.run.gate.parity import ParityGate

pytestmark = pytest.mark.slow  # whole runs

BLOCKS = 3


def begun(folder: Path, **flags: Any) -> Runner:
    """A run with ties in its gate and in two timed blocks, and other acceptance in all of them."""
    runner = Runner(folder, gpu_engine(accepted(one_less)), **flags)
    for block, request, at in ((0, 1, 3), (1, 0, 2), (3, 1, 5)):
        flip(runner, block, request, at, gap=0.03)
    return runner


def resumed(runner: Runner) -> BlockRunner:
    """The rest of a run that was cut."""
    runner.engine.failing.clear()
    store = RunStore.open(runner.folder)
    sweep = BlockRunner(runner.plan, runner.spec, runner.engine, store, encode, Log())
    sweep.run()
    return sweep


def sums(gate: ParityGate) -> dict[Cell, Any]:
    """Ties, prompts, compared tokens and acceptance of each cell."""
    cells = gate._sums._cells
    assert all(cell.prompts and cell.acceptance for cell in cells.values())
    return cells


def cut_at(folder: Path, call: int, **flags: Any) -> Runner:
    runner = begun(folder, **flags)
    runner.engine.failing[call] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        runner.run()
    return runner


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    runner = begun(tmp_path_factory.mktemp("uncut") / "run")
    runner.run()
    assert runner.sweep.parity.broken == {}
    return runner


@examples(28)
@given(data=st.data())
def test_cut_and_resumed_is_uninterrupted(uncut: Runner, data: st.DataObject) -> None:
    call = data.draw(st.integers(1, len(uncut.engine.calls) - 1))
    with TemporaryDirectory() as folder:
        runner = cut_at(Path(folder) / "run", call)
        assert sums(resumed(runner).parity) == sums(uncut.sweep.parity)


def test_a_run_that_is_cut_twice_counts_no_batch_twice(uncut: Runner, tmp_path: Path) -> None:
    cells = len(uncut.plan.cells)
    runner = cut_at(tmp_path / "run", 1 + 2 * cells + 3)  # in the second timed block
    runner.engine.failing[len(runner.engine.calls) + 1 + 2] = KeyboardInterrupt()  # there again
    store = RunStore.open(runner.folder)
    with pytest.raises(KeyboardInterrupt):
        BlockRunner(runner.plan, runner.spec, runner.engine, store, encode, Log()).run()
    assert sums(resumed(runner).parity) == sums(uncut.sweep.parity)


def test_the_sums_of_interleaved_batches_are_restored(tmp_path: Path) -> None:
    whole = begun(tmp_path / "whole", interleave="windows")
    run = whole.run()
    (last,) = [
        n for n, b in enumerate(run.batches) if (b.phase, b.block) == ("interleaved", BLOCKS)
    ]
    found = sums(resumed(cut_at(tmp_path / "run", last, interleave="windows")).parity)
    assert found == sums(whole.sweep.parity)
    assert INTERLEAVED in {cell.arm for cell in found}
