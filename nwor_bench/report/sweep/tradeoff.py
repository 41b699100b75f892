"""The figure of a sweep's trade-off: latency of a token against output tokens a second."""

from collections.abc import Sequence
from typing import Any

from nwor_bench.records.types import CellResult, NworMode
from nwor_bench.report.document import Block, Figure, Table, table
from nwor_bench.report.plots import axis, colour
from nwor_bench.report.sweep.swept_run import SweptRun, label_of_run, varying
from nwor_bench.report.text import decimal

COLUMNS = 2
MOST_PANELS = 6
_ROW = 250
_REST = 70

Point = tuple[float, float, SweptRun, CellResult]
"""Output tokens/s, latency in ms, and what they were measured of."""


def tradeoff_blocks(runs: Sequence[SweptRun]) -> list[Block]:
    """A figure with a panel for each pair and scenario, and its table; nothing for one run."""
    points = _points(runs)
    if len({run.number for *_, run, _ in points}) < 2:
        return []
    groups: dict[str, list[Point]] = {}
    for point in points:
        place = point[2].place
        groups.setdefault(f"{place.get('pair')}, {place.get('scenario')}", []).append(point)
    fronts = {name: front(own) for name, own in groups.items()}
    shown = dict(list(groups.items())[:MOST_PANELS])
    return [_figure(shown, fronts, _latency_name(runs)), _table(runs, groups, fronts)]


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in both throughput and latency, by rising throughput."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (-p[0], p[1])):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best[::-1]


def _points(runs: Sequence[SweptRun]) -> list[Point]:
    name = _latency(runs)
    found = []
    for run in runs:
        for cell in run.cells:
            latency = getattr(cell, name)
            if cell.arm is None and cell.tokens_per_s is not None and latency is not None:
                found.append((cell.tokens_per_s, latency, run, cell))
    return found


def _latency(runs: Sequence[SweptRun]) -> str:
    """TPOT, or window time where a run has no request metrics."""
    timed = [c for run in runs for c in run.cells if c.tokens_per_s is not None]
    known = timed and all(c.tpot_ms_p50 is not None for c in timed)
    return "tpot_ms_p50" if known else "window_ms_mean"


def _latency_name(runs: Sequence[SweptRun]) -> str:
    return "TPOT p50, ms" if _latency(runs) == "tpot_ms_p50" else "window, ms"


def _figure(groups: dict[str, list[Point]], fronts: dict[str, list[Point]], latency: str) -> Figure:
    data: list[dict[str, Any]] = []
    axes: dict[str, Any] = {}
    for panel, (name, points) in enumerate(groups.items()):
        end = "" if panel == 0 else str(panel + 1)
        below = panel + COLUMNS >= len(groups)
        axes[f"xaxis{end}"] = axis("output tokens/s" if below else "")
        axes[f"yaxis{end}"] = axis(latency if panel % COLUMNS == 0 else "")
        best = fronts[name]
        data.append({
            "type": "line", "xaxis": f"x{end}", "name": "not beaten in both",
            "x": [p[0] for p in best], "y": [p[1] for p in best],
            "line": {"color": colour("soft")}, "symbol": "", "dash": "--",
        })  # fmt: skip
        present = {_kind(cell) for *_, cell in points}
        data += [_cloud(kind, points, f"x{end}") for kind in _KINDS if kind in present]
    columns = min(COLUMNS, len(groups))
    return Figure(
        name="tradeoff",
        caption=(
            "Latency against throughput, one mark a run and cell: right and down is better. The "
            "dashed line joins what no other beats in both. Marks of one run lie close together: "
            "whether their difference is real is said by the ratios, not by this figure."
        ),
        alternative=f"{latency} against output tokens/s. {_in_words(fronts)}",
        data=tuple(data),
        layout={"columns": columns, "panels": list(groups), "showlegend": True,
                "free": True, **axes},
        height=_ROW * -(-len(groups) // columns) + _REST,
    )  # fmt: skip


_KINDS = {
    "off x off": ("s", "text"),
    "off with SCV": ("x", "ambiguous"),
    "control": ("^", "ineffective"),
    "stage": ("o", "faster"),
}
"""Mark and colour of each kind of cell."""


def _kind(cell: CellResult) -> str:
    if cell.nwor_mode != NworMode.OFF:
        return str(cell.nwor_mode)
    return "off x off" if cell.cell.is_baseline else "off with SCV"


def _cloud(kind: str, points: Sequence[Point], xaxis: str) -> dict[str, Any]:
    symbol, tint = _KINDS[kind]
    own = [point for point in points if _kind(point[3]) == kind]
    return {
        "type": "line", "xaxis": xaxis, "name": kind, "x": [p[0] for p in own],
        "y": [p[1] for p in own], "line": {"color": colour(tint)}, "symbol": symbol, "dash": "",
    }  # fmt: skip


def _table(
    runs: Sequence[SweptRun], groups: dict[str, list[Point]], fronts: dict[str, list[Point]]
) -> Table:
    axes = varying(runs)
    best = {id(point) for own in fronts.values() for point in own}
    rows = [
        [str(run.number), label_of_run(run, axes), cell.label, decimal(tokens), decimal(ms, 2),
         "yes" if id(point) in best else ""]
        for own in groups.values()
        for point in own
        for tokens, ms, run, cell in [point]
    ]  # fmt: skip
    heads = ["Run", "Of", "Cell", "Output tokens/s", _latency_name(runs), "Not beaten in both"]
    caption = "Latency and throughput of each run and cell"
    return table(heads, rows, numbers_from=3, caption=caption)


def _in_words(fronts: dict[str, list[Point]]) -> str:
    parts = [
        f"{name}: not beaten are "
        + ", ".join(f"run {run.number} {cell.label} ({tokens:,.0f} tokens/s, {ms:.2f} ms)"
                    for tokens, ms, run, cell in own)
        for name, own in fronts.items()
    ]  # fmt: skip
    return "; ".join(parts) + "."
