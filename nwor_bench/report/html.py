"""A report document as one self-contained HTML file: nothing is loaded from elsewhere.

Figures are SVG drawn by matplotlib: text stays text. matplotlib draws a stand-in for each colour of
page.css; in the SVG these become `var(--name)`, so light and dark need no second figure.
"""

import html
import io
import re
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

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
from nwor_bench.report.text import NOT_MEASURED

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


CSS = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
"""The page's style: light and dark, and narrow enough for a phone."""


def render_html(document: Document) -> str:
    """The document as a complete page; every text of it is escaped."""
    body = [f"<h1>{escape(document.title)}</h1>"]
    if document.lead:
        body += ['<div class="lead">', *map(_block, document.lead), "</div>"]
    if len(document.sections) > 1:
        body.append(_contents(document.sections))
    for section in document.sections:
        body += _section(section)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # A page without an icon of its own would ask its server for one.
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(document.title)}</title>\n<style>\n{CSS}</style>\n</head>\n"
        "<body>\n<main>\n" + "\n".join(body) + "\n</main>\n</body>\n</html>\n"
    )


def escape(text: str) -> str:
    """Text for HTML, without backticks; a number and its per-cent sign stay on one line."""
    return html.escape(text.replace("`", "")).replace(" %", "&nbsp;%")


COPY = (
    "getSelection().selectAllChildren(this.previousElementSibling);"
    "document.execCommand('copy');this.textContent='Copied'"
)
"""The script of a copy button; a page from a disk has no other clipboard in every browser."""


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
            mark = f'<span class="badge b-{html.escape(kind)}">{escape(badge)}</span> '
            return f'<p class="headline">{mark if badge else ""}{escape(text)}</p>'
        case Paragraph(text, strong):
            return f'<p class="strong">{escape(text)}</p>' if strong else f"<p>{escape(text)}</p>"
        case Callout(title, text):
            return f'<div class="callout"><strong>{escape(title)}</strong>{escape(text)}</div>'
        case Bullets(items):
            return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"
        case Definitions(entries):
            pairs = (f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in entries)
            return f"<dl>{''.join(pairs)}</dl>" if entries else ""
        case Code(text):
            button = f'<button type="button" onclick="{COPY}">Copy</button>'
            return f'<div class="code"><pre tabindex="0">{html.escape(text)}</pre>{button}</div>'
        case Table():
            return _table(block)
        case Figure():
            return (
                f'<figure id="{block.name}"><div class="plot" tabindex="0">{draw_svg(block)}</div>'
                f"<figcaption>{escape(block.caption)}</figcaption></figure>"
            )


def _table(table: Table) -> str:
    """The rows with a number; those without any are behind a line that opens."""
    if not table.rows:
        return "<p>Nothing was recorded.</p>"
    empty = [line for line in range(len(table.rows)) if _is_empty(table, line)]
    if len(empty) < 2:
        return _grid(table, range(len(table.rows)))
    shown = [line for line in range(len(table.rows)) if line not in empty]
    summary = f"<summary>{len(empty)} rows were not measured</summary>"
    folded = f"<details>{summary}{_grid(table, empty)}</details>"
    return _grid(table, shown) + folded if shown else folded


def _is_empty(table: Table, line: int) -> bool:
    """True if a row was not measured, and its verdict says no more than that."""
    row = table.rows[line]
    numbers = row[table.numbers_from :] if table.result is None else row[table.result :][:1]
    faults = {str(Verdict.INVALID), str(Verdict.INEFFECTIVE)} & {*row}
    return NOT_MEASURED in numbers and not faults and {*numbers} <= {NOT_MEASURED, "0"}


def _grid(table: Table, lines: Sequence[int]) -> str:
    heads = "".join(
        f'<th scope="col"{_class(place, "", table)}>{escape(head)}</th>'
        for place, head in enumerate(table.headers)
    )
    rows = "".join(
        "<tr>" + "".join(_cell(line, place, table) for place in range(len(table.headers))) + "</tr>"
        for line in lines
    )
    name = f' role="region" aria-label="{html.escape(table.caption)}"' if table.caption else ""
    caption = f"<span>{escape(table.caption)}</span>" if table.caption else ""
    words = ' class="words"' if table.numbers_from >= len(table.headers) else ""
    # A box that scrolls must be reachable with the keyboard.
    return (
        f'<div class="scroll" tabindex="0"{name}><table{words}><caption>{caption}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _cell(line: int, place: int, table: Table) -> str:
    """A row's first value is its heading, and leads to the row's own page if it has one."""
    value = table.rows[line][place]
    tag, scope = ("td", "") if place else ("th", ' scope="row"')
    text = escape(value)
    if not place and table.links and table.links[line]:
        text = f'<a href="{html.escape(table.links[line])}">{text}</a>'
    return f"<{tag}{scope}{_class(place, value, table)}>{text}</{tag}>"


def _class(place: int, value: str, table: Table) -> str:
    names = ["number"] if place >= table.numbers_from else []
    if value in _VERDICTS:
        names += ["verdict", f"v-{_VERDICTS[value]}"]
    if len(value) > _LONG:
        names.append("long")
    return f' class="{" ".join(names)}"' if names else ""


COLOURS = ("text", "soft", "line", "head", "band", "same", "faster", "slower", "ambiguous",
           "ineffective", "invalid")  # fmt: skip
_STAND_INS = {name: f"#0f1e{place:02x}" for place, name in enumerate(COLOURS, 16)}

_DOTS = 72


def colour(name: str) -> str:
    """The stand-in for a colour of the page's style sheet."""
    return _STAND_INS[name]


def draw_svg(figure: Figure) -> str:
    """The figure as an SVG element that is the same each time."""
    file = io.StringIO()
    import matplotlib as mpl

    with mpl.rc_context(_settings(figure.name)):
        canvas_of(figure).savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _inline(file.getvalue(), figure.name, figure.alternative)


def canvas_of(figure: Figure) -> "Canvas":
    """The drawn figure as a matplotlib object."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    with mpl.rc_context(_settings(figure.name)):
        size = (figure.width / _DOTS, figure.height / _DOTS)
        canvas = Canvas(figsize=size, dpi=_DOTS, layout="constrained")
        figure.draw(canvas)
    return canvas


def _inline(svg: str, name: str, alternative: str) -> str:
    """The SVG as an element of a page: its ids are its own, its colours the page's."""
    start = svg.index("<svg")
    # Its style rules would apply to the whole page, which has rules for its figures.
    body = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg[start:], flags=re.DOTALL)
    box = re.search(r'viewBox="[^"]*"', body)
    assert box is not None
    body = body[body.index(">") + 1 :]
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = body.replace("url(#", f"url(#{name}-").replace('xlink:href="#', f'href="#{name}-')
    for tint, hexadecimal in _STAND_INS.items():
        body = body.replace(hexadecimal, f"var(--{tint})")
    label = html.escape(alternative)
    head = f'<svg role="img" aria-label="{label}" {box.group()}><title>{label}</title>'
    return head + re.sub(r"\s*\n\s*", "\n", body).strip()


def _settings(name: str) -> Any:
    """matplotlib's settings for a figure of that name."""
    text, soft = colour("text"), colour("soft")
    return {
        "svg.fonttype": "none", "svg.hashsalt": name, "text.parse_math": False, "font.size": 13,
        "font.family": "DejaVu Sans", "text.color": text, "axes.labelcolor": text,
        "xtick.color": soft, "ytick.color": soft, "xtick.labelcolor": text,
        "ytick.labelcolor": text, "axes.edgecolor": soft, "grid.color": colour("line"),
        "axes.spines.top": False, "axes.spines.right": False, "axes.labelsize": 13,
        "legend.frameon": False, "legend.fontsize": 12, "axes.axisbelow": True,
    }  # fmt: skip


def tint_of(verdict: str) -> str:
    """The name of a verdict's colour and class; AMBIGUOUS has that of NOT MEASURED too."""
    return "ambiguous" if verdict == Verdict.NOT_MEASURED else verdict.lower()


_VERDICTS = {str(verdict): tint_of(verdict) for verdict in Verdict}
_VERDICTS |= {"REGRESSION": "slower", "IMPROVEMENT": "faster"}
"""The colour of each verdict, of cells and of changes."""

_LONG = 36
"""A table value of more characters than this may wrap."""
