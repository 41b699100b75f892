"""Windows as rows: a CSV file, and a table on the terminal. None stays empty."""

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

NAMES = ("place", "cell", "batch", "window", "process", "requests")
"""Columns that identify a window."""

SHOWN = {"_bytes": ("_MB", 1e6), "_ns": ("_ms", 1e6)}
"""Larger units for the terminal."""

GAP = 2
"""Spaces between two columns on the terminal; 1 if it is narrow."""

WHOLE = 10_000
"""Numbers from here on have no decimals on the terminal."""


def columns_of(rows: Sequence[Row]) -> list[str]:
    """All column names, in order of first occurrence."""
    return list(dict.fromkeys(name for row in rows for name in row))


def write_table(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as CSV; None becomes an empty field.

    Raises ConfigError if the file cannot be written.
    """
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns_of(rows), restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows({k: "" if v is None else v for k, v in row.items()} for row in rows)
    except OSError as error:
        raise ConfigError.at(
            f"profile: {path}",
            f"cannot be written ({error.strerror}); copy the report to a writable "
            "folder, and --read it there",
            joint=" ",
        ) from error


def by_cell(rows: Sequence[Row], cells: Iterable[Any] = ()) -> list[dict[str, Any]]:
    """Means over each cell's windows; a column without values is None, never 0.

    Args:
        rows: windows.
        cells: cells listed first, even without rows.
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
    """Transposed rows: one row per measure, one column per cell."""
    return [
        {"cell": name.replace("_", " "), **{str(row["cell"] or ""): row[name] for row in rows}}
        for name in columns_of(rows)
        if name != "cell"
    ]


def print_table(title: str, rows: Sequence[Row]) -> None:
    """Print rows in larger units; numbers are never truncated.

    On a narrow terminal texts fold, and columns that do not fit go into further tables.
    """
    console = Console()
    shown = [dict(_shown(name, value) for name, value in row.items()) for row in rows]
    columns = {
        name: [name.replace("_", " "), *(_text(row.get(name)) for row in shown)]
        for name in columns_of(shown)
    }
    gap, widths = _layout(columns, console.width)
    parts = _parts({name: width + gap for name, width in widths.items()}, console.width)
    console.width = max(console.width, *(sum(widths[one] + gap for one in part) for part in parts))
    for number, part in enumerate(parts):
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0))
        for name in part:
            side: Literal["left", "right"] = "left" if name == "cell" else "right"
            table.add_column(columns[name][0], justify=side, width=widths[name])
        for texts in zip(*(columns[name][1:] for name in part), strict=True):
            table.add_row(*texts)
        console.print("" if number else title, style="italic", soft_wrap=True)
        console.print(table)


def _layout(columns: Mapping[str, Sequence[str]], room: int) -> tuple[int, dict[str, int]]:
    """Gap and column widths for the least folding that fits: none, headings, or all texts."""
    heads = {name: [*texts[0].split(), *texts[1:]] for name, texts in columns.items()}
    words = {name: " ".join(texts).split() for name, texts in columns.items()}
    for gap, folded in ((GAP, columns), (GAP, heads), (1, words)):
        widths = {name: max(map(len, texts)) for name, texts in folded.items()}
        if sum(widths.values()) + gap * len(widths) <= room:
            break
    return gap, widths


def _parts(widths: Mapping[str, int], room: int) -> list[list[str]]:
    """Columns of each table: as many as fit, after the columns that identify the row."""
    first = [name for name in widths if name in NAMES]
    parts = [[*first]]
    for name in (name for name in widths if name not in NAMES):
        if parts[-1] != first and sum(widths[one] for one in [*parts[-1], name]) > room:
            parts.append([*first])
        parts[-1].append(name)
    return parts


def _shown(name: str, value: Any) -> tuple[str, Any]:
    """A column's name and value in the terminal's unit."""
    for unit, (larger, size) in SHOWN.items():
        if name.endswith(unit):
            shown = name.removesuffix(unit) + larger
            return shown, None if value is None else value / size
    return name, value


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= WHOLE else f"{value:,.3f}"
    return str(value)
