"""The break-even maps as one HTML page that opens offline."""

import html
from collections.abc import Sequence
from string import Template

from nwor_bench.models.byte_model import MAPPED, BreakEvenMap, break_even_map
from nwor_bench.models.recurrent import REPLAY_FUSED
from nwor_bench.report.html.style import CSS
from nwor_bench.report.prediction import states
from nwor_bench.report.prediction.breakeven_figure import draw_maps
from nwor_bench.report.prediction.text import (
    STRATEGY_HEADERS,
    BytePrediction,
    headline,
    notes,
    setting,
    step_rows,
    strategy_rows,
)

_OWN_CSS = """
td:first-child { white-space: normal; min-width: 8rem; }
figure { max-width: none; }
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
<figure><figcaption>Predicted saving, % of the step's DRAM bytes, with $context tokens of context a
request; k drafts a request. Blue: fewer DRAM bytes than stock vLLM. Brown: more. Dashed: the
acceptance at which both move the same. The circle marks the workload above. Each map has its own
colour scale; its title says which savings it holds.</figcaption>
<div class="plot" tabindex="0">$figure</div>
</figure>
$limits
<h2>One step of stock vLLM</h2>
$step
<h2>Ways to keep drafts out of the cache</h2>
$strategies
$states
<h2>What these numbers assume</h2>
<ul>$notes</ul>
</main>
</body>
</html>
""")


def break_even_page(prediction: BytePrediction) -> str:
    """The page of one model: headline, map, tables and assumptions."""
    chart = break_even_map(prediction.model, prediction.load)
    return _PAGE.substitute(
        title=html.escape(f"Would NWOR pay? {prediction.name}"),
        css=CSS + _OWN_CSS,
        headline=_text(headline(prediction)),
        setting=_text(setting(prediction)),
        context=f"{chart.load.context:,}",
        figure=draw_maps(chart, _in_words(chart)),
        limits=_table(_limit_headers(chart), limit_rows(chart)),
        step=_table(("DRAM bytes of one step", "predicted", "share"), step_rows(prediction)),
        strategies=_table(STRATEGY_HEADERS, strategy_rows(prediction)),
        states=_states(prediction),
        notes="".join(f"<li>{_text(note)}</li>" for note in notes(prediction)),
    )


def _states(prediction: BytePrediction) -> str:
    """A hybrid's recurrent states: sentence, table, map; empty for other models."""
    model, load = prediction.model, prediction.load
    if model.shape.recurrent is None:
        return ""
    words = _text(states.state_sentence(model.shape.recurrent, model.states(load)))
    tables = (
        _table(states.STATE_HEADERS, states.state_rows(model, load)),
        _table(*states.map_table(model, load, REPLAY_FUSED)),
    )
    more = "".join(f"<li>{_text(note)}</li>" for note in states.state_notes(model, load))
    return f"<h2>Recurrent states</h2><p>{words}</p>{''.join(tables)}<ul>{more}</ul>"


def limit_rows(chart: BreakEvenMap) -> list[list[str]]:
    """Break-even acceptance of each way of staging, and the most that it saves at each context."""
    rows = []
    for strategy in MAPPED:
        limit = chart.model.break_even(strategy)
        maps = (chart.shares(strategy, chart.load.draft_tokens, c) for c in chart.contexts)
        below = "never" if limit is None else f"below {100 * limit:.0f} % acceptance"
        rows.append([strategy.label, below, *(f"{100 * max(map(max, m)):.2g} %" for m in maps)])
    return rows


def _limit_headers(chart: BreakEvenMap) -> list[str]:
    contexts = (f"at most, {context:,} tokens" for context in chart.contexts)
    return ["drafts' K/V", f"saves (k = {chart.load.draft_tokens})", *contexts]


def _in_words(chart: BreakEvenMap) -> str:
    return "Predicted savings over acceptance and requests. " + "; ".join(
        f"{row[0]}: saves {row[1]}" for row in limit_rows(chart)
    )


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
