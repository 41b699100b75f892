"""Figures of a sweep: ratios against what varies, and latency against throughput."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nwor_bench.records.types import CellResult, NworMode
from nwor_bench.report.document import Figure
from nwor_bench.report.figures import VERDICT_MARKS, colour, legend, line_at_one, numbers, panels
from nwor_bench.report.swept_run import SweptRun, label_of_run, labels, varying
from nwor_bench.report.text import joined, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

MOST_PANELS = 6
"""Of the latency figure."""

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


Point = tuple[float, float, SweptRun, CellResult]
"""Output tokens/s, latency in ms, and the run and cell that they belong to."""

_KINDS = {
    "off x off": ("s", "text"),
    "off with SCV": ("x", "ambiguous"),
    "control": ("^", "ineffective"),
    "stage": ("o", "faster"),
}
"""Mark and colour of each kind of cell."""


def tradeoff_figure(runs: Sequence[SweptRun]) -> Figure | None:
    """Latency against throughput, a panel for each pair and scenario; None for one run."""
    points = _tradeoffs(runs)
    if len({run.number for *_, run, _ in points}) < 2:
        return None
    groups: dict[str, list[Point]] = {}
    for point in points:
        place = point[2].place
        groups.setdefault(f"{place.get('pair')}, {place.get('scenario')}", []).append(point)
    name = "TPOT p50, ms" if _latency(runs) == "tpot_ms_p50" else "window, ms"
    return _tradeoff_figure(dict(list(groups.items())[:MOST_PANELS]), name)


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in both throughput and latency, by rising throughput."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (-p[0], p[1])):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best[::-1]


def _tradeoffs(runs: Sequence[SweptRun]) -> list[Point]:
    name = _latency(runs)
    return [
        (cell.tokens_per_s, latency, run, cell)
        for run in runs
        for cell in run.cells
        if cell.arm is None and cell.tokens_per_s is not None
        if (latency := getattr(cell, name)) is not None
    ]


def _latency(runs: Sequence[SweptRun]) -> str:
    """TPOT, or window time if a run has no request metrics."""
    timed = [c for run in runs for c in run.cells if c.tokens_per_s is not None]
    known = timed and all(c.tpot_ms_p50 is not None for c in timed)
    return "tpot_ms_p50" if known else "window_ms_mean"


def _tradeoff_figure(groups: dict[str, list[Point]], latency: str) -> Figure:
    columns = min(2, len(groups))
    fronts = {name: front(own) for name, own in groups.items()}

    def draw(canvas: "Canvas") -> None:
        found = panels(canvas, list(groups), columns, shared=False)
        for place, (axes, (name, points)) in enumerate(zip(found, groups.items(), strict=True)):
            axes.plot([p[0] for p in fronts[name]], [p[1] for p in fronts[name]], "--", lw=1.3,
                      color=colour("soft"), label="not beaten in both")  # fmt: skip
            for kind, (marker, tint) in _KINDS.items():
                own = [point for point in points if _kind(point[3]) == kind]
                if own:
                    axes.plot([p[0] for p in own], [p[1] for p in own], marker, ms=4,
                              color=colour(tint), label=kind)  # fmt: skip
            below = place + columns >= len(groups)
            numbers(axes, "x", "output tokens/s" if below else "")
            numbers(axes, "y", "" if place % columns else latency)
        legend(canvas, found[0])

    words = "; ".join(
        f"{name}: not beaten are "
        + ", ".join(f"run {run.number} {cell.label} ({tokens:,.0f} tokens/s, {ms:.2f} ms)"
                    for tokens, ms, run, cell in own)
        for name, own in fronts.items()
    )  # fmt: skip
    return Figure(
        name="tradeoff",
        caption=(
            "Latency against throughput, one mark a run and cell: right and down is better. The "
            "dashed line joins the marks that no other beats in both. Whether two marks of one run "
            "really differ, the ratios say, not this figure."
        ),
        alternative=f"{latency} against output tokens/s. {words}.",
        draw=draw,
        height=250 * -(-len(groups) // columns) + 70,
    )


def _kind(cell: CellResult) -> str:
    if cell.nwor_mode != NworMode.OFF:
        return str(cell.nwor_mode)
    return "off x off" if cell.cell.is_baseline else "off with SCV"
