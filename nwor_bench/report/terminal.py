"""A report document on the terminal, by rich. No line is wider than the console.

Words fold on a narrow console. Numbers are never cut: a table that does not fit is
printed in parts, each with the first column.
"""

import re
from collections.abc import Iterator, Sequence
from textwrap import wrap

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from nwor_bench.report.document import (
    Block,
    Bullets,
    Callout,
    Code,
    Definitions,
    Document,
    Facts,
    Figure,
    Headline,
    Paragraph,
    Table,
)

_STYLES = {
    "SAME": "green", "FASTER": "bold green", "SLOWER": "yellow", "AMBIGUOUS": "cyan",
    "INEFFECTIVE": "magenta", "INVALID": "bold red", "IMPROVEMENT": "bold green",
    "REGRESSION": "bold red", "ONLY IN BASE": "yellow", "ONLY IN NEW": "yellow",
    "RIGHT": "green", "RIGHT BUT FOR TIES": "green", "NOT CHECKED": "cyan", "WRONG": "bold red",
    "NOT MEASURED": "dim",
    "ok": "green", "missing": "yellow", "wrong": "bold red",
}  # fmt: skip
_MARKS = {"ERROR: ": "bold red", "WARNING: ": "yellow", "NOTE: ": "dim"}

_BELOW = 3
"""Lines of a screen below a document: the report's path, another file's, the shell's prompt."""

_NBSP = "\N{NO-BREAK SPACE}"

_NAME, _HEADER, _WORDS, _TERM = 18, 9, 24, 8
"""Columns that a first value, a header and a long text take before they fold; at least for a term.
"""


def print_document(console: Console, document: Document, *, quiet: bool = False) -> None:
    """Print the lead and all sections, without the title; `quiet` prints only the headline.

    A headline that has left the screen is printed again, so that the last lines hold the answer.
    """
    lines = _print(console, document.lead[:1] if quiet else document.lead)
    for section in () if quiet else document.sections:
        console.print(Text(f"\n{section.title}", style="bold"))
        lines += 2 + _print(console, section.blocks)
    first = document.lead[0] if document.lead else None
    if isinstance(first, Headline) and lines > console.height - _BELOW:
        console.print()
        _print(console, [first])


def fits(table: Table, width: int) -> bool:
    """True if a table is printed in one part."""
    return len(_parts(table, width)) == 1


def print_path(console: Console, name: str, path: object) -> None:
    """`Report: /tmp/run/report.html`, unwrapped so that it can be copied from a narrow terminal."""
    console.print(Text(f"{name}: {path}"), soft_wrap=True)


def style_of(word: str) -> str:
    """The style of a verdict or another outcome, "" for other words."""
    return _STYLES.get(word, "")


def _print(console: Console, blocks: Sequence[Block]) -> int:
    """All blocks but figures, an empty line before each, but for lists and a headline's facts; how
    many lines these are."""
    before, lines = None, 0
    for block in blocks:
        if isinstance(block, Figure) or block == Definitions(()):
            continue
        below = isinstance(block, Definitions) and isinstance(before, Headline | Callout)
        if before is not None and not below and not isinstance(block, Bullets | Code):
            console.print()
            lines += 1
        before = block
        console.print(rendered := _rendered(block, console.width))
        lines += len(console.render_lines(rendered))
    return lines


def _rendered(block: Block, width: int) -> RenderableType:
    match block:
        case Headline():
            return Text(block.line, "bold")
        case Paragraph(text, strong):
            return Text(text, "bold" if strong else "")
        case Callout(title, text):
            return Text(f"{title}: {text}", "yellow")
        case Bullets(items):
            return Group(*map(_bullet, items))
        case Definitions(entries):
            return _facts(entries)
        case Code(text):
            return Padding(Text(text), (0, 0, 0, 2))
        case Table():
            return Group(*_tables(block, width))
        case Figure():
            return ""


def _bullet(text: str) -> Grid:
    style = next((style for mark, style in _MARKS.items() if text.startswith(mark)), "")
    grid = Grid.grid(padding=(0, 1, 0, 0))
    grid.add_row("-", Text(text, style))
    return grid


def _facts(entries: Facts) -> Grid:
    """A term and what is said of it in two columns."""
    grid = Grid.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True, min_width=_TERM, style="bold")
    for term, text in entries:
        grid.add_row(Text(term, _MARKS.get(f"{term.upper()}: ", "")), Text(text))
    return grid


def _tables(table: Table, width: int) -> Iterator[RenderableType]:
    if table.caption:
        yield Text(f"{table.caption}:", "dim")
    if not table.rows:
        yield "Nothing was recorded."
        return
    for columns in _parts(table, width):
        needed = sum(_least(table, column) + 2 for column in columns) - 2
        gap = 1 if needed <= width else 0  # beside the box's own
        grid = Grid(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0))
        for column in columns:
            number = column >= table.numbers_from
            grid.add_column(
                "\n".join(_lines(table, column)), justify="right" if number else "left",
                no_wrap=number, overflow="fold", min_width=_least(table, column, folded=True),
            )  # fmt: skip
        for row in table.rows:
            grid.add_row(*(Text(row[c], style=style_of(row[c])) for c in columns))
        yield grid


def _parts(table: Table, width: int) -> list[list[int]]:
    """The columns of each printed part: the first one, then as many as fit."""
    parts = [[0]]
    used = _least(table, 0)
    for column in range(1, len(table.headers)):
        needed = _least(table, column) + 1
        if used + needed > width and len(parts[-1]) > 1:
            parts.append([0])
            used = _least(table, 0)
        parts[-1].append(column)
        used += needed
    return parts


def _least(table: Table, column: int, *, folded: bool = False) -> int:
    """The width that a column needs: a number's in full, of a text a part, its words `folded`."""
    most = _WORDS if column else _NAME
    values = [row[column] for row in table.rows]
    if column < table.numbers_from and folded:
        return min(most, max(len(word) for value in values for word in value.split() or [""]))
    longest = max(map(len, values))
    headers = max(map(len, _lines(table, column)))
    return max(1, headers, longest if column >= table.numbers_from else min(longest, most))


def _lines(table: Table, column: int) -> Sequence[str]:
    """The header in lines no wider than its values, or than a few words."""
    values = max(len(row[column]) for row in table.rows)
    width = max(_HEADER, min(values, _WORDS))
    # "[95 % interval]" stays whole.
    glued = re.sub(r"\[.*?\]", lambda match: match[0].replace(" ", _NBSP), table.headers[column])
    lines = wrap(glued, width, break_long_words=False)
    return [line.replace(_NBSP, " ") for line in lines] or [""]
