"""A comparison of two runs on the terminal, as Markdown for a pull request, and as JSON."""

from dataclasses import asdict
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nwor_bench.analysis.comparing.change_estimates import Change
from nwor_bench.analysis.comparing.compare import CellChange, ChangeVerdict, Comparison
from nwor_bench.analysis.comparing.stored_run import StoredRun
from nwor_bench.records.json_text import document
from nwor_bench.records.types import to_dict
from nwor_bench.report.comparison import text as words
from nwor_bench.report.comparison.documents import comparison_document
from nwor_bench.report.comparison.notes import notes
from nwor_bench.report.markdown import render_markdown

COMPARISON_FORMAT_VERSION = 1

NAME_WIDTH = len("stage x adaptive")

STYLES = {
    ChangeVerdict.REGRESSION: "bold red",
    ChangeVerdict.IMPROVEMENT: "bold green",
    ChangeVerdict.SAME: "green",
    ChangeVerdict.AMBIGUOUS: "cyan",
    ChangeVerdict.ONLY_IN_BASE: "yellow",
    ChangeVerdict.ONLY_IN_NEW: "yellow",
}


def print_comparison(console: Console, comparison: Comparison, *, quiet: bool = False) -> None:
    """Print tables, reasons and notes, and the headline last; `quiet` prints it alone."""
    if quiet:
        console.print(Text(words.headline(comparison)))
        return
    for name, run in (("BASE", comparison.base), ("NEW", comparison.new)):
        # Unwrapped, so that the path can be copied from a narrow terminal too.
        console.print(Text(f"{name:4} {run.folder}"), soft_wrap=True)
    for rows in (_changes(comparison), _values(comparison)):
        console.print()
        console.print(rows)
    for line in ["", *words.reasons(comparison), "", words.how_decided(comparison), ""]:
        console.print(Text(line))
    for note in notes(comparison):
        console.print(_bullet(note))
    style = (
        STYLES[ChangeVerdict.REGRESSION] if comparison.having(ChangeVerdict.REGRESSION) else "bold"
    )
    console.print()
    console.print(Text(words.headline(comparison), style=style))


def comparison_markdown(comparison: Comparison) -> str:
    """Markdown for a pull request: the headline first, then tables, reasons and notes."""
    return render_markdown(comparison_document(comparison))


def comparison_json(comparison: Comparison, *, strict: bool) -> str:
    """Everything as JSON; values that were not measured are null."""
    return document(
        {"comparison_version": COMPARISON_FORMAT_VERSION, **content_of(comparison, strict=strict)}
    )


def content_of(comparison: Comparison, *, strict: bool) -> dict[str, Any]:
    """The comparison's keys without their version."""
    return {
        "headline": words.headline(comparison),
        "exit_code": int(comparison.exit_code(strict=strict)),
        "decide_by": str(comparison.decide_by),
        "threshold": comparison.threshold,
        "noise_floor": comparison.noise_floor,
        "base": _run(comparison.base),
        "new": _run(comparison.new),
        "forced_differences": [asdict(difference) for difference in comparison.forced],
        "other_differences": [asdict(difference) for difference in comparison.others],
        "cells": [_cell(cell) for cell in comparison.cells],
        "notes": notes(comparison),
    }


def _changes(comparison: Comparison) -> Table:
    table = new_table(("Cell", "Change", "Ratio to off\nNEW / BASE", "Time\nNEW / BASE"))
    for cell, row in zip(comparison.cells, words.change_rows(comparison), strict=True):
        assert cell.outcome is not None
        name, outcome, *numbers = row
        table.add_row(Text(name), Text(outcome, style=STYLES.get(cell.outcome, "")), *numbers)
    return table


def _values(comparison: Comparison) -> Table:
    table = new_table(
        ("Cell", *(f"{header}\nBASE{words.ARROW}NEW" for header in words.VALUE_HEADERS[1:]))
    )
    for name, *values in words.value_rows(comparison):
        table.add_row(Text(name), *values)
    return table


def new_table(headers: tuple[str, ...]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for place, header in enumerate(headers):
        words_in_it = place == 0 or header.startswith(("Change", "Parity"))
        side: Literal["left", "right"] = "left" if words_in_it else "right"
        # On a narrow terminal words fold, cell names last; numbers are never truncated.
        least = None if place else NAME_WIDTH
        table.add_column(
            header, justify=side, no_wrap=not words_in_it, overflow="fold", min_width=least
        )
    return table


def _bullet(text: str) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row("-", Text(text))
    return grid


def _run(run: StoredRun) -> dict[str, Any]:
    return {
        "folder": str(run.folder),
        "started_at": run.header.started_at,
        "status": run.header.status,
        "read_from": run.source,
        "warnings": list(run.warnings),
    }


def _cell(cell: CellChange) -> dict[str, Any]:
    return {
        **cell.cell.names,
        "outcome": str(cell.outcome),
        "reason": cell.reason,
        "p_value_holm": cell.p_value_holm,
        "ratio_change": _change(cell.ratio),
        "time_change": _change(cell.time),
        "base": None if cell.base is None else to_dict(cell.base),
        "new": None if cell.new is None else to_dict(cell.new),
    }


def _change(change: Change | None) -> dict[str, Any] | None:
    if change is None:
        return None
    interval = change.interval
    return {
        "measure": change.measure,
        "ratio": change.ratio,
        "low": None if interval is None else interval.low,
        "high": None if interval is None else interval.high,
        "p_value": None if interval is None else interval.p_value,
        "paired": change.paired,
        "base_blocks": change.base_blocks,
        "new_blocks": change.new_blocks,
        "base_windows": change.base_windows,
        "new_windows": change.new_windows,
        "base_untimed_windows": change.base_untimed,
        "new_untimed_windows": change.new_untimed,
        "why_no_interval": change.why_open,
    }
