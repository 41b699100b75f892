"""The figure of the answer: all cells' ratios with their intervals on one axis."""

from collections.abc import Sequence
from typing import Any

from nwor_bench.analysis.aggregate import noise_floor
from nwor_bench.records.types import CellResult, Verdict
from nwor_bench.report.document import Figure
from nwor_bench.report.plots import axis, categories, colour, layout
from nwor_bench.report.text import compared_time, label, ratio

_SYMBOLS = {
    str(Verdict.FASTER): "triangle-left",
    str(Verdict.SLOWER): "triangle-right",
    str(Verdict.SAME): "circle",
    str(Verdict.AMBIGUOUS): "diamond-open",
}
"""So that a verdict can be told without its colour."""

_ROW = 34
_REST = 108
"""CSS pixels of a cell's row, and of all else."""


def interval_figure(cells: Sequence[CellResult], margin: float) -> Figure | None:
    """Ratios to off x off, the noise band around 1 and the margin of SAME; None without ratios."""
    shown = [cell for cell in cells if cell.ratio_to_off is not None]
    if not shown:
        return None
    floor = (noise_floor(cells) or {}).get("floor")
    time = compared_time(cells)
    bounds = _range(shown, margin, floor)
    return Figure(
        name="intervals",
        caption=_caption(time, margin, floor),
        alternative=f"{time[0].upper()}{time[1:]} over that of off x off. {_in_words(shown)}",
        data=tuple(_trace(name, shown) for name in _SYMBOLS if _having(name, shown)),
        layout=layout(
            axis(
                f"{time} / that of off x off",
                range=bounds,
                showgrid=False,
                tickformat=".3f",
                nticks=5,
                ticks="outside",
            ),
            categories([label(cell) for cell in shown]),
            shapes=_shapes(margin, floor),
            annotations=[_side("← less time", 0, "left"), _side("more time →", 1, "right")],
            showlegend=True,
        ),
        height=_ROW * len(shown) + _REST,
    )


def _having(verdict: str, cells: Sequence[CellResult]) -> list[CellResult]:
    return [cell for cell in cells if cell.verdict == verdict]


def _trace(verdict: str, cells: Sequence[CellResult]) -> dict[str, Any]:
    own = _having(verdict, cells)
    ratios = [cell.ratio_to_off for cell in own]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": verdict,
        "x": ratios,
        "y": [label(cell) for cell in own],
        "text": [ratio(cell) for cell in own],
        "marker": {"symbol": _SYMBOLS[verdict], "size": 11, "color": colour(verdict.lower())},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [_reach(cell, cell.ratio_ci_high) for cell in own],
            "arrayminus": [_reach(cell, cell.ratio_ci_low) for cell in own],
            "color": colour(verdict.lower()),
            "thickness": 2,
            "width": 5,
        },
    }


def _reach(cell: CellResult, end: float | None) -> float | None:
    """How far an end of the interval is from the ratio; None where there is no interval."""
    return None if end is None or cell.ratio_to_off is None else abs(end - cell.ratio_to_off)


def _shapes(margin: float, floor: float | None) -> list[dict[str, Any]]:
    """The noise band, the ends of the margin, and the line at 1."""
    upright = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
    shapes = [] if floor is None else [
        {"type": "rect", "yref": "paper", "y0": 0, "y1": 1, "x0": 1 - floor, "x1": 1 + floor,
         "fillcolor": colour("band"), "line": {"width": 0}, "layer": "below"}
    ]  # fmt: skip
    for place, dash, tint in (
        (1 - margin, "dot", "soft"), (1 + margin, "dot", "soft"), (1, "solid", "text")
    ):  # fmt: skip
        line = {"color": colour(tint), "dash": dash, "width": 1.5}
        shapes.append({**upright, "x0": place, "x1": place, "line": line})
    return shapes


def _side(text: str, place: int, anchor: str) -> dict[str, Any]:
    return {
        "text": text, "x": place, "xref": "paper", "xanchor": anchor, "y": 1, "yref": "paper",
        "yanchor": "bottom", "showarrow": False, "font": {"color": colour("soft")},
    }  # fmt: skip


def _range(cells: Sequence[CellResult], margin: float, floor: float | None) -> list[float]:
    """The axis holds every interval, the margin and the noise band, and a little room."""
    reach = max(margin, floor or 0.0)
    values = [1 - reach, 1 + reach]
    for cell in cells:
        ends = (cell.ratio_to_off, cell.ratio_ci_low, cell.ratio_ci_high)
        values += [value for value in ends if value is not None]
    room = 0.05 * (max(values) - min(values))
    return [max(0.0, min(values) - room), max(values) + room]


def _caption(time: str, margin: float, floor: float | None) -> str:
    band = (
        "There is no noise band: off x off was not measured against itself. "
        if floor is None
        else f"Shaded: the noise band, {100 * floor:.2f} % on each side, as far as off x off "
        "against itself (A/A) reached; what lies within it may be noise. "
    )
    return (
        f"Each mark is a cell's {time} over that of off x off, the bar its own 95 % interval. "
        f"Left of the line at 1.000 is faster. {band}Dotted: {100 * margin:g} % on each side; "
        "an interval between the dotted lines is SAME."
    )


def _in_words(cells: Sequence[CellResult]) -> str:
    return "; ".join(f"{label(c)} {ratio(c)}, {c.verdict}" for c in cells) + "."
