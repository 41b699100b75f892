"""Windows in rows: a CSV file, and a table on the terminal. What is None stays empty."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

Row = Mapping[str, Any]

NAMES = ("cell", "batch", "window", "process", "requests")
"""Columns that say which window a row is."""

WHOLE = 10_000
"""From here on a table shows no decimals."""


def columns_of(rows: Sequence[Row]) -> list[str]:
    """All names that occur, in the order in which they first do."""
    return list(dict.fromkeys(name for row in rows for name in row))


def write_table(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as CSV; a value that was not measured is an empty field."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns_of(rows), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: "" if v is None else v for k, v in row.items()} for row in rows)


def by_cell(rows: Sequence[Row], cells: Iterable[Any] = ()) -> list[dict[str, Any]]:
    """Means over each cell's windows; a column without any value is None, never 0.

    Args:
        rows: windows.
        cells: those that get a line although no row is theirs; they come first.
    """
    groups: dict[Any, list[Row]] = {cell: [] for cell in cells}
    for row in rows:
        groups.setdefault(row.get("cell"), []).append(row)
    names = [name for name in columns_of(rows) if name not in NAMES]
    found = []
    for cell, own in groups.items():
        means: dict[str, Any] = {"cell": cell, "windows": len(own)}
        for name in names:
            values = [float(row[name]) for row in own if row.get(name) is not None]
            means[name] = fmean(values) if values else None
        found.append(means)
    return found


def print_table(title: str, rows: Sequence[Row]) -> None:
    """Show rows on the terminal."""
    table = Table()
    names = columns_of(rows)
    for name in names:
        table.add_column(name.replace("_", " "), justify="left" if name == "cell" else "right")
    for row in rows:
        table.add_row(*(_text(row.get(name)) for name in names))
    console = Console()
    console.print(title, style="italic", soft_wrap=True)
    console.print(table)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= WHOLE else f"{value:,.3f}"
    return str(value)
