"""The figure of a comparison: each cell's change with its interval."""

from typing import Any

from nwor_bench.analysis.comparing.change_verdicts import CellChange, ChangeVerdict
from nwor_bench.analysis.comparing.compare import Comparison
from nwor_bench.analysis.comparing.decide_by import DecideBy
from nwor_bench.report.comparison.text import change_text, deciding, name_of
from nwor_bench.report.document import Figure
from nwor_bench.report.plots import axis, categories, colour, layout

_ROW = 34
_REST = 108

_MARKS = {
    ChangeVerdict.REGRESSION: ("triangle-right", "slower"),
    ChangeVerdict.IMPROVEMENT: ("triangle-left", "faster"),
    ChangeVerdict.SAME: ("circle", "same"),
    ChangeVerdict.AMBIGUOUS: ("diamond-open", "ambiguous"),
    ChangeVerdict.NOT_COMPARED: ("line-ns-open", "soft"),
}
"""Mark and colour of each verdict, so that it can be told without the colour."""


def change_figure(comparison: Comparison) -> Figure | None:
    """The deciding changes on one axis, with threshold and noise; None without any."""
    shown = [(cell, change) for cell in comparison.cells if (change := deciding(cell, comparison))]
    if not shown:
        return None
    names = [name_of(cell, comparison) for cell, _ in shown]
    what = "ratio to off x off" if comparison.decide_by is DecideBy.RATIO else "time"
    traces = [_trace(outcome, comparison) for outcome in _MARKS if _of(outcome, comparison)]
    words = "; ".join(
        f"{name} {change_text(change)}, {cell.outcome}"
        for name, (cell, change) in zip(names, shown, strict=True)
    )
    return Figure(
        name="changes",
        caption=(
            f"Each cell's {what} in NEW over that in BASE, with its 95 % interval: right of 1 is "
            "worse. Dotted: the threshold. Shaded: as far as the A/A arm changed by chance alone."
        ),
        alternative=f"Change of the {what} from BASE to NEW. {words}.",
        data=tuple(traces),
        layout=layout(
            axis(f"{what}, NEW / BASE", tickformat=".3f", nticks=5, showgrid=False),
            categories(names),
            shapes=_shapes(comparison),
            showlegend=True,
        ),
        height=_ROW * len(shown) + _REST,
    )


def _of(outcome: ChangeVerdict, comparison: Comparison) -> list[CellChange]:
    return [cell for cell in comparison.having(outcome) if deciding(cell, comparison)]


def _trace(outcome: ChangeVerdict, comparison: Comparison) -> dict[str, Any]:
    own = _of(outcome, comparison)
    changes = [change for cell in own if (change := deciding(cell, comparison))]
    symbol, tint = _MARKS[outcome]
    ends = [
        (0.0, 0.0)
        if change.interval is None
        else (change.ratio - change.interval.low, change.interval.high - change.ratio)
        for change in changes
    ]
    return {
        "type": "scatter",
        "name": str(outcome),
        "x": [change.ratio for change in changes],
        "y": [name_of(cell, comparison) for cell in own],
        "marker": {"symbol": symbol, "size": 11, "color": colour(tint)},
        "error_x": {
            "array": [above for _, above in ends],
            "arrayminus": [below for below, _ in ends],
        },
    }


def _shapes(comparison: Comparison) -> list[dict[str, Any]]:
    floor, threshold = comparison.noise_floor, comparison.threshold
    shapes: list[dict[str, Any]] = []
    if floor:
        shapes.append({"type": "rect", "x0": 1 - floor, "x1": 1 + floor,
                       "fillcolor": colour("band")})  # fmt: skip
    for place, dash, tint in (
        (1 - threshold, "dot", "soft"), (1 + threshold, "dot", "soft"), (1, "solid", "text")
    ):  # fmt: skip
        line = {"color": colour(tint), "dash": dash, "width": 1.5}
        shapes.append({"type": "line", "x0": place, "line": line})
    return shapes
