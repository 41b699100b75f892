"""Figures: what all of them share, and how a page draws them with plotly, offline.

A figure is a plain plotly description. Its colours are names of the page's own custom properties,
resolved by the page, so that light and dark need no second figure.
"""

import html
import json
from collections.abc import Sequence
from typing import Any

from nwor_bench.report.document import Figure

NO_SCRIPT = "Figures need JavaScript; their numbers are in the tables."

_SCRIPT = """
const figures = JSON.parse(document.getElementById("figures").textContent);
function painted(value, style) {
  if (typeof value === "string") {
    const name = value.match(/^var\\((--[a-z]+)\\)$/);
    return name ? style.getPropertyValue(name[1]).trim() : value;
  }
  if (Array.isArray(value)) return value.map(each => painted(each, style));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, painted(v, style)]));
}
function draw() {
  const style = getComputedStyle(document.documentElement);
  const font = {family: getComputedStyle(document.body).fontFamily, size: 13};
  for (const {id, data, layout} of figures) {
    const own = painted(layout, style);
    own.font = {...font, color: style.getPropertyValue("--text").trim()};
    Plotly.react(id, painted(data, style), own, {displayModeBar: false, responsive: true});
  }
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
"""


def colour(name: str) -> str:
    """A colour of the page's style sheet."""
    return f"var(--{name})"


def plot_text(text: str) -> str:
    """Text for a figure; plotly reads a few tags, so nothing that looks like one is left."""
    return html.escape(text, quote=False)


def axis(title: str = "", **settings: Any) -> dict[str, Any]:
    """An axis in the page's colours. It cannot be dragged: on a phone a finger scrolls the page."""
    return {
        "title": {"text": title, "standoff": 8, "font": {"size": 13}},
        "gridcolor": colour("line"),
        "linecolor": colour("soft"),
        "tickcolor": colour("soft"),
        "zeroline": False,
        "fixedrange": True,
        "automargin": True,
        **settings,
    }


def categories(labels: Sequence[str], **settings: Any) -> dict[str, Any]:
    """A vertical axis with one place a label, the first at the top."""
    names = [plot_text(label) for label in labels]
    return axis(
        type="category",
        categoryorder="array",
        categoryarray=names,
        autorange="reversed",
        showgrid=False,
        ticksuffix=" ",
        **settings,
    )


def layout(xaxis: dict[str, Any], yaxis: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """A figure's layout on the page's own background, with its legend below."""
    clear = "rgba(0,0,0,0)"
    return {
        "paper_bgcolor": clear,
        "plot_bgcolor": clear,
        "margin": {"l": 4, "r": 12, "t": 8, "b": 8},
        "dragmode": False,
        "showlegend": False,
        "legend": {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"},
        "hoverlabel": {"bgcolor": colour("head"), "font": {"color": colour("text")}},
        "xaxis": xaxis,
        "yaxis": yaxis,
        **settings,
    }


def figure_element(figure: Figure) -> str:
    """The figure's place on the page, with its text alternative and caption."""
    return (
        f'<figure><div class="plot" id="{figure.name}" role="img" '
        f'aria-label="{html.escape(figure.alternative)}" style="height:{figure.height}px"></div>'
        f"<noscript><p>{NO_SCRIPT}</p></noscript>"
        f"<figcaption>{html.escape(figure.caption).replace(' %', '&nbsp;%')}</figcaption></figure>"
    )


def scripts(figures: Sequence[Figure]) -> str:
    """What draws the figures: plotly once, their descriptions, a few lines. Empty for none."""
    if not figures:
        return ""
    from plotly.offline import get_plotlyjs

    drawn = [{"id": f.name, "data": list(f.data), "layout": f.layout} for f in figures]
    data = json.dumps(drawn, allow_nan=False).replace("<", "\\u003c")
    return (
        f"<script>{get_plotlyjs()}</script>\n"
        f'<script type="application/json" id="figures">{data}</script>\n'
        f"<script>{_SCRIPT}</script>\n"
    )
