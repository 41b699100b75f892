"""A report as data: headings, sentences, tables and figures, before anyone decides how to draw it.

All text is plain; each renderer escapes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Headline:
    """The one sentence that a hurried reader must see, with a word for what it says.

    `kind` names the badge's colour: a verdict in lower case, or "none".
    """

    badge: str
    text: str
    kind: str


@dataclass(frozen=True)
class Paragraph:
    """Sentences; `strong` for those that stand out."""

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
class Definitions:
    """Terms or questions, each with what there is to say about it."""

    entries: tuple[tuple[str, str], ...]


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
    caption: str = ""
    shades: tuple[tuple[str, ...], ...] = ()
    """Each value's background, "" for none: `faster-1` to `faster-3`, `slower-1` to `slower-3`,
    `same`, `ineffective`, `invalid`; a medium without colours leaves them out."""
    links: tuple[str, ...] = ()
    """The address that each row's first value leads to, "" for none."""


@dataclass(frozen=True)
class Figure:
    """A figure as data; a medium without figures omits it, its numbers are in tables.

    Attributes:
        name: identifies it on the page: small letters and hyphens.
        caption: how to read it.
        alternative: what it shows, for who cannot see it.
        data: points, bars and distributions; see `svg`. Colours are `colour(...)`.
        layout: axes, and the lines and notes on them.
        height: in CSS pixels.
    """

    name: str
    caption: str
    alternative: str
    data: tuple[dict[str, Any], ...]
    layout: dict[str, Any]
    height: int


Block = Headline | Paragraph | Callout | Bullets | Definitions | Code | Table | Figure


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: tuple[Block, ...]
    brief: bool = False
    """It belongs to the short report too."""
    folded: bool = False
    """A page shows the heading alone until it is opened."""


@dataclass(frozen=True)
class Document:
    """A report: its title, what comes before the first heading, and its sections."""

    title: str
    lead: tuple[Block, ...]
    sections: tuple[Section, ...]

    def shortened(self, note: str) -> "Document":
        """The same without the sections that are not brief; the note says where those are."""
        kept = tuple(section for section in self.sections if section.brief)
        return Document(self.title, (*self.lead, Paragraph(note)), kept)


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    numbers_from: int = 1,
    caption: str = "",
) -> Table:
    """A Table from any sequences. Raises ValueError if a row's length is not the header's."""
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"{len(row)} values under {len(headers)} headers: {row}")
    return Table(tuple(headers), tuple(tuple(row) for row in rows), numbers_from, caption)
