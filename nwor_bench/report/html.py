"""A report document as one self-contained HTML file: no script, nothing loaded from elsewhere."""

import html

from nwor_bench.aggregate import REFERENCE
from nwor_bench.records import Verdict
from nwor_bench.report.document import (
    Block,
    Bullets,
    Callout,
    Code,
    Document,
    IntervalChart,
    Paragraph,
    Table,
)
from nwor_bench.report.intervals import interval_svg
from nwor_bench.report.style import CSS

_VERDICTS = {str(verdict) for verdict in Verdict} | {REFERENCE}

_LONG = 60
"""A table value of more characters than this may wrap."""


def render_html(document: Document) -> str:
    """The document as a complete page; every text of it is escaped."""
    body = [f"<h1>{escape(document.title)}</h1>", *map(_block, document.lead)]
    for section in document.sections:
        body += [f"<h2>{escape(section.title)}</h2>", *map(_block, section.blocks)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(document.title)}</title>\n<style>{CSS}</style>\n</head>\n"
        "<body>\n<main>\n" + "\n".join(body) + "\n</main>\n</body>\n</html>\n"
    )


def escape(text: str) -> str:
    """Text for HTML; a number and its per-cent sign stay on one line."""
    return html.escape(text).replace(" %", "&nbsp;%")


def _block(block: Block) -> str:
    match block:
        case Paragraph(text, strong):
            return f'<p class="strong">{escape(text)}</p>' if strong else f"<p>{escape(text)}</p>"
        case Callout(title, text):
            return f'<div class="callout"><strong>{escape(title)}</strong>{escape(text)}</div>'
        case Bullets(items):
            return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"
        case Code(text):
            return f"<pre>{escape(text)}</pre>"
        case Table():
            return _table(block)
        case IntervalChart(cells, margin):
            return _figure(interval_svg(cells, margin), margin)


def _figure(svg: str, margin: float) -> str:
    caption = (
        "Latency over off x off with its 95 % interval; right of 1 is slower. The band is "
        f"{100 * margin:g} % on each side of 1: an interval inside it is SAME."
    )
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _table(table: Table) -> str:
    if not table.rows:
        return "<p>Nothing was recorded.</p>"
    heads = "".join(
        f"<th{_class(place, '', table)}>{escape(head)}</th>"
        for place, head in enumerate(table.headers)
    )
    rows = "".join(
        "<tr>" + "".join(_cell(place, value, table) for place, value in enumerate(row)) + "</tr>"
        for row in table.rows
    )
    # A box that scrolls must be reachable with the keyboard.
    return (
        '<div class="scroll" tabindex="0"><table><thead><tr>'
        f"{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _cell(place: int, value: str, table: Table) -> str:
    return f"<td{_class(place, value, table)}>{escape(value)}</td>"


def _class(place: int, value: str, table: Table) -> str:
    names = ["number"] if place >= table.numbers_from else []
    if value in _VERDICTS:
        names += ["verdict", f"v-{value.lower()}"]
    if len(value) > _LONG:
        names.append("long")
    return f' class="{" ".join(names)}"' if names else ""
