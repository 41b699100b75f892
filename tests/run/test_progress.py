"""What a sweep says while it runs, with and without a terminal."""

import io
import re
from dataclasses import replace

import pytest
from interleaved_run import Planted, interleaved_run
from rich.console import Console
from synthetic_run import CELLS, make_run

from nwor_bench.analysis.analyse import analyse
from nwor_bench.run.progress import LiveProgress, PlainProgress, RunningRatio, make_progress

RUN = make_run(blocks=1)
GATE, TIMED = RUN.batches[0], RUN.batches[-1]


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=80, color_system=None)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_gets_the_live_table_and_a_log_gets_lines() -> None:
    assert isinstance(make_progress(console(True), CELLS, 3), LiveProgress)
    assert isinstance(make_progress(console(False), CELLS, 3), PlainProgress)


def test_plain_lines_count_up_and_carry_the_numbers() -> None:
    out = console(False)
    timed = replace(TIMED, latency_ms=1500.0, tokens_per_s=321.4, accepted_tokens=7, draft_tokens=9)
    with PlainProgress(out, 12) as progress:
        progress.say("[bold]not markup[/bold]")
        progress.batch_done(CELLS[4], replace(GATE, parity="exact"))
        progress.batch_done(CELLS[0], timed)
    said, gate, block = text_of(out).splitlines()
    assert said == "[bold]not markup[/bold]"
    assert gate.startswith("[ 1/12] gate     stage x graph ")
    assert gate.endswith("parity exact")
    assert block.startswith(f"[ 2/12] block {timed.block}  off x off ")
    assert "1.50 s" in block
    assert "321 tokens/s" in block
    assert block.endswith("accepted 7/9")


def test_a_long_line_stays_one_line_in_a_log() -> None:
    out = console(False)
    PlainProgress(out, 1).say("path " * 40)
    assert len(text_of(out).splitlines()) == 1


def test_the_live_table_has_a_line_for_every_cell() -> None:
    out = console(True)
    progress = LiveProgress(out, CELLS, 12)
    with progress:
        progress.say("[x] a step")
        progress.batch_done(CELLS[4], replace(TIMED, accepted_tokens=7, draft_tokens=9))
    assert "[x] a step" in text_of(out)
    shown = console(False)
    shown.print(progress._table())
    rows = text_of(shown)
    assert "1 of at most 12 batches" in rows
    assert re.search(r"0:00:0\d elapsed, at most 0:\d\d:\d\d left", " ".join(rows.split()))
    assert all(cell.label in rows for cell in CELLS)
    assert rows.count("waiting") == 5
    assert "7/9" in next(line for line in rows.splitlines() if "stage x graph" in line)
    assert max(map(len, rows.splitlines())) <= 80


def test_no_more_time_is_left_than_the_budget_has() -> None:
    for budget, most in ((None, 90.0), (4.0, 4.0)):
        progress = LiveProgress(console(True), CELLS, 100, budget)
        progress.batch_done(CELLS[0], replace(TIMED, latency_ms=1000.0))
        shown = console(False)
        shown.print(progress._table())
        told = " ".join(text_of(shown).split())
        hours, minutes, seconds = re.search(r"at most (\d+):(\d+):(\d+) left", told).groups()  # type: ignore[union-attr]
        left = 3600 * int(hours) + 60 * int(minutes) + int(seconds)
        assert left <= most if budget else left >= most


def test_the_live_table_says_what_comes_next_and_who_leads() -> None:
    progress = LiveProgress(console(True), CELLS, 12)
    progress.step("block 3", "block 4, unless the intervals suffice")
    progress.leading("stage x adaptive 0.974 [0.968, 0.980] of off x off, 12 blocks")
    shown = console(False)
    shown.print(progress._table())
    rows = text_of(shown)
    assert "now: block 3; next: block 4, unless the intervals suffice" in rows
    told = " ".join(rows.split())
    assert "leading so far: stage x adaptive 0.974 [0.968, 0.980] of off x off, 12 blocks" in told
    assert max(map(len, rows.splitlines())) <= 80


def test_a_log_has_few_lines_on_who_leads() -> None:
    out = console(False)
    with PlainProgress(out, 12) as progress:
        progress.step("gate", "block 1")
        for block in range(1, 13):
            progress.leading(f"stage x graph 0.97, {block} blocks")
    assert text_of(out).splitlines() == [
        f"leading so far: stage x graph 0.97, {block} blocks" for block in (3, 6, 12)
    ]


def test_the_leading_cell_is_the_fastest_with_nwor_on() -> None:
    run = make_run(blocks=6, device="cuda", aa=True)
    ratio = RunningRatio(run)
    told = ratio.leading(CELLS)
    assert told is not None
    lowest = min(
        (cell for cell in analyse(run).cells if cell.nwor_mode == "stage"),
        key=lambda cell: cell.ratio_to_off or 9,
    )
    label, low, high = re.fullmatch(
        r"(stage x \w+) [\d.]+ \[([\d.]+), ([\d.]+)\] of off x off, 6 blocks", told
    ).groups()  # type: ignore[union-attr]
    assert label == lowest.label
    assert float(low) < (lowest.ratio_to_off or 9) < float(high)
    assert RunningRatio(make_run(blocks=0)).leading(CELLS) is None
    first = RunningRatio(make_run(blocks=1)).leading(CELLS[3:4])
    assert first is not None
    assert first.endswith("of off x off, 1 block")


@pytest.mark.slow
def test_cells_that_take_turns_lead_by_their_groups() -> None:
    run = interleaved_run(Planted({"stage x graph": 0.96, "stage x off": 1.02}))
    told = RunningRatio(run).leading({batch.cell for batch in run.batches})
    assert told is not None
    label, ratio, blocks = re.fullmatch(
        r"(.+) ([\d.]+) \[[\d.]+, [\d.]+\] of off x off, (\d+) blocks", told
    ).groups()  # type: ignore[union-attr]
    assert label == "stage x graph"
    assert abs(float(ratio) - 0.96) < 0.005
    assert int(blocks) == 12


def test_an_error_inside_is_not_swallowed() -> None:
    for progress in (PlainProgress(console(False), 1), LiveProgress(console(True), CELLS, 1)):
        with pytest.raises(KeyError), progress:
            raise KeyError("x")
