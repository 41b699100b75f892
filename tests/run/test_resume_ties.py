"""Resuming a run in bf16 on a GPU: two engine processes break ties in different ways.

The stand-in engine's last tokens depend on its process and on the cell, as bf16 ties do; the
tokens of two processes never agree, and within one process every difference is a tie.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
from fake_engine import FakeEngine
from tiny_session import RUN, begin, go_on

from nwor_bench.analysis.parity.ties import ErrorScale, Place, PlaceVerdict
from nwor_bench.errors import ExitCode
from nwor_bench.records.store import RunData, read_run
from nwor_bench.records.types import BatchRecord, Cell
from nwor_bench.run import blocks as runner
from nwor_bench.run.progress import Progress

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_surroundings", "ties")]

CELLS, BLOCKS = 7, 2
BATCHES = 1 + CELLS * (1 + BLOCKS)  # one of warm-up, the gate, two timed blocks
FAR = 1000
"""A last token that is off by so much is no tie."""


class TieEngine(FakeEngine):
    """A GPU in bf16. Each instance stands for one engine process with ties of its own."""

    def __init__(self, process: int, **changes: Any):
        super().__init__(**changes)
        self.process = process

    def status(self) -> dict[str, Any]:
        return super().status().model_copy(update={"device": "cuda:0", "dtype": "bfloat16"})

    def generate(self, prompts: Any, sampling: Any, **more: Any) -> Any:
        cell, number = self.cell, len(self.calls)
        output = super().generate(prompts, sampling, **more)
        assert cell is not None
        tokens = []
        for answer in output.token_ids:
            own = 0 if cell.is_baseline else 1 + Random(str((self.process, cell))).randrange(4)
            shift = 10 * self.process + own
            far = FAR if self.wrong(number, cell) else 0
            tokens.append((*answer[:-1], answer[-1] + shift + far))
        return replace(output, token_ids=tuple(tokens))


class LastTokens:
    """In place of the check that asks the engine: tokens that are near each other are a tie."""

    measured = ErrorScale(0.1, 0.1, positions=128, flips=((1.0, 1.0),))
    spent_s = 0.0

    def __init__(self, *_: Any, **more: Any):
        pass

    def check(self, prompts: Any, reference: Any, places: Sequence[Place]) -> list[PlaceVerdict]:
        gaps = [(place.reference - place.token) / 1000 for place in places]
        return [PlaceVerdict(p, (g, g), self.measured) for p, g in zip(places, gaps, strict=True)]

    def go_on(self, *_: Any) -> dict[int, tuple[int, ...]]:
        raise AssertionError("only last tokens differ: nothing is left to go on with")


@pytest.fixture
def ties(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "TieCheck", LastTokens)


def outcome(run: RunData) -> list[tuple[str, str, int]]:
    """Parity, verdict and timed batches of every cell, as run.json tells them."""
    names = ("nwor_mode", "scv_mode", "arm", "parity", "verdict", "batches")
    return [tuple(cell[name] for name in names) for cell in run.header.cells]


@cache
def uncut() -> list[tuple[str, str, int]]:
    """What the run comes to that is never cut."""
    assert begin(TieEngine(1)) is ExitCode.OK
    found = outcome(read_run(RUN))
    RUN.rename("uncut")
    return found


@pytest.mark.parametrize(
    "cut", [pytest.param(n, marks=[pytest.mark.long] * (n % 4 != 3)) for n in range(1, BATCHES)]
)
def test_a_run_that_is_cut_and_resumed_comes_to_the_same_verdicts(cut: int) -> None:
    expected = uncut()
    assert begin(TieEngine(1, failing={cut: KeyboardInterrupt()})) is ExitCode.INTERRUPTED
    assert go_on(TieEngine(2)) is ExitCode.OK
    run = read_run(RUN)
    assert run.header.status == "complete"
    assert run.header.parity.broken == {}
    assert outcome(run) == expected
    assert [e for e in run.events if e["event"] == "parity_broken"] == []


def test_an_interruption_after_a_blocks_last_batch_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C comes once the batch is stored, before the block's tokens are compared."""

    def interrupt(_progress: Progress, _cell: Cell, batch: BatchRecord) -> None:
        if (batch.phase, batch.block, batch.order) == ("timed", 1, CELLS - 1):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "batch_done", interrupt)
        code = begin(TieEngine(1))
    assert code is ExitCode.INTERRUPTED
    engine = TieEngine(2)
    assert go_on(engine) is ExitCode.OK
    assert len(engine.calls) == 1 + BLOCKS * CELLS  # warm-up and both timed blocks


def test_an_interruption_before_the_block_runs_again_sets_nothing_aside() -> None:
    begin(TieEngine(1, failing={12: KeyboardInterrupt()}))
    before = read_run(RUN)
    assert go_on(TieEngine(2, failing={0: KeyboardInterrupt()})) is ExitCode.INTERRUPTED
    after = read_run(RUN)
    assert after.superseded == ()
    assert after.batches == before.batches


@pytest.mark.parametrize("cut", [4, 7, 9, 18])
def test_a_cell_that_broke_in_the_gate_stays_broken(cut: int) -> None:
    """Also where the gate was cut and its other cells run again: a break was seen."""
    number = 2  # the gate's second cell
    broken = TieEngine(
        1, failing={cut: KeyboardInterrupt()}, wrong=lambda call, cell: call == number
    )
    assert begin(broken) is ExitCode.CORRECTNESS_BROKEN
    label = broken.calls[number].cell.label
    engine = TieEngine(2)
    assert go_on(engine) is ExitCode.CORRECTNESS_BROKEN
    run = read_run(RUN)
    assert list(run.header.parity.broken) == [label]
    timed = [call.cell.label for call in engine.calls[1 + (CELLS if cut < 8 else 0) :]]
    assert timed
    assert label not in timed


def test_counts_that_did_not_add_up_in_a_block_that_ran_again_are_no_less_wrong() -> None:
    class Miscounting(TieEngine):
        def generate(self, prompts: Any, sampling: Any, **more: Any) -> Any:
            output = super().generate(prompts, sampling, **more)
            if self.cell is not None and self.cell.label == "stage x off":
                first = output.windows[0]
                more = first.stage_operations + 1
                output.windows[0] = replace(first, stage_operations=more)
            return output

    first = Miscounting(1, failing={1 + 2 * CELLS: KeyboardInterrupt()})
    assert begin(first) is ExitCode.CORRECTNESS_BROKEN
    cut = Miscounting(1, failing={CELLS: KeyboardInterrupt()})  # all of the gate but its last
    RUN.rename("first")
    assert begin(cut) is ExitCode.CORRECTNESS_BROKEN
    assert go_on(TieEngine(2)) is ExitCode.CORRECTNESS_BROKEN
    cells = {cell["verdict"]: cell["reason"] for cell in read_run(RUN).header.cells}
    assert "stage operations" in cells["INVALID"]


def test_a_cell_with_explained_ties_counts_in_a_look() -> None:
    """The fake's windows are exact, so the first look, after ten blocks, ends the run, resumed or
    not: explained ties make no cell INVALID while the run goes on."""
    flags = {"ci_width": "1%", "max_blocks": 12}
    assert begin(TieEngine(1), **flags) is ExitCode.OK
    stopped = read_run(RUN).header.stopped
    assert "every ratio is known" in str(stopped)
    assert max(batch.block for batch in read_run(RUN).batches) == 10
    RUN.rename("whole")
    begin(TieEngine(1, failing={1 + 9 * CELLS: KeyboardInterrupt()}), **flags)
    assert go_on(TieEngine(2)) is ExitCode.OK
    assert read_run(RUN).header.stopped == stopped
    assert max(batch.block for batch in read_run(RUN).batches) == 10


def test_a_run_that_is_killed_keeps_its_parity_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report of what is left must not hold explained ties against it."""
    headers = []

    def look(_progress: Progress, _cell: Cell, _batch: BatchRecord) -> None:
        headers.append(read_run(RUN).header.parity)

    monkeypatch.setattr(Progress, "batch_done", look)
    begin(TieEngine(1))
    assert {header.rule for header in headers} == {"explained"}


def test_the_terminal_says_what_is_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    begin(TieEngine(1, failing={12: KeyboardInterrupt()}))
    capsys.readouterr()
    go_on(TieEngine(2))
    told = capsys.readouterr().out.replace("\n", " ")
    assert "block 1 (timed) was cut and is run again whole" in told
