"""A report document as GitHub-flavoured Markdown."""

import re
from collections.abc import Sequence

from nwor_bench.report.document import (
    Block,
    Bullets,
    Callout,
    Code,
    Definitions,
    Document,
    Figure,
    Headline,
    Paragraph,
    Table,
)

# Brackets only if they could make a link, underscores only if they could emphasise a word:
# numbers and names stay legible in the raw text.
_SPECIAL = re.compile(r"([\\`*<>|~$]|\](?=[\[(:])|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")


def render_markdown(document: Document) -> str:
    """The document as one Markdown text; figures are left out, their numbers are in tables."""
    parts = [f"# {escape(document.title)}", render_blocks(document.lead)]
    for section in document.sections:
        parts += [f"## {escape(section.title)}", render_blocks(section.blocks)]
    return "\n\n".join(part for part in parts if part) + "\n"


def render_blocks(blocks: Sequence[Block]) -> str:
    """Blocks without a title."""
    return "\n\n".join(text for text in map(_block, blocks) if text)


def escape(text: str) -> str:
    """Plain text on one line, with nothing left that Markdown or HTML would read as markup."""
    line = " ".join(text.split()).replace("&", "&amp;")
    return _SPECIAL.sub(r"\\\1", line)


def _block(block: Block) -> str:
    match block:
        case Headline():
            return f"**{escape(block.line)}**"
        case Paragraph(text, strong):
            return f"**{escape(text)}**" if strong else escape(text)
        case Callout(title, text):
            return f"> **{escape(title)}.** {escape(text)}"
        case Bullets(items):
            return "\n".join(f"- {escape(item)}" for item in items)
        case Definitions(entries):
            return "\n".join(f"- **{escape(term)}** {escape(text)}" for term, text in entries)
        case Code(text):
            return _fenced(text)
        case Table():
            return _table(block)
        case Figure():
            return ""


def _fenced(text: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def _table(table: Table) -> str:
    import pandas as pd

    if not table.rows:
        return "Nothing was recorded."
    headers = [escape(header) for header in table.headers]
    rows = [[escape(value) for value in row] for row in table.rows]
    for row, link in zip(rows, table.links, strict=False):
        row[0] = f"[{row[0]}]({link})" if link else row[0]
    frame = pd.DataFrame(rows, columns=headers)
    align = ["right" if i >= table.numbers_from else "left" for i in range(len(headers))]
    grid = frame.to_markdown(index=False, tablefmt="pipe", disable_numparse=True, colalign=align)
    return f"{escape(table.caption)}:\n\n{grid}" if table.caption else grid
