"""The terminal's view of a sweep: the answer, one row a run, and the folder."""

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nwor_bench.report.console import verdict_style
from nwor_bench.report.sweep.document import sweep_answer
from nwor_bench.report.sweep.swept_run import SweptRun, label_of_run, varying
from nwor_bench.report.text import NOT_MEASURED, ratio


def print_sweep(
    console: Console, runs: Sequence[SweptRun], folder: Path, *, quiet: bool = False
) -> None:
    """Print the answer, a table of the runs and the folder; `quiet` leaves the table out."""
    badge, sentence = sweep_answer(runs)
    console.print(Text(f"{badge}: {sentence}"))
    if not quiet:
        console.print()
        console.print(_table(runs))
        console.print()
    # Unwrapped, so that the path can be copied from a narrow terminal too.
    console.print(Text(f"Sweep folder: {folder}"), soft_wrap=True)


def _table(runs: Sequence[SweptRun]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("Run", overflow="fold")
    table.add_column("Answer", no_wrap=True)
    table.add_column("Cell", no_wrap=True)
    table.add_column("Time / off x off\n[95 % interval]", justify="right", no_wrap=True)
    axes = varying(runs)
    for run in runs:
        badge = run.answer.badge if run.answer else run.status
        cell = run.answer.cell if run.answer else None
        rated = (NOT_MEASURED, NOT_MEASURED) if cell is None else (cell.label, ratio(cell))
        name = f"{run.number}: {label_of_run(run, axes)}"
        table.add_row(Text(name), Text(badge, style=verdict_style(badge)), *rated)
    return table
