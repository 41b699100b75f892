"""A report as data: headings, sentences and tables, before anyone decides how to draw them.

All text is plain; whoever renders it escapes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nwor_bench.records import CellResult


@dataclass(frozen=True)
class Paragraph:
    """Sentences; `strong` for the one that a hurried reader must see."""

    text: str
    strong: bool = False


@dataclass(frozen=True)
class Callout:
    """A warning with a short title, set apart from the text."""

    title: str
    text: str


@dataclass(frozen=True)
class Bullets:
    """A list of sentences."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Code:
    """Text to be copied as it stands."""

    text: str


@dataclass(frozen=True)
class Table:
    """Rows of ready-made text; columns from `numbers_from` on are numbers."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers_from: int = 1


@dataclass(frozen=True)
class IntervalChart:
    """The cells' ratios with their intervals on one axis; a medium without figures omits it."""

    cells: tuple[CellResult, ...]
    margin: float


Block = Paragraph | Callout | Bullets | Code | Table | IntervalChart


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Document:
    """A report: its title, what comes before the first heading, and its sections."""

    title: str
    lead: tuple[Block, ...]
    sections: tuple[Section, ...]


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int = 1) -> Table:
    """A Table from any sequences. Raises ValueError if a row's length is not the header's."""
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"{len(row)} values under {len(headers)} headers: {row}")
    return Table(tuple(headers), tuple(tuple(row) for row in rows), numbers_from)
