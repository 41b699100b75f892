"""A run that was cut short goes on: same order, same seeds, nothing twice, nothing else."""

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import typer
from examples import examples
from fake_engine import FakeEngine, events_but_gates
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from test_parity_gate import accepted, flip, gpu_engine, one_less
from tiny_session import RUN, go_on
from tiny_session import begin as begin_tiny
from toy_run import Log, Runner, encode

from nwor_bench.analysis.analyse import analyse
from nwor_bench.analysis.parity.ties import ErrorScale, Place, PlaceVerdict
from nwor_bench.cli.app import app
from nwor_bench.errors import ConfigError, EngineError, ExitCode, StoreError
from nwor_bench.instruments import environment
from nwor_bench.records.cell import INTERLEAVED
from nwor_bench.records.files import RECORDS_FILE, RUN_FILE, only_writer
from nwor_bench.records.store import RunData, RunStore, read_run
from nwor_bench.records.types import BatchRecord, Cell
from nwor_bench.run import blocks, resume
from nwor_bench.run.blocks import BlockRunner
from nwor_bench.run.gate.parity import ParityGate
from nwor_bench.run.progress import Progress

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_surroundings")]

begin = partial(begin_tiny, batches=3)
GATE = 7 + 1  # six cells and the A/A arm, and one of them without instruments
WHOLE = GATE + 3 * 7


def interrupted_at(n: int) -> None:
    """Leave a run that was interrupted in call n, as it was measured once for all tests."""
    RUN.mkdir(exist_ok=True)
    for name, content in files_of_a_run_cut_at(n).items():
        (RUN / name).write_bytes(content)


@cache
def files_of_a_run_cut_at(n: int) -> dict[str, bytes]:
    interrupt(n, ExitCode.INTERRUPTED)
    return {path.name: path.read_bytes() for path in RUN.iterdir()}


def interrupt(n: int, expected: ExitCode, **changes: Any) -> None:
    assert begin(FakeEngine(failing={n: KeyboardInterrupt()}, **changes)) is expected
    assert read_run(RUN).header.status == "partial"


def without_times(batch: BatchRecord) -> BatchRecord:
    """What must not depend on when and how often the run was cut: all but times and numbers."""
    return replace(batch, batch=0, started_at="", conditions={})


def measured(folder: Path = RUN) -> list[BatchRecord]:
    return [without_times(b) for b in read_run(folder).batches if b.phase != "warmup"]


@cache
def never_cut() -> list[BatchRecord]:
    """What a run measures that is left alone: the first test that asks makes it."""
    begin(FakeEngine())
    RUN.rename("uncut")
    return measured(Path("uncut"))


@pytest.fixture
def uncut(own_surroundings: None) -> list[BatchRecord]:
    """Records of the run, never cut."""
    return never_cut()


@pytest.mark.parametrize("n", [0, 1, 8, 9, 10, 29])
def test_a_resumed_run_is_the_run_that_was_never_cut(n: int, uncut: list[BatchRecord]) -> None:
    interrupted_at(n)
    cut, engine = read_run(RUN), FakeEngine()
    assert go_on(engine) is ExitCode.OK
    run = read_run(RUN)
    assert run.header.status == "complete"
    assert measured() == uncut
    assert run.header.measuring_s >= cut.header.measuring_s
    starts = [1, *range(1 + GATE, 1 + WHOLE, 7)]  # of the gate and the blocks
    begun = max((start for start in starts if start <= n), default=1)
    assert len(engine.calls) == 1 + WHOLE - (begun - 1)  # warm-up and unfinished blocks anew
    numbers = {batch.batch for batch in (*run.batches, *run.superseded)}
    assert len(numbers) == len(run.batches) + len(run.superseded)
    assert len(run.windows) == 3 * len(run.batches)
    again = ["superseded"] if n > begun else []
    assert [event["event"] for event in events_but_gates(run)] == ["interrupted", "resumed", *again]


def test_a_failed_run_can_be_resumed(uncut: list[BatchRecord]) -> None:
    with pytest.raises(EngineError, match="RuntimeError: gone"):
        begin(FakeEngine(failing={12: RuntimeError("gone")}))
    assert go_on() is ExitCode.OK
    assert read_run(RUN).header.status == "complete"
    assert measured() == uncut


@pytest.mark.parametrize("n", [4, 12])
def test_parity_is_checked_in_the_block_that_runs_again(n: int) -> None:
    """After the cut one cell answers otherwise than off x off does in the same process."""
    interrupted_at(n)
    engine = FakeEngine(wrong=lambda number, cell: cell.label == "stage x adaptive")
    assert go_on(engine) is ExitCode.CORRECTNESS_BROKEN
    run = read_run(RUN)
    assert list(run.header.parity.broken) == ["stage x adaptive"]
    assert "1 of 2 requests differ" in run.header.parity.broken["stage x adaptive"]


def test_a_break_that_was_not_checked_yet_is_a_break() -> None:
    """Killed between the last batch of a block and the event that ends it.

    The block is run again and its tokens are equal then; its first try's fingerprints tell.
    """

    def wrong(number: int, cell: Any) -> bool:
        return number > 8 and cell.label == "stage x off"

    interrupt(16, ExitCode.CORRECTNESS_BROKEN, wrong=wrong)
    path = RUN / RECORDS_FILE
    path.write_bytes(path.read_bytes().split(b'{"event":"parity_broken"')[0])
    assert go_on() is ExitCode.CORRECTNESS_BROKEN
    run = read_run(RUN)
    invalid = [c for c in run.header.cells if c["verdict"] == "INVALID"]
    assert [(c["nwor_mode"], c["scv_mode"]) for c in invalid] == [("stage", "off")]
    assert "block 1 (timed): 1 of 2 requests gave other tokens" in invalid[0]["reason"]
    assert [batch.block for batch in run.superseded] == [1] * 7


def slowed(output: Any, factor: float) -> Any:
    """The batch with windows that took so much longer."""
    windows = [replace(w, wall_ms=w.wall_ms * factor) for w in output.windows]
    return replace(output, windows=windows)


class ShakyEngine(FakeEngine):
    """Window times scatter by block and cell, at most by a tenth, and hardly in the thirteenth."""

    def generate(self, prompts: Any, sampling: Any, **more: Any) -> Any:
        output = super().generate(prompts, sampling, **more)
        calm = sampling.seed == 13 * 2  # two requests a block
        scatter = Random(f"{sampling.seed} {self.cell}").random()
        factor = 1 + scatter / (1e6 if calm else 10)
        return slowed(output, factor)


def test_a_look_sees_the_blocks_up_to_it_and_no_more() -> None:
    """Thirteen blocks are narrow enough, twelve and ten are not: only looks at 10 and 12 count.

    A resumed run that looked at all thirteen on its way past block 10 would stop there.
    """
    begin(ShakyEngine(), ci_width="0.0001%", max_blocks=14)
    run = read_run(RUN)
    widths = {n: widest(run, n) for n in (10, 12, 13)}
    assert widths[13] < widths[12] < widths[10]
    between = f"{50 * (widths[12] + widths[13])}%"
    RUN.rename("whole")
    flags = {"ci_width": between, "max_blocks": 14}
    begin(ShakyEngine(failing={1 + GATE + 13 * 7: KeyboardInterrupt()}), **flags)
    assert go_on(ShakyEngine()) is ExitCode.OK
    assert len(measured()) == GATE + 14 * 7
    assert read_run(RUN).header.stopped == "--max-blocks 14"


class WideCell(FakeEngine):
    """Window times of stage x off scatter by a half, those of all other cells by nothing."""

    def generate(self, prompts: Any, sampling: Any, **more: Any) -> Any:
        output = super().generate(prompts, sampling, **more)
        if self.cell is not None and self.cell.label == "stage x off":
            return slowed(output, 1 + Random(str(prompts)).random() / 2)
        return output


def test_a_cell_that_breaks_after_a_look_was_wide_in_that_look() -> None:
    """The cell's interval keeps the run going at block 10; it breaks in block 11 and is out."""
    flags = {"ci_width": "1%", "max_blocks": 14}

    def wrong(number: int, cell: Any) -> bool:
        return number >= 1 + GATE + 10 * 7 and cell.label == "stage x off"

    begin(WideCell(wrong=wrong), **flags)
    whole = read_run(RUN)
    assert max(batch.block for batch in whole.batches) == 12
    RUN.rename("whole")
    begin(WideCell(wrong=wrong, failing={1 + GATE + 11 * 7 + 2: KeyboardInterrupt()}), **flags)
    assert go_on(WideCell()) is ExitCode.CORRECTNESS_BROKEN
    assert read_run(RUN).header.stopped == whole.header.stopped
    assert measured() == measured(Path("whole"))


def widest(run: RunData, blocks: int) -> float:
    """The largest half-width over the compared cells after so many blocks."""
    batches = tuple(batch for batch in run.batches if batch.block <= blocks)
    windows = tuple(window for window in run.windows if window.block <= blocks)
    cells = analyse(replace(run, batches=batches, windows=windows)).cells
    return max(cell.half_width for cell in cells if cell.half_width is not None)


def test_every_flag_that_changes_the_run_is_refused() -> None:
    """A new flag of the sweep must not be ignored in silence when a run goes on."""
    harmless = {"resume", "dry_run", "verbose", "quiet", "json"}
    # Refused before a single run is resumed.
    for_files = {"file", "continue_on_error", "ray", "device"}
    command = typer.main.get_command(app).commands["sweep"]  # type: ignore[attr-defined]
    names = {parameter.name for parameter in command.params} - harmless - for_files - {"help"}
    assert len(names) > 20
    for name in names:
        with pytest.raises(ConfigError):
            resume.check_flags({name: "7"})
    interrupted_at(9)
    with refused("--requests", value=2, naming="--resume"):
        go_on(given={"requests": 2})


def test_an_option_that_is_newer_than_the_run_has_its_default() -> None:
    interrupted_at(9)
    header = json.loads((RUN / RUN_FILE).read_text())
    for name in ("counters", "max_blocks"):
        del header["spec"][name]
    (RUN / RUN_FILE).write_text(json.dumps(header))
    assert go_on() is ExitCode.OK


def change_header(**changes: Any) -> None:
    path = RUN / RUN_FILE
    header = json.loads(path.read_text())
    for dotted, value in changes.items():
        *parts, last = dotted.split("__")
        place = header
        for part in parts:
            place = place[part]
        place[last] = value
    path.write_text(json.dumps(header))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"environment__packages__torch": "1.0"}, "environment.packages.torch"),
        ({"environment__cpu__model": "other"}, "environment.cpu.model"),
        ({"environment__gpus": [{"name": "H200"}]}, "environment.gpus"),
        ({"pair__dtype": "bfloat16"}, "pair.dtype"),
        ({"engine__target_layers": 99}, "engine.target_layers"),
        ({"blocks": []}, "blocks"),
        ({"spec__seed": 5}, "blocks"),
    ],
)
def test_another_machine_or_order_is_refused(changes: dict[str, Any], field: str) -> None:
    interrupted_at(9)
    change_header(**changes)
    with refused(f"--resume: {field}") as caught:
        go_on()
    assert caught.value.exit_code == ExitCode.BAD_USAGE


@pytest.mark.parametrize(
    ("changes", "field", "wanted"),
    [
        *(
            ({part: None}, part.replace("__", "."), {"value": None, "naming": ""})
            for part in ("spec", "pair", "choice", "blocks", "environment", "environment__packages")
        ),
        *(
            ({"spec__nwor_modes": modes}, f"spec.nwor_modes{place}", {"naming": words})
            for modes, place, words in (
                (["offf"], ".0", "'offf'"), ([5], ".0", "5"), (5, "", "5"),
            )
        ),
        (
            {"scenario__requests": "two", "spec__scenario__requests": "two"},
            "spec.scenario.requests",
            {"value": "two", "naming": "write a valid integer, or restore the file"},
        ),
    ],
)  # fmt: skip
def test_an_edited_header_is_refused_by_the_name_of_what_changed(
    changes: dict[str, Any], field: str, wanted: dict[str, Any]
) -> None:
    interrupted_at(9)
    change_header(**changes)
    with refused(f"run.json: {field}".removesuffix(": "), StoreError, **wanted):
        go_on()


def test_other_prompts_are_refused() -> None:
    interrupted_at(9)
    path = RUN / RECORDS_FILE
    text = path.read_text().replace('"prompt_digest":"', '"prompt_digest":"f')
    path.write_text(text)
    with refused("--resume: prompts of block 0"):
        go_on()


def test_two_writers_are_refused() -> None:
    interrupted_at(9)
    with only_writer(RUN), refused("run folder", value=str(RUN), cause=BlockingIOError):
        go_on()
    assert go_on() is ExitCode.OK


def test_leftovers_of_a_killed_write_are_cleared() -> None:
    interrupted_at(9)
    leftover = RUN / ".run.json.123.tmp"
    leftover.write_text("half")
    RunStore.open(RUN)
    assert not leftover.exists()


# kill -9, for real: a forked process measures, and dies at a random moment.


def in_a_child(work: Any) -> int:
    """Fork a process that does `work`, silently; returns its number."""
    child = os.fork()
    if child == 0:
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return child


@pytest.mark.parametrize("moments", [4, pytest.param(20, marks=pytest.mark.long)])
def test_kill_9_at_random_moments_loses_at_most_the_batch_in_flight(
    uncut: list[BatchRecord], monkeypatch: pytest.MonkeyPatch, moments: int
) -> None:
    known = environment.collect()
    monkeypatch.setattr(environment, "collect", lambda: known)  # it is the same machine
    random = Random(9)
    cut = 0
    for trial in range(moments):
        if RUN.exists():
            RUN.rename(f"before-{trial}")
        child = in_a_child(lambda: begin(FakeEngine(before=lambda number: time.sleep(0.002))))
        deadline = time.monotonic() + 10
        wait = (os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        moment = random.randrange(WHOLE + 3)
        while stored() < moment and os.waitid(*wait) is None and time.monotonic() < deadline:
            time.sleep(0.0005)
        time.sleep(random.random() * 0.004)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        lost_at_most_one = stored()
        if not (RUN / RUN_FILE).is_file():
            continue  # nothing had begun
        run = read_run(RUN)
        assert len(run.batches) in (lost_at_most_one, lost_at_most_one + 1)
        if run.header.status != "complete":
            cut += 1
            assert go_on() is ExitCode.OK
        again = read_run(RUN)
        assert measured() == uncut
        assert len({b.batch for b in again.batches}) == len(again.batches)
        assert again.warnings == ()
    assert cut >= moments * 3 // 4


def stored() -> int:
    """Whole batches in the file."""
    path = RUN / RECORDS_FILE
    return path.read_bytes().count(b'"kind":"batch"}\n') if path.is_file() else 0


# In bf16 on a GPU two engine processes break ties in different ways. The stand-in's last tokens
# depend on its process and on the cell, as bf16 ties do; the tokens of two processes never agree,
# and within one process every difference is a tie.

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
    monkeypatch.setattr(blocks, "TieCheck", LastTokens)


@cache
def outcome_uncut() -> list[Any]:
    """Parity, verdict and timed batches of every cell of the run that is never cut."""
    assert begin_tiny(TieEngine(1)) is ExitCode.OK
    found = outcome(read_run(RUN))
    RUN.rename("uncut")
    return found


def outcome(run: RunData) -> list[Any]:
    names = ("nwor_mode", "scv_mode", "arm", "parity", "verdict", "batches")
    return [tuple(cell[name] for name in names) for cell in run.header.cells]


@pytest.mark.usefixtures("ties")
@pytest.mark.parametrize(
    "cut", [pytest.param(n, marks=[pytest.mark.long] * (n % 4 != 3)) for n in range(1, BATCHES)]
)
def test_a_run_that_is_cut_and_resumed_comes_to_the_same_verdicts(cut: int) -> None:
    expected = outcome_uncut()
    assert begin_tiny(TieEngine(1, failing={cut: KeyboardInterrupt()})) is ExitCode.INTERRUPTED
    assert go_on(TieEngine(2)) is ExitCode.OK
    run = read_run(RUN)
    assert run.header.status == "complete"
    assert run.header.parity.broken == {}
    assert outcome(run) == expected
    assert [e for e in run.events if e["event"] == "parity_broken"] == []


@pytest.mark.usefixtures("ties")
def test_an_interruption_after_a_blocks_last_batch_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C comes once the batch is stored, before the block's tokens are compared."""

    def interrupt(_progress: Progress, _cell: Cell, batch: BatchRecord) -> None:
        if (batch.phase, batch.block, batch.order) == ("timed", 1, CELLS - 1):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "batch_done", interrupt)
        code = begin_tiny(TieEngine(1))
    assert code is ExitCode.INTERRUPTED
    engine = TieEngine(2)
    capsys.readouterr()
    assert go_on(engine) is ExitCode.OK
    assert len(engine.calls) == 1 + BLOCKS * CELLS  # warm-up and both timed blocks
    told = capsys.readouterr().out.replace("\n", " ")
    assert "block 1 (timed) was cut and is run again whole" in told


@pytest.mark.usefixtures("ties")
def test_an_interruption_before_the_block_runs_again_sets_nothing_aside() -> None:
    begin_tiny(TieEngine(1, failing={12: KeyboardInterrupt()}))
    before = read_run(RUN)
    assert go_on(TieEngine(2, failing={0: KeyboardInterrupt()})) is ExitCode.INTERRUPTED
    after = read_run(RUN)
    assert after.superseded == ()
    assert after.batches == before.batches


@pytest.mark.usefixtures("ties")
@pytest.mark.parametrize("cut", [4, 7, 9, 18])
def test_a_cell_that_broke_in_the_gate_stays_broken(cut: int) -> None:
    """Also where the gate was cut and its other cells run again: a break was seen."""
    number = 2  # the gate's second cell
    broken = TieEngine(
        1, failing={cut: KeyboardInterrupt()}, wrong=lambda call, cell: call == number
    )
    assert begin_tiny(broken) is ExitCode.CORRECTNESS_BROKEN
    label = broken.calls[number].cell.label
    engine = TieEngine(2)
    assert go_on(engine) is ExitCode.CORRECTNESS_BROKEN
    run = read_run(RUN)
    assert list(run.header.parity.broken) == [label]
    timed = [call.cell.label for call in engine.calls[1 + (CELLS if cut < 8 else 0) :]]
    assert timed
    assert label not in timed


@pytest.mark.usefixtures("ties")
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
    assert begin_tiny(first) is ExitCode.CORRECTNESS_BROKEN
    cut = Miscounting(1, failing={CELLS: KeyboardInterrupt()})  # all of the gate but its last
    RUN.rename("first")
    assert begin_tiny(cut) is ExitCode.CORRECTNESS_BROKEN
    assert go_on(TieEngine(2)) is ExitCode.CORRECTNESS_BROKEN
    cells = {cell["verdict"]: cell["reason"] for cell in read_run(RUN).header.cells}
    assert "stage operations" in cells["INVALID"]


@pytest.mark.usefixtures("ties")
def test_a_cell_with_explained_ties_counts_in_a_look() -> None:
    """The fake's windows are exact, so the first look, after ten blocks, ends the run, resumed or
    not: explained ties make no cell INVALID while the run goes on."""
    flags = {"ci_width": "1%", "max_blocks": 12}
    assert begin_tiny(TieEngine(1), **flags) is ExitCode.OK
    stopped = read_run(RUN).header.stopped
    assert "every ratio is known" in str(stopped)
    assert max(batch.block for batch in read_run(RUN).batches) == 10
    RUN.rename("whole")
    begin_tiny(TieEngine(1, failing={1 + 9 * CELLS: KeyboardInterrupt()}), **flags)
    assert go_on(TieEngine(2)) is ExitCode.OK
    assert read_run(RUN).header.stopped == stopped
    assert max(batch.block for batch in read_run(RUN).batches) == 10


@pytest.mark.usefixtures("ties")
def test_a_run_that_is_killed_keeps_its_parity_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report of what is left must not hold explained ties against it."""
    headers = []

    def look(_progress: Progress, _cell: Cell, _batch: BatchRecord) -> None:
        headers.append(read_run(RUN).header.parity)

    monkeypatch.setattr(Progress, "batch_done", look)
    begin_tiny(TieEngine(1))
    assert {header.rule for header in headers} == {"explained"}


# A resumed run goes on with the sums of ties and acceptance that its first part had.


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
def whole(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    runner = begun(tmp_path_factory.mktemp("whole") / "run")
    runner.run()
    assert runner.sweep.parity.broken == {}
    return runner


@examples(28)
@given(data=st.data())
def test_cut_and_resumed_is_uninterrupted(whole: Runner, data: st.DataObject) -> None:
    call = data.draw(st.integers(1, len(whole.engine.calls) - 1))
    with TemporaryDirectory() as folder:
        runner = cut_at(Path(folder) / "run", call)
        assert sums(resumed(runner).parity) == sums(whole.sweep.parity)


def test_a_run_that_is_cut_twice_counts_no_batch_twice(whole: Runner, tmp_path: Path) -> None:
    cells = len(whole.plan.cells)
    runner = cut_at(tmp_path / "run", 1 + 2 * cells + 3)  # in the second timed block
    runner.engine.failing[len(runner.engine.calls) + 1 + 2] = KeyboardInterrupt()  # there again
    store = RunStore.open(runner.folder)
    with pytest.raises(KeyboardInterrupt):
        BlockRunner(runner.plan, runner.spec, runner.engine, store, encode, Log()).run()
    assert sums(resumed(runner).parity) == sums(whole.sweep.parity)


def test_the_sums_of_interleaved_batches_are_restored(tmp_path: Path) -> None:
    uncut = begun(tmp_path / "whole", interleave="windows")
    run = uncut.run()
    (last,) = [n for n, b in enumerate(run.batches) if (b.phase, b.block) == ("interleaved", 3)]
    found = sums(resumed(cut_at(tmp_path / "run", last, interleave="windows")).parity)
    assert found == sums(uncut.sweep.parity)
    assert INTERLEAVED in {cell.arm for cell in found}
