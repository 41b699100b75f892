"""Figures as SVG, drawn by matplotlib: text stays text, colours are the page's own.

matplotlib draws with a stand-in for each colour of the style sheet; in the SVG these become
`var(--name)`, so that light and dark need no second figure.
"""

import html
import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nwor_bench.report.document import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

COLOURS = ("text", "soft", "line", "head", "band", "same", "faster", "slower", "ambiguous",
           "ineffective", "invalid")  # fmt: skip
_STAND_INS = {name: f"#0f1e{place:02x}" for place, name in enumerate(COLOURS, 16)}

_WIDTH = 720
"""CSS pixels for which a figure is drawn; narrower pages scroll it."""

_DOTS = 72
_MARKERS = {"triangle-left": "<", "triangle-right": ">", "circle": "o", "diamond-open": "D",
            "line-ns-open": "|"}  # fmt: skip
_DASHES = {"solid": "-", "dot": ":", "dash": "--"}


def draw_svg(figure: Figure) -> str:
    """The figure as an SVG element that is the same each time."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    with mpl.rc_context(settings(figure.name)):
        canvas = Canvas(figsize=(_WIDTH / _DOTS, figure.height / _DOTS), dpi=_DOTS,
                        layout="constrained")  # fmt: skip
        layout = figure.layout
        drawn = _panels(canvas, layout)
        for place, axes in enumerate(drawn):
            end = "" if place == 0 else str(place + 1)
            own = [t for t in figure.data if t.get("xaxis", "x") == f"x{end}"]
            _draw(axes, own, layout[f"xaxis{end}"], layout[f"yaxis{end}"], layout)
        if layout.get("showlegend"):
            handles, labels = drawn[0].get_legend_handles_labels()
            columns = max(1, min(len(labels), 80 // max(12, *map(len, labels))))
            canvas.legend(handles, labels, loc="outside lower left", ncols=columns)
        file = io.StringIO()
        canvas.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return inline(file.getvalue(), figure.name, figure.alternative)


def _panels(canvas: "Canvas", layout: Mapping[str, Any]) -> list["Axes"]:
    """One panel for each x axis: below each other, or in rows of `columns` with a title each."""
    number = sum(name.startswith("xaxis") for name in layout)
    columns = layout.get("columns", 1)
    rows = -(-number // columns)
    heights = {"height_ratios": layout.get("heights", [1] * rows)}
    alike = "columns" in layout and not layout.get("free")
    shared = alike or "heights" in layout
    grid = canvas.subplots(rows, columns, squeeze=False, sharex=shared, sharey=alike,
                           gridspec_kw=heights)  # fmt: skip
    panels = list(grid.ravel())
    for empty in panels[number:]:
        empty.set_visible(False)
    for axes, title in zip(panels, layout.get("panels", ()), strict=False):
        axes.set_title(title, fontsize=12, loc="left")
    if alike:  # a column's last panel may have nothing below it
        for axes in panels[max(0, number - columns) : number]:
            axes.tick_params(labelbottom=True)
    return panels[:number]


def stand_in(value: str) -> str:
    """What matplotlib draws instead of `var(--name)`."""
    found = re.fullmatch(r"var\(--([a-z]+)\)", value)
    return _STAND_INS[found.group(1)] if found else value


def inline(svg: str, name: str, alternative: str) -> str:
    """The SVG as an element of a page: its ids are its own, its colours the page's."""
    start = svg.index("<svg")
    # Its style rules would be the whole page's; the page has them for its figures.
    body = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg[start:], flags=re.DOTALL)
    box = re.search(r'viewBox="[^"]*"', body)
    assert box is not None
    body = body[body.index(">") + 1 :]
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = body.replace("url(#", f"url(#{name}-").replace('xlink:href="#', f'href="#{name}-')
    for colour, hexadecimal in _STAND_INS.items():
        body = body.replace(hexadecimal, f"var(--{colour})")
    label = html.escape(alternative)
    head = f'<svg role="img" aria-label="{label}" {box.group()}><title>{label}</title>'
    return head + re.sub(r"\s*\n\s*", "\n", body).strip()


def settings(name: str) -> Any:
    """matplotlib's settings for a figure of that name."""
    text, soft = _STAND_INS["text"], _STAND_INS["soft"]
    return {
        "svg.fonttype": "none", "svg.hashsalt": name, "text.parse_math": False, "font.size": 13,
        "font.family": "DejaVu Sans", "text.color": text, "axes.labelcolor": text,
        "xtick.color": soft, "ytick.color": soft, "xtick.labelcolor": text,
        "ytick.labelcolor": text, "axes.edgecolor": soft, "grid.color": _STAND_INS["line"],
        "axes.spines.top": False, "axes.spines.right": False, "axes.labelsize": 13,
        "legend.frameon": False, "legend.fontsize": 12, "axes.axisbelow": True,
    }  # fmt: skip


def _draw(
    axes: "Axes",
    traces: Sequence[Mapping[str, Any]],
    xaxis: Mapping[str, Any],
    yaxis: Mapping[str, Any],
    layout: Mapping[str, Any],
) -> None:
    labels = yaxis.get("categoryarray")
    places = {label: place for place, label in enumerate(labels or ())}
    _shapes(axes, layout)
    if "line_at" in yaxis:
        axes.axhline(yaxis["line_at"], color=stand_in("var(--text)"), lw=1.5, zorder=1)
    filled: dict[str, float] = {}
    bars = [trace for trace in traces if trace["type"] == "bar"]
    for trace in traces:
        match trace["type"]:
            case "scatter":
                _points(axes, trace, places)
            case "line":
                _line(axes, trace)
            case "band":
                axes.fill_between(trace["x"], trace["low"], trace["high"], alpha=0.15, lw=0,
                                  color=stand_in(trace["line"]["color"]))  # fmt: skip
            case "intervals":
                _intervals(axes, trace)
            case "violin":
                _violin(axes, trace, places[trace["y0"]])
            case "bar" if trace.get("orientation") == "h":
                _stacked(axes, trace, places, filled)
            case "bar":
                _grouped(axes, trace, bars.index(trace), len(bars))
    if "places" in xaxis:  # values side by side, however far apart they are
        axes.set_xticks(range(len(xaxis["places"])), xaxis["places"])
        axes.set_xlim(-0.5, len(xaxis["places"]) - 0.5)
    if labels:
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    for own, side in ((xaxis, "x"), (yaxis, "y")):
        _scale(axes, own, side)


def _scale(axes: "Axes", own: Mapping[str, Any], side: str) -> None:
    """Title, range, ticks and grid of one axis."""
    axes.set(**{f"{side}label": own["title"]["text"]})
    if "range" in own:
        axes.set(**{f"{side}lim": own["range"]})
    elif own.get("rangemode") == "tozero":
        axes.set(**{f"{side}lim": (0, None)})
    axis = axes.xaxis if side == "x" else axes.yaxis
    if own.get("type") == "category":
        return
    if "nticks" in own:
        axes.locator_params(axis="x" if side == "x" else "y", nbins=own["nticks"])
    if "tickformat" in own:
        axis.set_major_formatter(f"{{x:{own['tickformat']}}}")
    if own.get("showgrid", True):
        axes.grid(visible=True, axis="x" if side == "x" else "y")


def _shapes(axes: "Axes", layout: Mapping[str, Any]) -> None:
    for shape in layout.get("shapes", ()):
        if shape["type"] == "rect":
            axes.axvspan(shape["x0"], shape["x1"], color=stand_in(shape["fillcolor"]), lw=0,
                         zorder=0)  # fmt: skip
        else:
            line = shape["line"]
            axes.axvline(shape["x0"], color=stand_in(line["color"]), lw=line["width"], zorder=1,
                         ls=_DASHES[line.get("dash", "solid")])  # fmt: skip
    for note in layout.get("annotations", ()):
        axes.text(note["x"], 1.02, note["text"], transform=axes.transAxes, va="bottom",
                  ha=note["xanchor"], color=stand_in(note["font"]["color"]))  # fmt: skip


def _points(axes: "Axes", trace: Mapping[str, Any], places: Mapping[str, int]) -> None:
    marker = trace["marker"]
    tint, symbol = stand_in(marker["color"]), marker.get("symbol", "circle")
    known = [(i, x) for i, x in enumerate(trace["x"]) if x is not None]
    rows = [places[trace["y"][i]] for i, _ in known]
    values = [x for _, x in known]
    error = trace.get("error_x")
    reach = None
    if error is not None:
        above, below = error["array"], error.get("arrayminus", error["array"])
        reach = [[side[i] or 0.0 for i, _ in known] for side in (below, above)]
    axes.errorbar(values, rows, xerr=reach, fmt=_MARKERS[symbol], color=tint, capsize=4, lw=2,
                  ms=marker["size"] * 0.75, mew=2, label=trace["name"], clip_on=False,
                  mfc="none" if symbol.endswith("open") else tint, ls="none")  # fmt: skip


def _line(axes: "Axes", trace: Mapping[str, Any]) -> None:
    """Numbers over numbers, in their order."""
    tint = stand_in(trace["line"]["color"])
    axes.plot(trace["x"], trace["y"], trace.get("symbol", "o") + trace.get("dash", "-"), ms=4,
              lw=1.3, color=tint, label=trace["name"])  # fmt: skip


def _intervals(axes: "Axes", trace: Mapping[str, Any]) -> None:
    """Values with their intervals, each with its own mark and colour, joined by a thin line."""
    axes.plot(trace["x"], trace["y"], "-", lw=1, color=stand_in(trace["line"]["color"]), zorder=1)
    ends = zip(trace["low"], trace["high"], trace["y"], strict=True)
    reach = [(y - (y if low is None else low), (y if high is None else high) - y)
             for low, high, y in ends]  # fmt: skip
    marks = zip(trace["x"], trace["y"], reach, trace["symbols"], trace["colours"], strict=True)
    for x, y, (below, above), symbol, tint in marks:
        axes.errorbar([x], [y], yerr=[[below], [above]], fmt=symbol, color=stand_in(tint), lw=1.5,
                      capsize=3, ms=5, mfc="none" if symbol == "D" else stand_in(tint))  # fmt: skip
    if trace["name"]:
        axes.annotate(trace["name"], (trace["x"][-1], trace["y"][-1]), (6, 0), fontsize=9,
                      textcoords="offset points", va="center")  # fmt: skip


def _violin(axes: "Axes", trace: Mapping[str, Any], place: int) -> None:
    tint = stand_in(trace["line"]["color"])
    shape = axes.violinplot(trace["x"], [place], orientation="horizontal", widths=0.8,
                            showextrema=False, quantiles=[[0.25, 0.5, 0.75]])  # fmt: skip
    bodies: Any = shape["bodies"]
    for body in bodies:
        body.set(facecolor=tint, edgecolor=tint, alpha=0.4)
    shape["cquantiles"].set_color(tint)


def _stacked(
    axes: "Axes", trace: Mapping[str, Any], places: Mapping[str, int], filled: dict[str, float]
) -> None:
    """Horizontal bars, each from where the last one of its row ended."""
    starts = [filled.get(label, 0.0) for label in trace["y"]]
    axes.barh([places[label] for label in trace["y"]], trace["x"], 0.7, left=starts,
              color=stand_in(trace["marker"]["color"]), label=trace["name"])  # fmt: skip
    for label, start, length in zip(trace["y"], starts, trace["x"], strict=True):
        filled[label] = start + length


def _grouped(axes: "Axes", trace: Mapping[str, Any], place: int, number: int) -> None:
    """Upright bars of one group among several, with their numbers above."""
    width = 0.8 / number
    shift = (place - (number - 1) / 2) * width
    bars = axes.bar([i + shift for i in range(len(trace["x"]))], trace["y"], width * 0.95,
                    color=stand_in(trace["marker"]["color"]), label=trace["name"])  # fmt: skip
    axes.bar_label(bars, trace["text"], fontsize=11, padding=2)
    axes.set_xticks(range(len(trace["x"])), trace["x"])
