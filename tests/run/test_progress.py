"""What a sweep says while it runs, with and without a terminal."""

import io
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from synthetic_run import CELLS, make_run

from nwor_bench.records.header import StoredSpec
from nwor_bench.run.progress import Progress, console_for, tell_result
from nwor_bench.run.run_options import Heartbeat, RunOptions

RUN = make_run(blocks=1)
GATE = RUN.batches[0]


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_log_has_a_line_for_a_step_and_a_batch_of_the_gate() -> None:
    out = console(False)
    gate = replace(GATE, parity="exact", latency_ms=1500.0, accepted_tokens=7, draft_tokens=9)
    with Progress(out) as progress:
        progress.say("[bold]not markup[/bold]")
        progress.batch_done(CELLS[4].label, gate)
        progress.batch_done(CELLS[0].label, replace(gate, phase="interleaved gate"))
        progress.batch_done(CELLS[0].label, replace(gate, phase="timed"))
    assert text_of(out).splitlines() == [
        "[bold]not markup[/bold]",
        "gate: stage x graph      1.50 s  accepted 7/9  parity exact",
        "gate: interleaved        1.50 s  accepted 7/9  parity exact",
    ]


def test_a_long_line_stays_one_line_in_a_log() -> None:
    out = console(False)
    Progress(out).say("path " * 40)
    assert len(text_of(out).splitlines()) == 1


def test_a_log_says_every_few_seconds_how_far_it_is() -> None:
    """In the second run of a sweep too."""
    lines: list[str] = []
    with Heartbeat(lines.append, "loading", quiet_s=0.05) as heartbeat:
        for run in (1, 2):
            with Progress(console(False), heartbeat) as progress:
                progress.doing(f"run {run}")
                with progress.timed(lambda: (41.2, 120.0)):
                    _wait_for(lines, f"  run {run}, 0:41 of about 2:00")


def _wait_for(lines: list[str], wanted: str) -> None:
    deadline = time.monotonic() + 10
    while wanted not in lines:
        assert time.monotonic() < deadline, lines
        time.sleep(0.01)


def test_a_terminal_shows_what_is_done_in_one_line_below_the_steps() -> None:
    out = console(True)

    def shown() -> str:
        below = console(False)
        below.print(progress._live.renderable)
        return " ".join(text_of(below).split()[1:])

    with Progress(out) as progress:
        progress.say("[x] a step " + "and more " * 20)
        progress.batch_done(CELLS[4], GATE)
        progress.doing("gate: off x off")
        assert shown() == "gate: off x off, 0:00"
        progress.doing("block 3")
        with progress.timed(lambda: (30.0, 120.0)):
            bar = "\N{BOX DRAWINGS HEAVY HORIZONTAL}"
            assert shown() == f"{5 * bar} block 3, 0:30 of about 2:00"
        with progress.timed(lambda: (83.0, None)):
            assert shown() == "block 3, 1:23"
        stderr = sys.stderr
    assert stderr is sys.stderr  # what libraries write there is none of the terminal's
    steps = [line for line in text_of(out).splitlines() if "and more" in line]
    assert len(steps) == 2
    assert "accepted" not in text_of(out)


@pytest.mark.parametrize("terminal", [True, False])
def test_an_error_inside_is_not_swallowed(terminal: bool) -> None:
    with pytest.raises(KeyError), Progress(console(terminal)):
        raise KeyError("x")


def test_quiet_leaves_the_runs_of_draft_counts_to_their_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One answer is theirs together, so each only has its folder, which is no part of it."""
    analysis: Any = SimpleNamespace(
        run=SimpleNamespace(header=SimpleNamespace(spec=StoredSpec(draft_counts=(0, 1))))
    )
    for quiet in (False, True):
        options = RunOptions(quiet=quiet)
        tell_result(console_for(options), options, analysis, tmp_path, in_sweep=True)
        assert capsys.readouterr().out == ("" if quiet else f"Run folder: {tmp_path}\n")
