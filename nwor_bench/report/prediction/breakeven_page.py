"""The break-even map as one HTML page that opens offline, with plotly's script inside."""

import html
import json
from collections.abc import Sequence
from string import Template
from typing import TYPE_CHECKING, Any

from nwor_bench.models.byte_model import MAPPED, BreakEvenMap, break_even_map
from nwor_bench.models.strategies import BY_REFERENCE
from nwor_bench.report.html.style import CSS
from nwor_bench.report.prediction.text import (
    STRATEGY_HEADERS,
    BytePrediction,
    headline,
    notes,
    setting,
    step_rows,
    strategy_rows,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go

_COLOURS = ((0, "#b4541a"), (0.5, "#f3f1ec"), (1, "#1f6fb2"))

_OWN_CSS = """
.choices { display: flex; flex-wrap: wrap; gap: .5rem 1.5rem; margin: 1rem 0 0; }
.choices label { display: flex; flex-direction: column; font-size: .8125rem; color: var(--soft); }
.choices select { font: inherit; font-size: 1rem; padding: .3rem; max-width: 100%; }
#map { width: 100%; height: 32rem; }
#said { min-height: 3.2em; }
td:first-child { white-space: normal; min-width: 8rem; }
"""

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>$css</style>
</head>
<body>
<main>
<h1>$title</h1>
<p class="strong">$headline</p>
<p>$setting</p>
<h2>Where it pays: acceptance x batch</h2>
<div class="choices">$choices</div>
<p id="said" aria-live="polite"></p>
<figure><figcaption>Predicted saving, % of the step's DRAM bytes:</figcaption>
$figure
</figure>
<p>Blue: fewer DRAM bytes than stock vLLM. Brown: more. The circle marks the workload above. Each
map has its own colour scale, so compare maps by their numbers.</p>
<h2>One step of stock vLLM</h2>
$step
<h2>Ways to keep drafts out of the cache</h2>
$strategies
<h2>What these numbers assume</h2>
<ul>$notes</ul>
</main>
<script>const maps = $data;
$script</script>
</body>
</html>
""")

# Shows one of the maps that Python computed; it computes no bytes itself.
_SCRIPT = """
const chosen = name => document.getElementById(name).value;
function draw() {
  const strategy = maps[chosen("strategy")];
  const z = strategy.percent[chosen("drafts")][chosen("context")];
  const limit = strategy.breakEven;
  const most = Math.max(...z.flat().map(Math.abs));
  Plotly.update("map", {z: [z], zmin: [-most], zmax: [most]}, {
    "shapes[0].visible": limit !== null,
    "shapes[0].x0": 100 * limit, "shapes[0].x1": 100 * limit,
  }, [0]);
  const best = Math.max(...z.flat());
  const where = limit === null ? "it never moves fewer bytes than stock vLLM"
    : `it moves fewer bytes than stock vLLM below ${(100 * limit).toFixed(0)} % acceptance ` +
      `(dashed line), on this map at most ${best.toPrecision(2)} % of the step`;
  document.getElementById("said").textContent = `Predicted, ${strategy.label}: ${where}.`;
}
function theme() {
  const style = getComputedStyle(document.documentElement);
  Plotly.relayout("map", {"font.color": style.getPropertyValue("--text").trim()});
}
for (const select of document.querySelectorAll("select")) select.addEventListener("change", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme);
draw();
theme();
"""


def break_even_page(prediction: BytePrediction) -> str:
    """The page of one model: headline, map, tables and assumptions."""
    chart = break_even_map(prediction.model, prediction.load)
    return _PAGE.substitute(
        title=html.escape(f"Would NWOR pay? {prediction.name}"),
        css=CSS + _OWN_CSS,
        headline=_text(headline(prediction)),
        setting=_text(setting(prediction)),
        choices=_choices(chart),
        figure=_figure(chart),
        step=_table(("DRAM bytes of one step", "predicted", "share"), step_rows(prediction)),
        strategies=_table(STRATEGY_HEADERS, strategy_rows(prediction)),
        notes="".join(f"<li>{_text(note)}</li>" for note in notes(prediction)),
        data=json.dumps(map_data(chart)).replace("<", "\\u003c"),
        script=_SCRIPT,
    )


def map_data(chart: BreakEvenMap) -> dict[str, Any]:
    """Each strategy's label, break-even acceptance, and savings in per cent by k and context."""
    return {
        strategy.name: {
            "label": strategy.label,
            "breakEven": chart.model.break_even(strategy),
            "percent": {
                str(drafts): {
                    str(context): [
                        [float(f"{100 * share:.4g}") for share in row]
                        for row in chart.shares(strategy, drafts, context)
                    ]
                    for context in chart.contexts
                }
                for drafts in chart.draft_tokens
            },
        }
        for strategy in MAPPED
    }


def _choices(chart: BreakEvenMap) -> str:
    strategies = [(strategy.name, strategy.label) for strategy in MAPPED]
    drafts = [(str(number), str(number)) for number in chart.draft_tokens]
    contexts = [(str(number), f"{number:,} tokens") for number in chart.contexts]
    return (
        _select("strategy", "drafts' K/V", strategies, BY_REFERENCE.name)
        + _select("drafts", "drafts a request, k", drafts, str(chart.load.draft_tokens))
        + _select("context", "context a request", contexts, str(chart.load.context))
    )


def _select(name: str, label: str, options: Sequence[tuple[str, str]], chosen: str) -> str:
    items = "".join(
        f'<option value="{value}"{" selected" if value == chosen else ""}>'
        f"{html.escape(text)}</option>"
        for value, text in options
    )
    return f'<label>{html.escape(label)}<select id="{name}">{items}</select></label>'


def _figure(chart: BreakEvenMap) -> str:
    """The map with plotly's script; the page's `draw` fills it."""
    config = {"displayModeBar": False, "responsive": True}
    drawn: str = _heatmap(chart).to_html(
        full_html=False, include_plotlyjs=True, div_id="map", config=config
    )
    return drawn


def _heatmap(chart: BreakEvenMap) -> "go.Figure":
    import plotly.graph_objects as go

    load = chart.load
    first = chart.shares(BY_REFERENCE, load.draft_tokens, load.context)
    figure = go.Figure(
        [
            go.Heatmap(
                x=[100 * acceptance for acceptance in chart.acceptances],
                y=[str(number) for number in chart.requests],
                z=[[100 * share for share in row] for row in first],
                colorscale=_COLOURS,
                colorbar={
                    "orientation": "h", "thickness": 10, "y": 1.02, "yanchor": "bottom",
                    "nticks": 5, "tickangle": 0,
                },
                hovertemplate="%{y} requests, %{x:.0f} % accepted:<br>"
                "predicted to save %{z:.3g} % of the step's DRAM bytes<extra></extra>",
            ),
            go.Scatter(
                x=[100 * load.acceptance],
                y=[str(load.requests)],
                mode="markers",
                marker={"size": 13, "color": "rgba(0,0,0,0)",
                        "line": {"color": "#1c1f23", "width": 2.5}},
                hoverinfo="skip",
            ),
        ]
    )  # fmt: skip
    line = {"color": "#1c1f23", "dash": "dash", "width": 2}
    figure.add_shape(type="line", yref="paper", y0=0, y1=1, x0=0, x1=0, line=line)
    figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 56, "r": 8, "t": 48, "b": 48},
        showlegend=False,
        xaxis={"title": {"text": "acceptance, %"}, "range": [-2.5, 102.5], "fixedrange": True},
        yaxis={"title": {"text": "requests a step"}, "type": "category", "fixedrange": True},
    )
    return figure


def _text(text: str) -> str:
    return html.escape(text).replace(" %", "&nbsp;%")


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(_cell("th", place, text) for place, text in enumerate(headers))
    body = "".join(
        "<tr>" + "".join(_cell("td", place, text) for place, text in enumerate(row)) + "</tr>"
        for row in rows
    )
    # A box that scrolls must be reachable with the keyboard.
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(tag: str, place: int, text: str) -> str:
    return f"<{tag}{' class=number' if place else ''}>{_text(text)}</{tag}>"
