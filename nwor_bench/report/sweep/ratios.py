"""Figures of a sweep: each cell's ratio against requests, acceptance and data type."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nwor_bench.records.types import CellResult
from nwor_bench.report.document import Figure
from nwor_bench.report.plots import axis, colour
from nwor_bench.report.sweep.swept_run import SweptRun, label_of_run, labels, varying
from nwor_bench.report.text import joined, ratio

COLUMNS = 3
_ROW = 190
_REST = 60
_NAMED = 4
"""Lines that can carry a name each without covering another."""

_SYMBOLS = {"FASTER": "<", "SLOWER": ">", "SAME": "o"}
"""So that a verdict can be told without its colour."""


@dataclass(frozen=True)
class Variable:
    """What a figure has across."""

    name: str
    title: str
    value: Callable[[SweptRun, CellResult], Any]
    axes: tuple[str, ...]
    """Axes of the sweep that change it: runs that differ in these alone make one line."""

    in_order: bool = False
    """Its values stand side by side, however far apart they are."""


VARIABLES = (
    Variable("requests", "requests", lambda run, cell: run.place.get("requests"), ("requests",),
             in_order=True),
    Variable("acceptance", "acceptance, %", lambda run, cell: _percent(cell.acceptance_rate),
             ("acceptance_length", "temperature")),
    Variable("data-type", "data type", lambda run, cell: run.data_types, ("dtype", "cache_dtype"),
             in_order=True),
)  # fmt: skip


def ratio_figures(runs: Sequence[SweptRun]) -> list[Figure]:
    """A figure for each variable in which the runs differ, a panel for each cell."""
    return [_figure(runs, variable) for variable in VARIABLES if _differs(runs, variable)]


def _differs(runs: Sequence[SweptRun], variable: Variable) -> bool:
    if not any(name in varying(runs) for name in variable.axes):
        return False
    values = {variable.value(run, cell) for run in runs for cell in run.compared}
    return len(values - {None}) > 1


def _figure(runs: Sequence[SweptRun], variable: Variable) -> Figure:
    cells = labels(runs)
    places = _places(runs, variable)
    series = _series(runs, variable)
    data = [
        trace
        for panel, label in enumerate(cells)
        for line, (name, own) in enumerate(series.items())
        for trace in _line(own, label, variable, places, panel, name, line, len(series))
    ]
    axes: dict[str, Any] = {}
    for panel in range(len(cells)):
        end = "" if panel == 0 else str(panel + 1)
        below = panel + COLUMNS >= len(cells)
        extra = {} if places is None else {"places": [str(value) for value in places]}
        axes[f"xaxis{end}"] = axis(variable.title if below else "", **extra)
        left = panel % COLUMNS == 0
        axes[f"yaxis{end}"] = axis("ratio to off x off" if left else "", line_at=1)
    rows = -(-len(cells) // COLUMNS)
    named = " A line joins runs that differ in nothing else" + (
        "; its name says what they share." if 1 < len(series) <= _NAMED else "."
    )
    return Figure(
        name=f"ratio-by-{variable.name}",
        caption=(
            f"Ratio to off x off against {variable.title.split(',')[0]}, with each cell's own 95 % "
            f"interval. Below 1 is faster; triangles are FASTER (left) and SLOWER (right), discs "
            f"SAME, diamonds AMBIGUOUS.{named}"
        ),
        alternative=f"Ratio against {variable.title.split(',')[0]}. {_in_words(runs, variable)}",
        data=tuple(data),
        layout={"columns": min(COLUMNS, len(cells)), "panels": cells, "showlegend": False, **axes},
        height=_ROW * rows + _REST,
    )


def _places(runs: Sequence[SweptRun], variable: Variable) -> list[Any] | None:
    """Values that stand side by side, in their order; None on a scale of numbers."""
    if not variable.in_order:
        return None
    found = {variable.value(run, cell) for run in runs for cell in run.compared} - {None}
    return sorted(found)


def _series(runs: Sequence[SweptRun], variable: Variable) -> dict[str, list[SweptRun]]:
    """Runs that differ in nothing but the variable, by what they share."""
    others = [name for name in varying(runs) if name not in variable.axes]
    found: dict[str, list[SweptRun]] = {}
    for run in runs:
        name = label_of_run(run, others) if others else ""
        found.setdefault(name, []).append(run)
    return found


def _line(
    runs: Sequence[SweptRun], label: str, variable: Variable, places: list[Any] | None,
    panel: int, name: str, line: int, lines: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """One point a run, joined in the order of the variable."""
    points = []
    for run in runs:
        cell = run.cell(label)
        if cell is None or cell.ratio_to_off is None:
            continue
        value = variable.value(run, cell)
        if value is not None:
            # Lines stand a little apart where their values are the same.
            x = value if places is None else places.index(value) + 0.08 * (line - (lines - 1) / 2)
            points.append((x, cell))
    if not points:
        return []
    points.sort(key=lambda point: point[0])
    end = "" if panel == 0 else str(panel + 1)
    return [{
        "type": "intervals", "xaxis": f"x{end}", "name": name if 1 < lines <= _NAMED else "",
        "x": [x for x, _ in points],
        "y": [cell.ratio_to_off for _, cell in points],
        "low": [cell.ratio_ci_low for _, cell in points],
        "high": [cell.ratio_ci_high for _, cell in points],
        "symbols": [_SYMBOLS.get(cell.verdict, "D") for _, cell in points],
        "colours": [colour(cell.verdict.lower()) for _, cell in points],
        "line": {"color": colour("soft")},
    }]  # fmt: skip


def _in_words(runs: Sequence[SweptRun], variable: Variable) -> str:
    parts = []
    for label in labels(runs):
        found = [
            f"{variable.value(run, cell)}: {ratio(cell)}"
            for run in runs
            if (cell := run.cell(label)) is not None and cell.ratio_to_off is not None
        ]
        parts.append(f"{label} at {joined(found)}")
    return "; ".join(parts) + "."


def _percent(rate: float | None) -> float | None:
    return None if rate is None else round(100 * rate, 2)
