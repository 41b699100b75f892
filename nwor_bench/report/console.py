"""The terminal's view of a run: the answer, one table that fits 80 columns, and the folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from nwor_bench.analysis.findings import Finding, Severity, findings, grouped
from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult, Verdict
from nwor_bench.report.content import warnings
from nwor_bench.report.sections.dram import dram_summary
from nwor_bench.report.sections.split import split_lines
from nwor_bench.report.sections.verdicts import answer, verdict_sentence
from nwor_bench.report.text import count, decimal, label, percent, ratio

_STYLES = {
    Verdict.SAME: "green",
    Verdict.FASTER: "bold green",
    Verdict.SLOWER: "yellow",
    Verdict.AMBIGUOUS: "cyan",
    Verdict.INEFFECTIVE: "magenta",
    Verdict.INVALID: "bold red",
}

_SEVERITIES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


def cells_table(cells: Sequence[CellResult]) -> RenderableType:
    """What became of each cell; numbers are never cut, names fold where it is narrow."""
    table = _new_table("Time / off x off\n[95 % interval]", "tokens/s", "accepted", verdict=True)
    for cell in cells:
        verdict = Text(cell.verdict, style=verdict_style(cell.verdict))
        numbers = (ratio(cell), decimal(cell.tokens_per_s), percent(cell.acceptance_rate))
        table.add_row(label(cell), verdict, *numbers)
    return Group(table, "")


def details_table(cells: Sequence[CellResult]) -> RenderableType:
    """Latency, staged and committed tokens, fallbacks and SCV status of each cell."""
    return Group(_tokens(cells), "")


def print_summary(
    console: Console,
    run: RunData,
    cells: Sequence[CellResult],
    folder: Path,
    *,
    verbose: bool = False,
    quiet: bool = False,
) -> None:
    """Print the answer, one table, what weakens the numbers by cause, and the folder.

    `verbose` adds a table and every finding in full; `quiet` leaves the answer and the folder.
    """
    found = answer(run.header, cells)
    lead = verdict_sentence(run.header, cells) if verbose else f"{found.badge}: {found.sentence}"
    console.print(Text(lead))
    if not quiet:
        _print_body(console, run, cells, verbose)
    # Unwrapped, so that the path can be copied from a narrow terminal too.
    console.print(Text(f"Run folder: {folder}"), soft_wrap=True)


def _print_body(console: Console, run: RunData, cells: Sequence[CellResult], verbose: bool) -> None:
    console.print()
    if cells:
        console.print(cells_table(cells))
    if cells and verbose:
        console.print(details_table(cells))
    for warning in warnings(run):
        console.print(Text(f"Warning: {warning}", style="yellow"))
    counted = dram_summary(run)
    if counted is not None:
        console.print(Text(counted))
    for line in split_lines(run, cells):
        console.print(Text(line))
    every = findings(run, cells)
    for severity, line in _told(every, verbose):
        console.print(Text(f"{severity}: {line}", style=_SEVERITIES[severity]))
    if every and not verbose:
        console.print(Text("Details: report.html, or `nwor-bench report -v`.", style="dim"))


def _told(every: Sequence[Finding], verbose: bool) -> list[tuple[Severity, str]]:
    if verbose:
        return [(f.severity, f"{f.message} {f.remedy}") for f in every]
    return [(group.severity, group.line) for group in grouped(every)]


def _tokens(cells: Sequence[CellResult]) -> Table:
    table = _new_table("p50 ms", "staged", "committed", "NWOR\nfallbacks", "SCV")
    for cell in cells:
        numbers = (
            decimal(cell.latency_ms_p50),
            count(cell.nwor_total_staged),
            count(cell.nwor_total_committed),
            count(cell.nwor_fallback_count),
        )
        scv = Text(cell.scv_status, style=verdict_style(cell.scv_status))
        table.add_row(label(cell), *numbers, scv)
    return table


def _new_table(*numbers: str, verdict: bool = False) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("Cell", overflow="fold")
    if verdict:
        table.add_column("Verdict", no_wrap=True)
    for name in numbers:
        side: Literal["left", "right"] = "left" if name == "SCV" else "right"
        table.add_column(name, justify=side, no_wrap=True, overflow="fold")
    return table


def verdict_style(verdict: str) -> str:
    """The colour of a verdict on the terminal, "" for another word."""
    return _STYLES.get(Verdict(verdict), "") if verdict in set(Verdict) else ""
