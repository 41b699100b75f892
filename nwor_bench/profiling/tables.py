"""Windows in rows: a CSV file, and a table on the terminal. What is None stays empty."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from nwor_bench.errors import ConfigError

Row = Mapping[str, Any]

NAMES = ("cell", "batch", "window", "process", "requests")
"""Columns that say which window a row is."""

GAP = 2
"""Spaces between a table's columns on the terminal; 1 where it is narrow."""

WHOLE = 10_000
"""From here on a table shows no decimals."""


def columns_of(rows: Sequence[Row]) -> list[str]:
    """All names that occur, in the order in which they first do."""
    return list(dict.fromkeys(name for row in rows for name in row))


def write_table(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as CSV; a value that was not measured is an empty field.

    Raises ConfigError where the file cannot be written.
    """
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns_of(rows), restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows({k: "" if v is None else v for k, v in row.items()} for row in rows)
    except OSError as error:
        raise ConfigError(
            f"profile: {path}: writing failed ({error.strerror}); move the report to a folder "
            "that can be written, and --read it there"
        ) from error


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


def cells_across(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A row a measure and a column a cell: measures are many, and cells are few."""
    return [
        {"cell": name.replace("_", " "), **{str(row["cell"] or ""): row[name] for row in rows}}
        for name in columns_of(rows)
        if name != "cell"
    ]


def print_table(title: str, rows: Sequence[Row]) -> None:
    """Show rows on the terminal; names fold where it is narrow, numbers are never cut."""
    console = Console()
    columns = [
        [name.replace("_", " "), *(_text(row.get(name)) for row in rows)]
        for name in columns_of(rows)
    ]
    narrow = sum(max(map(len, column)) + GAP for column in columns) > console.width
    padding = (0, 0 if narrow else GAP - 1, 0, 0)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=padding)
    words = [max(len(word) for text in column for word in text.split()) for column in columns]
    for column, word in zip(columns, words, strict=True):
        side: Literal["left", "right"] = "left" if column[0] == "cell" else "right"
        table.add_column(column[0], justify=side, width=word if narrow else None)
    for texts in zip(*(column[1:] for column in columns), strict=True):
        table.add_row(*texts)
    console.print(title, style="italic", soft_wrap=True)
    console.width = max(console.width, sum(words) + len(words))
    console.print(table)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= WHOLE else f"{value:,.3f}"
    return str(value)
