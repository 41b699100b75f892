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
from nwor_bench.report.figures import draw_svg

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
            return f"<dl>{''.join(pairs)}</dl>"
        case Code(text):
            return f'<pre tabindex="0">{html.escape(text)}</pre>'
        case Table():
            return _table(block)
        case Figure():
            return _figure(block)


def _figure(figure: Figure) -> str:
    return (
        f'<figure id="{figure.name}"><div class="plot" tabindex="0">{draw_svg(figure)}</div>'
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
    )


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


CSS = """
:root {
  color-scheme: light dark;
  --page: #fcfcfb; --text: #1c1f23; --soft: #5c6570; --line: #d9dde2; --head: #f1f3f5;
  --callout: #fff6e0; --callout-line: #d99a1b; --band: #e3e7ec; --link: #1f5f9c;
  --same: #2f7d4f; --faster: #1f6fb2; --slower: #b4541a; --ambiguous: #6b7280;
  --ineffective: #8a4bb0; --invalid: #c02634; --shade: #0003;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #15181c; --text: #e4e7ea; --soft: #9aa4af; --line: #343b43; --head: #1e2329;
    --callout: #2c2512; --callout-line: #c9932c; --band: #2b323a; --link: #7fb8ee;
    --same: #6cc48f; --faster: #6db3ec; --slower: #f09a5c; --ambiguous: #a3acb8;
    --ineffective: #c594e6; --invalid: #ff7b86; --shade: #fff3;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
main { max-width: 66rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; container-type: inline-size; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 {
  font-size: 1.15rem; margin: 1.8rem 0 .6rem; padding-bottom: .3rem;
  border-bottom: 1px solid var(--line);
}
summary { cursor: pointer; }
summary h2 { display: inline; border: 0; margin: 0; padding: 0; }
details { margin: .6rem 0; padding: .35rem 0; border-bottom: 1px solid var(--line); }
a { color: var(--link); }
p, ul, dl { margin: .75rem 0; max-width: 46rem; overflow-wrap: anywhere; }
ul { padding-left: 1.2rem; }
li { margin: .35rem 0; }
dt { font-weight: 600; margin-top: .7rem; }
dd { margin: 0 0 0 1rem; }
.strong { font-size: 1.08rem; font-weight: 600; }
.headline { font-size: 1.15rem; font-weight: 600; line-height: 1.45; }
.badge {
  display: inline-block; padding: .05rem .5rem; border-radius: 4px; font-size: .85em;
  color: var(--page); background: var(--soft);
}
.b-same { background: var(--same); } .b-faster { background: var(--faster); }
.b-slower { background: var(--slower); } .b-ineffective { background: var(--ineffective); }
.b-invalid { background: var(--invalid); }
nav { margin: 1.5rem 0; font-size: .875rem; max-width: 46rem; }
nav ul { display: flex; flex-wrap: wrap; gap: .35rem 1rem; padding: 0; list-style: none; }
nav li { margin: 0; }
.callout {
  margin: 1rem 0; padding: .7rem 1rem; max-width: 46rem; background: var(--callout);
  border-left: 4px solid var(--callout-line); border-radius: 0 4px 4px 0; overflow-wrap: anywhere;
}
.callout strong { display: block; }
.scroll {
  margin: 1rem 0; border: 1px solid var(--line); border-radius: 6px;
  width: fit-content; max-width: 100%;
}
.scroll, .plot {  /* an edge that hides something is shaded */
  overflow-x: auto;
  background:
    linear-gradient(90deg, var(--page) 40%, transparent) 0 0 / 3rem 100% no-repeat local,
    linear-gradient(270deg, var(--page) 40%, transparent) 100% 0 / 3rem 100% no-repeat local,
    linear-gradient(90deg, var(--shade), transparent) 0 0 / 1rem 100% no-repeat scroll,
    linear-gradient(270deg, var(--shade), transparent) 100% 0 / 1rem 100% no-repeat scroll;
}
table {
  border-collapse: separate; border-spacing: 0; font-size: .875rem;
  font-variant-numeric: tabular-nums;
}
caption {
  text-align: left; padding: .4rem .7rem; color: var(--soft); font-size: .8125rem;
  border-bottom: 1px solid var(--line);
}
caption:empty { padding: 0 .7rem; border: 0; }
caption span {  /* stays visible when the table scrolls */
  display: block; position: sticky; left: .7rem; width: min(100%, 100vw - 3.6rem);
}
caption::after {  /* has no size unless the table is wider than the page */
  --hidden: calc((100% + 1.4rem + 1px - 100cqw) * 99);
  content: "Scroll sideways \\2192" / ""; display: block; position: sticky; left: .7rem;
  line-height: 1.3rem; margin-top: clamp(-1.3rem, var(--hidden) - 1.3rem, 0px);
  width: clamp(0px, var(--hidden), 9rem); overflow: hidden; white-space: nowrap; color: var(--link);
}
th, td { padding: .22rem .7rem; text-align: left; white-space: nowrap; vertical-align: top; }
th { background: var(--head); font-weight: 600; white-space: normal; vertical-align: bottom; }
tbody th { background: var(--page); white-space: nowrap; vertical-align: top; }
thead th:first-child, tbody th { position: sticky; left: 0; }
tr + tr td, tr + tr th { border-top: 1px solid var(--line); }
td.long { white-space: normal; min-width: 16rem; overflow-wrap: anywhere; }
th.long { white-space: normal; min-width: 9rem; overflow-wrap: anywhere; }
.words td { white-space: normal; min-width: 6rem; }
.words td.long { min-width: 11rem; }
.number { text-align: right; }
pre {
  overflow-x: auto; margin: 1rem 0; padding: .7rem 1rem; background: var(--head);
  border-radius: 6px; font: .85rem/1.5 ui-monospace, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere;
}
.verdict { font-weight: 600; }
figure { margin: 1rem 0; max-width: 46rem; }
.plot { width: 100%; }
@container (max-width: 33.9rem) {
  figure::before { content: "Scroll sideways \\2192" / ""; color: var(--link); font-size: 13px; }
  th, td { padding: .22rem .45rem; }
}
.plot svg { display: block; width: 100%; min-width: 34rem; height: auto; }
.plot svg * { stroke-linejoin: round; stroke-linecap: butt; }
.plot text { font-family: inherit !important; }
figcaption { color: var(--soft); font-size: .8125rem; max-width: 46rem; margin-top: .4rem; }
.v-same { color: var(--same); } .v-faster { color: var(--faster); }
.v-slower { color: var(--slower); } .v-ambiguous { color: var(--ambiguous); }
.v-ineffective { color: var(--ineffective); } .v-invalid { color: var(--invalid); }
@media print { .scroll { overflow: visible; } body { font-size: 11px; } }
"""
"""Light and dark, and narrow enough for a phone."""
