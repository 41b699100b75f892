"""Runs whose cells take turns: which batches run, what they record, and how they go on."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from toy_run import Runner

from nwor_bench.records.store import RunData
from nwor_bench.records.types import NworMode, Phase


def run_in_turns(folder: Path, batches: int, **more: Any) -> tuple[Runner, RunData]:
    runner = Runner(folder / "run", FakeEngine(), interleave="windows", batches=batches, **more)
    return runner, runner.run()


def blocks_of(run: RunData, phase: Phase) -> list[int]:
    return sorted({batch.block for batch in run.batches if batch.phase == phase})


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
    for batch in run.batches:
        if batch.phase != Phase.INTERLEAVED:
            continue
        own = [window for window in run.windows if window.batch == batch.batch]
        order = runner.plan.window_order(runner.plan.blocks[batch.block - 1], live(runner))
        expected = [order.cells[turn.cell] for turn, _ in zip(order.turns(), own, strict=False)]
        assert [window.cell for window in own] == expected
        assert batch.cell.is_baseline
        staged = sum(w.draft_tokens for w in own if w.cell.nwor_mode is NworMode.STAGE)
        assert batch.staged_tokens == staged > 0
        (event,) = [
            e for e in run.events if e["event"] == "interleaved" and e["batch"] == batch.batch
        ]
        assert list(event["cells"]) == [cell.label for cell in order.cells]


def live(runner: Runner) -> list[Any]:
    """The cells that can fire on a CPU: no SCV mode can."""
    return [cell for cell in runner.plan.cells if cell.scv_mode == "off"]


def test_a_run_that_was_cut_goes_on_with_the_same_turns(tmp_path: Path) -> None:
    whole = run_in_turns(tmp_path / "whole", 4)[1]
    calls = len([b for b in whole.batches if b.block <= 2])
    failing = FakeEngine(failing={calls: KeyboardInterrupt()})
    first = Runner(tmp_path / "run", failing, interleave="windows", batches=4)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    again = Runner(tmp_path / "run", FakeEngine(), interleave="windows", batches=4).run()
    assert turns_of(again) == turns_of(whole)


def turns_of(run: RunData) -> dict[int, list[tuple[str, int | None]]]:
    numbers = {b.batch: b.block for b in run.batches if b.phase == Phase.INTERLEAVED}
    found: dict[int, list[tuple[str, int | None]]] = {}
    for window in run.windows:
        if window.batch in numbers:
            found.setdefault(numbers[window.batch], []).append((window.cell.label, window.group))
    return found
