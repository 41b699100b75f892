"""Figures as SVG, drawn by matplotlib: text stays text, colours are the page's own.

matplotlib draws a stand-in for each colour of the style sheet; in the SVG these become
`var(--name)`, so light and dark need no second figure.
"""

import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nwor_bench.report.document import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

COLOURS = ("text", "soft", "line", "head", "band", "same", "faster", "slower", "ambiguous",
           "ineffective", "invalid")  # fmt: skip
_STAND_INS = {name: f"#0f1e{place:02x}" for place, name in enumerate(COLOURS, 16)}

VERDICT_MARKS = {"FASTER": "<", "SLOWER": ">", "SAME": "o", "AMBIGUOUS": "D"}
"""matplotlib's marker of each verdict: readable without its colour."""

ROW, REST = 34, 108
"""CSS pixels of a row of a forest plot, and of everything else in it."""

_WIDTH, _DOTS = 720, 72


@dataclass(frozen=True)
class Mark:
    """One value of a forest plot with its interval."""

    label: str
    """Its row."""

    value: float
    low: float | None
    high: float | None

    name: str
    """Its entry in the legend; marks of one name share marker and colour."""

    marker: str
    """matplotlib's; "D" is drawn hollow."""

    tint: str
    """A name of `COLOURS`."""


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
        size = (_WIDTH / _DOTS, figure.height / _DOTS)
        canvas = Canvas(figsize=size, dpi=_DOTS, layout="constrained")
        figure.draw(canvas)
    return canvas


def legend(canvas: "Canvas", axes: "Axes") -> None:
    """The entries of these axes, below the figure in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, min(len(labels), 80 // max(12, *map(len, labels))))
    canvas.legend(handles, labels, loc="outside lower left", ncols=columns)


def category_rows(axes: "Axes", labels: Sequence[str]) -> None:
    """One row a label, the first at the top."""
    axes.set_yticks(range(len(labels)), list(labels))
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def forest(axes: "Axes", labels: Sequence[str], marks: Sequence[Mark]) -> None:
    """Values with their intervals, one row a label."""
    category_rows(axes, labels)
    places = {label: place for place, label in enumerate(labels)}
    for name in dict.fromkeys(mark.name for mark in marks):
        own = [mark for mark in marks if mark.name == name]
        tint, marker = colour(own[0].tint), own[0].marker
        axes.errorbar(
            [m.value for m in own], [places[m.label] for m in own], xerr=_reach(own), label=name,
            fmt=marker, color=tint, mfc="none" if marker == "D" else tint, ms=8, mew=2, lw=2,
            capsize=4, ls="none", clip_on=False,
        )  # fmt: skip


def ratio_axis(axes: "Axes", title: str, floor: float | None, margin: float) -> None:
    """An x axis of ratios: the noise band, the margin on both sides, and the line at 1."""
    if floor:
        axes.axvspan(1 - floor, 1 + floor, color=colour("band"), lw=0, zorder=0)
    for place, style, tint in (
        (1 - margin, ":", "soft"), (1 + margin, ":", "soft"), (1, "-", "text")
    ):  # fmt: skip
        axes.axvline(place, color=colour(tint), lw=1.5, ls=style, zorder=1)
    axes.set_xlabel(title)
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter("{x:.3f}")


def _reach(marks: Sequence[Mark]) -> list[list[float]]:
    """How far each interval reaches below and above its value."""
    below = [m.value - m.low if m.low is not None else 0.0 for m in marks]
    above = [m.high - m.value if m.high is not None else 0.0 for m in marks]
    return [below, above]


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
