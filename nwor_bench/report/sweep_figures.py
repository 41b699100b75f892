"""Figures of a sweep: ratios against what varies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nwor_bench.records.types import CellResult
from nwor_bench.report.document import Figure
from nwor_bench.report.figures import VERDICT_MARKS, colour, line_at_one, numbers, panels
from nwor_bench.report.swept_run import SweptRun, label_of_run, labels, varying
from nwor_bench.report.text import joined, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

_NAMED = 4
"""Lines that can carry a name each without covering another."""


@dataclass(frozen=True)
class Variable:
    """The x axis of a ratio figure."""

    name: str
    title: str
    value: Callable[[SweptRun, CellResult], Any]
    axes: tuple[str, ...]
    """Axes of the sweep that change it: runs that differ only in these make one line."""

    in_order: bool = False
    """Its values stand side by side, however far apart they are."""


def _acceptance(run: SweptRun, cell: CellResult) -> float | None:
    return None if cell.acceptance_rate is None else round(100 * cell.acceptance_rate, 2)


VARIABLES = (
    Variable("requests", "requests", lambda run, cell: run.place.get("requests"), ("requests",),
             in_order=True),
    Variable("acceptance", "acceptance, %", _acceptance, ("acceptance_length", "temperature")),
    Variable("data-type", "data type", lambda run, cell: run.data_types, ("dtype", "cache_dtype"),
             in_order=True),
)  # fmt: skip


def ratio_figures(runs: Sequence[SweptRun]) -> list[Figure]:
    """A figure for each variable in which the runs differ, a panel for each cell."""
    return [_ratio_figure(runs, variable) for variable in VARIABLES if _differs(runs, variable)]


def _differs(runs: Sequence[SweptRun], variable: Variable) -> bool:
    if not any(name in varying(runs) for name in variable.axes):
        return False
    values = {variable.value(run, cell) for run in runs for cell in run.compared}
    return len(values - {None}) > 1


def _ratio_figure(runs: Sequence[SweptRun], variable: Variable) -> Figure:
    cells, series = labels(runs), _series(runs, variable)
    columns = min(3, len(cells))
    found = {variable.value(run, cell) for run in runs for cell in run.compared} - {None}
    places = sorted(found) if variable.in_order else None

    def draw(canvas: "Canvas") -> None:
        for place, axes in enumerate(panels(canvas, cells, columns, shared=True)):
            line_at_one(axes)
            for line, (name, own) in enumerate(series.items()):
                # Lines with equal values are drawn a little apart.
                shift = 0.08 * (line - (len(series) - 1) / 2)
                points = _points(own, cells[place], variable, places, shift)
                _draw_line(axes, points, name if 1 < len(series) <= _NAMED else "")
            if places is not None:
                axes.set_xticks(range(len(places)), [str(value) for value in places])
                axes.set_xlim(-0.5, len(places) - 0.5)
            below = place + columns >= len(cells)
            numbers(axes, "x", variable.title if below else "")
            numbers(axes, "y", "" if place % columns else "ratio to off x off")

    named = " A line joins runs that differ in nothing else" + (
        "; its name says what they share." if 1 < len(series) <= _NAMED else "."
    )
    what = variable.title.split(",")[0]
    return Figure(
        name=f"ratio-by-{variable.name}",
        caption=(
            f"Ratio to off x off against {what}, with each cell's own 95 % interval. Below 1 is "
            "faster; triangles are FASTER (left) and SLOWER (right), discs SAME, diamonds "
            f"AMBIGUOUS.{named}"
        ),
        alternative=f"Ratio against {what}. {_ratios_in_words(runs, variable)}",
        draw=draw,
        height=190 * -(-len(cells) // columns) + 60,
    )


def _series(runs: Sequence[SweptRun], variable: Variable) -> dict[str, list[SweptRun]]:
    """Runs that differ in nothing but the variable, by what they share."""
    others = [name for name in varying(runs) if name not in variable.axes]
    found: dict[str, list[SweptRun]] = {}
    for run in runs:
        found.setdefault(label_of_run(run, others) if others else "", []).append(run)
    return found


def _points(
    runs: Sequence[SweptRun], label: str, variable: Variable, places: list[Any] | None,
    shift: float,
) -> list[tuple[float, CellResult]]:  # fmt: skip
    """Each run's x and cell, in the order of the variable."""
    points = []
    for run in runs:
        cell = run.cell(label)
        value = None if cell is None else variable.value(run, cell)
        if cell is not None and cell.ratio_to_off is not None and value is not None:
            points.append((value if places is None else places.index(value) + shift, cell))
    return sorted(points, key=lambda point: point[0])


def _draw_line(axes: "Axes", points: Sequence[tuple[float, CellResult]], name: str) -> None:
    """One point a run with its interval, joined by a thin line."""
    xs = [x for x, _ in points]
    ys = [cell.ratio_to_off or 0.0 for _, cell in points]
    axes.plot(xs, ys, "-", lw=1, color=colour("soft"), zorder=1)
    for x, y, cell in zip(xs, ys, [cell for _, cell in points], strict=True):
        low, high = cell.ratio_ci_low, cell.ratio_ci_high
        reach = [[0.0 if low is None else y - low], [0.0 if high is None else high - y]]
        marker, tint = VERDICT_MARKS.get(cell.verdict, "D"), colour(cell.verdict.lower())
        axes.errorbar([x], [y], yerr=reach, fmt=marker, color=tint, lw=1.5, capsize=3, ms=5,
                      mfc="none" if marker == "D" else tint)  # fmt: skip
    if name and points:
        axes.annotate(name, (xs[-1], ys[-1]), (6, 0), fontsize=9, textcoords="offset points",
                      va="center")  # fmt: skip


def _ratios_in_words(runs: Sequence[SweptRun], variable: Variable) -> str:
    parts = []
    for label in labels(runs):
        found = [
            f"{variable.value(run, cell)}: {ratio(cell)}"
            for run in runs
            if (cell := run.cell(label)) is not None and cell.ratio_to_off is not None
        ]
        parts.append(f"{label} at {joined(found)}")
    return "; ".join(parts) + "."
