"""The terminal's view of a run: two tables that fit 80 columns, a verdict, and the folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from nwor_bench.analysis.findings import Severity, findings
from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult, Verdict
from nwor_bench.report.content import warnings
from nwor_bench.report.sections.dram import dram_summary
from nwor_bench.report.sections.verdicts import verdict_sentence
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
    """Times above, tokens below; numbers are never cut, names fold where it is narrow."""
    return Group(_times(cells), "", _tokens(cells), "")


def print_summary(
    console: Console, run: RunData, cells: Sequence[CellResult], folder: Path
) -> None:
    """Print the tables, what is wrong with the run, its verdict, DRAM bytes, and its folder."""
    if cells:
        console.print(cells_table(cells))
    for warning in warnings(run):
        console.print(Text(f"Warning: {warning}", style="yellow"))
    console.print(Text(verdict_sentence(run.header, cells)))
    counted = dram_summary(run)
    if counted is not None:
        console.print(Text(counted))
    for finding in findings(run, cells):
        line = f"{finding.severity}: {finding.message} {finding.remedy}"
        console.print(Text(line, style=_SEVERITIES[finding.severity]))
    # Unwrapped, so that the path can be copied from a narrow terminal too.
    console.print(Text(f"Run folder: {folder}"), soft_wrap=True)


def _times(cells: Sequence[CellResult]) -> Table:
    table = _new_table("Time / off x off\n[own 95 % interval]", "p50 ms", "tokens/s", verdict=True)
    for cell in cells:
        verdict = Text(cell.verdict, style=_style(cell.verdict))
        numbers = (ratio(cell), decimal(cell.latency_ms_p50), decimal(cell.tokens_per_s))
        table.add_row(label(cell), verdict, *numbers)
    return table


def _tokens(cells: Sequence[CellResult]) -> Table:
    table = _new_table("accepted", "staged", "committed", "NWOR\nfallbacks", "SCV")
    for cell in cells:
        numbers = (
            percent(cell.acceptance_rate),
            count(cell.nwor_total_staged),
            count(cell.nwor_total_committed),
            count(cell.nwor_fallback_count),
        )
        scv = Text(cell.scv_status, style=_style(cell.scv_status))
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


def _style(verdict: str) -> str:
    return _STYLES.get(Verdict(verdict), "") if verdict in set(Verdict) else ""
