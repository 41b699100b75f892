"""A report document as one self-contained HTML file: nothing is loaded from elsewhere."""

import html
import re
from collections.abc import Sequence

from nwor_bench.records.types import Verdict
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
    Section,
    Table,
)
from nwor_bench.report.html.style import CSS
from nwor_bench.report.plots import figure_element

_VERDICTS = {str(verdict): verdict.lower() for verdict in Verdict}
_VERDICTS |= {"REGRESSION": "slower", "IMPROVEMENT": "faster"}
"""The colour of each verdict, of cells and of changes."""

_LONG = 36
"""A table value of more characters than this may wrap."""


def render_html(document: Document) -> str:
    """The document as a complete page; every text of it is escaped."""
    body = [f"<h1>{escape(document.title)}</h1>", *map(_block, document.lead)]
    if len(document.sections) > 1:
        body.append(_contents(document.sections))
    for section in document.sections:
        body += _section(section)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # A page without an icon of its own would ask its server for one.
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(document.title)}</title>\n<style>{CSS}</style>\n</head>\n"
        "<body>\n<main>\n" + "\n".join(body) + "\n</main>\n</body>\n</html>\n"
    )


def escape(text: str) -> str:
    """Text for HTML; a number and its per-cent sign stay on one line."""
    return html.escape(text).replace(" %", "&nbsp;%")


def _section(section: Section) -> list[str]:
    heading = f'<h2 id="{_anchor(section)}">{escape(section.title)}</h2>'
    blocks = [*map(_block, section.blocks)]
    if section.folded:
        return ["<details>", f"<summary>{heading}</summary>", *blocks, "</details>"]
    return [heading, *blocks]


def _contents(sections: Sequence[Section]) -> str:
    links = "".join(
        f'<li><a href="#{_anchor(section)}">{escape(section.title)}</a></li>'
        for section in sections
    )
    return f'<nav aria-label="Contents"><ul>{links}</ul></nav>'


def _anchor(section: Section) -> str:
    return "section-" + re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-")


def _block(block: Block) -> str:
    match block:
        case Headline(badge, text, kind):
            mark = f'<span class="badge b-{html.escape(kind)}">{escape(badge)}</span>'
            return f'<p class="headline">{mark} {escape(text)}</p>'
        case Paragraph(text, strong):
            return f'<p class="strong">{escape(text)}</p>' if strong else f"<p>{escape(text)}</p>"
        case Callout(title, text):
            return f'<div class="callout"><strong>{escape(title)}</strong>{escape(text)}</div>'
        case Bullets(items):
            return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"
        case Definitions(entries):
            pairs = (f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in entries)
            return f"<dl>{''.join(pairs)}</dl>"
        case Code(text):
            return f'<pre tabindex="0">{html.escape(text)}</pre>'
        case Table():
            return _table(block)
        case Figure():
            return figure_element(block)


def _table(table: Table) -> str:
    if not table.rows:
        return "<p>Nothing was recorded.</p>"
    heads = "".join(
        f'<th scope="col"{_class(place, "", table)}>{escape(head)}</th>'
        for place, head in enumerate(table.headers)
    )
    rows = "".join(
        "<tr>" + "".join(_cell(line, place, table) for place in range(len(row))) + "</tr>"
        for line, row in enumerate(table.rows)
    )
    name = f' role="region" aria-label="{html.escape(table.caption)}"' if table.caption else ""
    caption = f"<caption><span>{escape(table.caption)}</span></caption>" if table.caption else ""
    words = ' class="words"' if table.numbers_from >= len(table.headers) else ""
    # A box that scrolls must be reachable with the keyboard.
    return (
        f'<div class="scroll" tabindex="0"{name}><table{words}>{caption}<thead><tr>'
        f"{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _cell(line: int, place: int, table: Table) -> str:
    """A row's first value is its heading, and leads to the row's own page if it has one."""
    value = table.rows[line][place]
    tag, scope = ("td", "") if place else ("th", ' scope="row"')
    text = escape(value)
    if not place and table.links and table.links[line]:
        text = f'<a href="{html.escape(table.links[line])}">{text}</a>'
    shade = table.shades[line][place] if table.shades else ""
    return f"<{tag}{scope}{_class(place, value, table, shade)}>{text}</{tag}>"


def _class(place: int, value: str, table: Table, shade: str = "") -> str:
    names = ["number"] if place >= table.numbers_from else []
    if value in _VERDICTS:
        names += ["verdict", f"v-{_VERDICTS[value]}"]
    if len(value) > _LONG:
        names.append("long")
    if shade:
        names.append(f"s-{shade}")
    return f' class="{" ".join(names)}"' if names else ""
