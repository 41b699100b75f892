"""What a sweep says while it runs, with and without a terminal."""

import io
from dataclasses import replace

import pytest
from rich.console import Console
from synthetic_run import CELLS, make_run

from nwor_bench.run.progress import Progress

RUN = make_run(blocks=1)
GATE, TIMED = RUN.batches[0], RUN.batches[-1]


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_lines_of_a_log_count_up_and_carry_the_numbers() -> None:
    out = console(False)
    timed = replace(TIMED, latency_ms=1500.0, tokens_per_s=321.4, accepted_tokens=7, draft_tokens=9)
    with Progress(out, 12) as progress:
        progress.say("[bold]not markup[/bold]")
        progress.batch_done(CELLS[4], replace(GATE, parity="exact"))
        progress.batch_done(CELLS[0], timed)
        progress.batch_done(CELLS[0], replace(timed, phase="interleaved"))
    said, gate, block, interleaved = text_of(out).splitlines()
    assert said == "[bold]not markup[/bold]"
    assert gate.startswith("[ 1/12] gate     stage x graph ")
    assert gate.endswith("parity exact")
    assert block.startswith(f"[ 2/12] block {timed.block}  off x off ")
    assert "1.50 s" in block
    assert "321 tokens/s" in block
    assert block.endswith("accepted 7/9")
    assert interleaved.startswith(f"[ 3/12] block {timed.block}  interleaved ")


def test_a_long_line_stays_one_line_in_a_log() -> None:
    out = console(False)
    Progress(out, 1).say("path " * 40)
    assert len(text_of(out).splitlines()) == 1


def test_a_terminal_shows_the_last_batch_below_the_steps() -> None:
    out = console(True)
    with Progress(out, 12) as progress:
        progress.say("[x] a step")
        progress.batch_done(CELLS[4], replace(TIMED, accepted_tokens=7, draft_tokens=9))
        shown = console(False)
        shown.print(progress._status.renderable)
    assert "[x] a step" in text_of(out)
    (line,) = text_of(shown).splitlines()
    assert "0:00:0" in line
    assert line.rstrip().endswith("accepted 7/9")


@pytest.mark.parametrize("terminal", [True, False])
def test_an_error_inside_is_not_swallowed(terminal: bool) -> None:
    with pytest.raises(KeyError), Progress(console(terminal), 1):
        raise KeyError("x")
