"""A run that was cut short goes on: same order, same seeds, nothing twice, nothing else."""

import json
import os
import signal
import time
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import typer
from fake_engine import FakeEngine, events_but_gates
from refusals import refused
from tiny_session import RUN, go_on
from tiny_session import begin as begin_tiny

from nwor_bench.analysis.analyse import analyse
from nwor_bench.cli.app import app
from nwor_bench.errors import ConfigError, ExitCode, StoreError
from nwor_bench.instruments import environment
from nwor_bench.records.files import RECORDS_FILE, RUN_FILE, only_writer
from nwor_bench.records.store import RunData, RunStore, read_run
from nwor_bench.records.types import BatchRecord
from nwor_bench.run import resume

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


@pytest.mark.parametrize(
    "n", [10, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 3, 8, 9, 18, 29))]
)
def test_a_resumed_run_is_the_run_that_was_never_cut(n: int, uncut: list[BatchRecord]) -> None:
    interrupted_at(n)
    engine = FakeEngine()
    assert go_on(engine) is ExitCode.OK
    run = read_run(RUN)
    assert run.header.status == "complete"
    assert measured() == uncut
    starts = [1, *range(1 + GATE, 1 + WHOLE, 7)]  # of the gate and the blocks
    begun = max((start for start in starts if start <= n), default=1)
    assert len(engine.calls) == 1 + WHOLE - (begun - 1)  # warm-up and unfinished blocks anew
    numbers = {batch.batch for batch in (*run.batches, *run.superseded)}
    assert len(numbers) == len(run.batches) + len(run.superseded)
    assert len(run.windows) == 3 * len(run.batches)
    again = ["superseded"] if n > begun else []
    assert [event["event"] for event in events_but_gates(run)] == ["interrupted", "resumed", *again]


def test_a_failed_run_can_be_resumed(uncut: list[BatchRecord]) -> None:
    with pytest.raises(RuntimeError, match="gone"):
        begin(FakeEngine(failing={12: RuntimeError("gone")}))
    assert go_on() is ExitCode.OK
    assert read_run(RUN).header.status == "complete"
    assert measured() == uncut


def test_what_was_measured_is_timed_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted_at(9)
    first = read_run(RUN).header.measuring_s
    go_on()
    assert read_run(RUN).header.measuring_s >= first


@pytest.mark.parametrize("n", [12, pytest.param(4, marks=pytest.mark.slow)])
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


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--requests", 2), ("--pair", "tiny"), ("--scenario", "short"), ("--output", "other")],
)
def test_flags_that_say_what_to_measure_are_refused(flag: str, value: Any) -> None:
    interrupted_at(9)
    before = (RUN / RECORDS_FILE).read_bytes()
    with refused(flag, value=value, naming="--resume"):
        go_on(given={flag.removeprefix("--"): value})
    assert (RUN / RECORDS_FILE).read_bytes() == before


def test_every_flag_that_changes_the_run_is_refused() -> None:
    """A new flag of the sweep must not be ignored in silence when a run goes on."""
    harmless = {"resume", "dry_run", "verbose", "quiet", "json"}
    for_files = {"file", "continue_on_error", "ray"}  # refused before a single run is resumed
    command = typer.main.get_command(app).commands["sweep"]  # type: ignore[attr-defined]
    names = {parameter.name for parameter in command.params} - harmless - for_files - {"help"}
    assert len(names) > 20
    for name in names:
        with pytest.raises(ConfigError):
            resume.check_flags({name: "7"})


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


def test_a_complete_run_is_refused() -> None:
    begin(FakeEngine())
    with refused("--resume", value=str(RUN)) as caught:
        go_on()
    assert str(caught.value) == (
        f"--resume: '{RUN}' is invalid; this run is complete; `nwor-bench report` shows it"
    )


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


def slow_engine() -> FakeEngine:
    return FakeEngine(before=lambda number: time.sleep(0.002))


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
        child = in_a_child(lambda: begin(slow_engine()))
        deadline = time.monotonic() + 10
        moment = random.randrange(WHOLE + 3)
        while stored() < moment and running(child) and time.monotonic() < deadline:
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


def running(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
