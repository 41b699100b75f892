"""The terminal's view fits and keeps its digits."""

from dataclasses import replace

import pytest
from report_runs import faster
from rich.console import Console
from synthetic_run import analysed, change_batches, make_run, summarised, with_header

from nwor_bench.analysis.findings.finding import Severity
from nwor_bench.analysis.findings.table import grouped
from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult
from nwor_bench.report.cells import cell_section, first_table
from nwor_bench.report.document import Bullets, Document, Headline, Section, table
from nwor_bench.report.run_report import summary
from nwor_bench.report.terminal import print_document, print_path
from nwor_bench.report.text import interval
from nwor_bench.stats.interval import Interval
from nwor_bench.stats.robust import from_ends


def printed(document: Document, width: int = 80, *, quiet: bool = False) -> str:
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        print_document(console, document, quiet=quiet)
    return capture.get()


def of_run(run: RunData, *, verbose: bool = False, quiet: bool = False) -> str:
    return printed(summary(analysed(run), verbose=verbose), quiet=quiet)


def big_cells() -> list[CellResult]:
    """Cells with the largest numbers that a long sweep would give."""
    return [
        replace(
            cell,
            nwor_total_staged=12_345_678,
            nwor_total_committed=9_876_543,
            nwor_fallback_count=1_234_567,
            latency_ms_p50=123_456.7,
            tokens_per_s=98_765.4,
            ratio=from_ends(11.111, 10.222, 12.333, 8),
        )
        for cell in summarised(make_run())
    ]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("cells", [summarised(make_run()), big_cells()], ids=["usual", "big"])
def test_tables_fit_and_cut_no_number(cells, width):
    lead = tuple(first_table(faster().header, cells))
    first = printed(Document("", lead), width)
    details = printed(Document("", (), (cell_section(cells),)), width)
    assert max(map(len, (first + details).splitlines())) <= width
    assert "…" not in first + details
    for cell in cells:
        name = f"{cell.nwor_mode} x {cell.scv_mode} "
        row = next(line for line in first.splitlines() if line.startswith(name))
        assert cell.verdict in row
        assert f"{cell.tokens_per_s:,.1f}" in row
        assert f"{cell.nwor_total_staged:,}" in details
        if cell.ratio is not None:
            assert interval(cell.ratio) in row


def test_the_change_of_tokens_stands_beside_them_if_that_fits():
    cells = [
        replace(cell, tokens_per_s=1449.7, rate=cell.ratio and Interval.unbounded(1.0204, 8))
        for cell in summarised(faster())
    ]
    for shown, text in ((cells, "1,450 +2.0 %"), (big_cells(), "98,765.4")):
        (verdicts,) = first_table(faster().header, shown)
        assert verdicts.rows[-1][4] == text


def test_a_table_that_is_too_wide_is_printed_in_parts():
    rows = [[f"cell {i}", *(f"{i}{j}.000 [0.990, 1.010]" for j in range(5))] for i in range(3)]
    made = table(["Cell", *(f"column {j}" for j in range(5))], rows)
    text = printed(Document("", (made,)))
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("cell 2") == 2  # 22 columns a number: three fit beside the name
    assert all(value in text for row in rows for value in row)


def test_narrow_consoles_fold_words_and_no_number(capsys: pytest.CaptureFixture[str]):
    made = table(["A long name of a column", "n"], [["some words that fold", "1,234,567.8"]])
    blocks = (Headline("SAME", "One sentence of words."), Bullets(("a bullet of several words",)))
    text = printed(Document("", (*blocks, made), (Section("A title", ()),)), 24)
    assert max(map(len, text.splitlines())) <= 24
    assert "1,234,567.8" in text
    assert "A title" in text
    print_path(Console(width=80), "Report", "deep/" * 30)  # it can be copied
    assert capsys.readouterr().out == f"Report: {'deep/' * 30}\n"


def test_the_strongest_cause_is_a_fact_and_verbose_shows_all_and_the_evidence():
    run = make_run()
    text = of_run(run)
    first, *others = [g for g in grouped(analysed(run).findings) if g.severity != Severity.NOTE]
    words = " ".join(text.split())
    assert f"{first.severity} {first.line} (and {len(others)} more)" in words
    assert not any(group.line in words for group in others)
    verbose = of_run(run, verbose=True)
    assert max(map(len, [*text.splitlines(), *verbose.splitlines()])) <= 80
    marks = [line for line in verbose.splitlines() if line.startswith(("- ERROR: ", "- WARNING: "))]
    assert [line.partition(": ")[2] for line in marks] == [g.line for g in (first, *others)]
    assert "Committed" in verbose
    assert "Tokens compared with those of off x off" in verbose
    assert "Committed" not in text


def test_square_brackets_in_a_reason_are_not_markup():
    run = make_run()
    bad = change_batches(
        run, lambda b: b.nwor_mode == "stage", parity="INVALID", first_mismatch="[red]token[/red]"
    )
    assert "[red]token[/red]" in of_run(bad)


def test_a_checked_run_shows_the_cells_that_were_checked_within_24_lines():
    """Cells that cannot run without CUDA are named once, in a fact."""
    run = with_header(make_run(blocks=0, aa=True), "scenario", batches=0, max_model_len=1024)
    run = with_header(run, "engine", drafter_max_model_len=128)
    lines = of_run(run).splitlines()
    assert len(lines) <= 21, "\n".join(lines)  # and the report's path, and the prompt
    assert any(line.startswith("warning") for line in lines)
    names = [line.split("  ")[0] for line in lines]
    assert "stage x off" in names
    assert "off x graph" not in names


def test_a_headline_that_has_left_the_screen_is_printed_again():
    first = Headline("FASTER", "+2.9 % tokens/s")
    for rows, times in ((8, 1), (40, 2)):
        console = Console(width=80, height=24, color_system=None, force_terminal=False)
        document = Document("", (first, table(["Row"], [[str(n)] for n in range(rows)])), ())
        with console.capture() as capture:
            print_document(console, document)
        lines = capture.get().splitlines()
        assert lines.count(first.line) == times
        assert lines[0] == first.line
        assert times == 1 or lines[-1] == first.line
