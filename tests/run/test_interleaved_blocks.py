"""Runs whose cells take turns: which batches run, what they record, and how they go on."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from toy_run import Runner, blocks_of

from nwor_bench.records.store import RunData
from nwor_bench.records.types import NworMode, Phase

pytestmark = pytest.mark.slow  # whole runs


def run_in_turns(folder: Path, batches: int, **more: Any) -> tuple[Runner, RunData]:
    runner = Runner(folder / "run", FakeEngine(), interleave="windows", batches=batches, **more)
    return runner, runner.run()


@pytest.mark.parametrize(
    ("batches", "checked"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (20, [1, 8, 16])]
)
def test_every_block_is_interleaved_and_some_are_checked(
    tmp_path: Path, batches: int, checked: list[int]
) -> None:
    _, run = run_in_turns(tmp_path, batches)
    assert blocks_of(run, Phase.INTERLEAVED) == list(range(1, batches + 1))
    assert blocks_of(run, Phase.TIMED) == checked
    in_turn = Counter(batch.block for batch in run.batches if batch.phase == Phase.INTERLEAVED)
    assert set(in_turn.values()) == {1}


def test_windows_are_recorded_as_their_own_cells(tmp_path: Path) -> None:
    runner, run = run_in_turns(tmp_path, 2)
    batches = [batch for batch in run.batches if batch.phase == Phase.INTERLEAVED]
    assert len(batches) == 2
    for batch in batches:
        own = [window for window in run.windows if window.batch == batch.batch]
        told = [event for event in run.events if event["event"] == "interleaved"]
        (event,) = [event for event in told if event["batch"] == batch.batch]
        cells = [cell for cell in runner.plan.cells if cell.label in event["cells"]]
        order = runner.plan.window_order(runner.plan.blocks[batch.block - 1], cells)
        expected = [order.cells[turn.cell] for turn, _ in zip(order.turns(), own, strict=False)]
        assert [window.cell for window in own] == expected
        assert batch.cell.is_baseline
        staged = sum(w.draft_tokens for w in own if w.cell.nwor_mode is NworMode.STAGE)
        assert batch.staged_tokens == staged > 0


def test_another_process_draws_the_same_turns(tmp_path: Path) -> None:
    """A block that was cut is run again whole, in the order that the plan has."""
    first = run_in_turns(tmp_path / "first", 3)[1]
    assert turns_of(run_in_turns(tmp_path / "again", 3)[1]) == turns_of(first)
    assert turns_of(run_in_turns(tmp_path / "other", 3, seed=1)[1]) != turns_of(first)


def turns_of(run: RunData) -> dict[int, list[tuple[str, int | None]]]:
    numbers = {b.batch: b.block for b in run.batches if b.phase == Phase.INTERLEAVED}
    found: dict[int, list[tuple[str, int | None]]] = {}
    for window in run.windows:
        if window.batch in numbers:
            found.setdefault(numbers[window.batch], []).append((window.cell.label, window.group))
    return found
