"""A report as data: headings, sentences, tables and figures, without a medium.

All text is plain; each renderer (`terminal`, `markdown`, `html`) escapes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


@dataclass(frozen=True)
class Headline:
    """The one sentence that every reader must see, with a badge.

    `kind` names the badge's colour: a verdict in lower case, or "none". Without a badge only
    the sentence is shown.
    """

    badge: str
    text: str
    kind: str = "none"

    @property
    def line(self) -> str:
        """`FASTER: +2.9 % tokens/s ...`."""
        return f"{self.badge}: {self.text}" if self.badge else self.text


@dataclass(frozen=True)
class Paragraph:
    """Sentences; `strong` ones stand out."""

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


Facts = tuple[tuple[str, str], ...]
"""Terms, each with what is said of it."""


@dataclass(frozen=True)
class Definitions:
    """Terms with their explanations, or what an answer rests on, a fact each."""

    entries: Facts


@dataclass(frozen=True)
class Code:
    """Text to copy unchanged."""

    text: str


@dataclass(frozen=True)
class Table:
    """Rows of formatted text; columns from `numbers_from` on are numbers."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers_from: int = 1
    caption: str = ""
    links: tuple[str, ...] = ()
    """The address of each row's first value, "" for none."""
    result: int | None = None
    """The column without which a row was not measured; None if that takes all numbers."""


@dataclass(frozen=True)
class Figure:
    """A figure; media without figures leave it out, since tables have its numbers.

    Attributes:
        name: identifies it on the page: small letters and hyphens.
        caption: how to read it.
        alternative: its content in words, for screen readers.
        draw: draws it with matplotlib; colours are those of `figures.colour`.
        height: in CSS pixels.
        width: likewise; a narrow one fits a phone without scrolling.
    """

    name: str
    caption: str
    alternative: str
    draw: "Callable[[Canvas], None]"
    height: int
    width: int = 720


Block = Headline | Paragraph | Callout | Bullets | Definitions | Code | Table | Figure


@dataclass(frozen=True)
class Section:
    """A heading and its blocks."""

    title: str
    blocks: tuple[Block, ...]
    brief: bool = False
    """True if the short report has the section too."""
    folded: bool = False
    """A page shows only its heading until it is opened."""


@dataclass(frozen=True)
class Document:
    """A report: its title, the blocks before the first heading, and its sections."""

    title: str
    lead: tuple[Block, ...]
    sections: tuple[Section, ...] = ()

    def shortened(self, note: str = "") -> "Document":
        """Only the lead and the brief sections; the note says where the others are."""
        kept = tuple(section for section in self.sections if section.brief)
        return Document(self.title, (*self.lead, *([Paragraph(note)] if note else [])), kept)


def table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int = 1, caption: str = ""
) -> Table:
    """A Table from any sequences. Raises ValueError if a row's length is not the header's."""
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"{len(row)} values under {len(headers)} headers: {row}")
    return Table(tuple(headers), tuple(tuple(row) for row in rows), numbers_from, caption)
