"""The section on how the times of single windows are spread."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nwor_bench.analysis.cell_data import CellData, gather_cells
from nwor_bench.records.store import RunData
from nwor_bench.records.types import Cell, CellResult, NworMode, Verdict
from nwor_bench.report.document import Block, Figure, Paragraph, Section, table
from nwor_bench.report.plots import axis, categories, colour, layout
from nwor_bench.report.text import count, decimal, joined, label

TITLE = "Window times"

_TAIL = 0.005
"""Share of the windows at each end that the figure leaves to the table."""

_POINTS = 201
_ROW = 58
_REST = 60

_WITHOUT_TIME = (Verdict.INVALID, Verdict.INEFFECTIVE)

Times = NDArray[np.float64]


def window_time_section(run: RunData, cells: Sequence[CellResult]) -> Section:
    """A figure of all timed windows' times with a table; a line where there is none."""
    idle = {cell.cell for cell in cells if cell.verdict in _WITHOUT_TIME}
    times = {
        own.cell: found
        for own in gather_cells(run)
        if own.cell not in idle and len(found := _times(own)) > 1
    }
    if not times:
        return Section(TITLE, (Paragraph("No window with a time that counts was measured."),))
    differences = _differences(run, times)
    blocks: list[Block] = [
        _figure(differences)
        if differences
        else Paragraph("No window has an equal partner in off x off, so none is drawn."),
        _table(times),
    ]
    left_out = [label(cell) for cell in cells if cell.cell in idle]
    if left_out:
        blocks.append(Paragraph(f"Left out, because their times do not count: {joined(left_out)}."))
    return Section(TITLE, tuple(blocks))


def _times(cell: CellData) -> Times:
    return np.array([window.wall_ms for window in cell.windows if window.wall_ms is not None])


def _differences(run: RunData, times: dict[Cell, Times]) -> dict[Cell, Times]:
    """Per cent by which each window took longer than the same window of off x off."""
    keyed = {own.cell: _by_place(own) for own in gather_cells(run) if own.cell in times}
    baseline = next((own for cell, own in keyed.items() if cell.is_baseline), {})
    found = {
        cell: np.array([100 * (own[key] / baseline[key] - 1) for key in own.keys() & baseline])
        for cell, own in keyed.items()
        if not cell.is_baseline
    }
    return {cell: own for cell, own in found.items() if len(own) > 1}


def _by_place(cell: CellData) -> dict[tuple[int, int, int, int], float]:
    """Window times by block and place in it, among windows of equal work."""
    return {
        (window.block, window.window, window.num_reqs, window.draft_tokens): window.wall_ms
        for window in cell.windows
        if window.wall_ms
    }


def _figure(differences: dict[Cell, Times]) -> Figure:
    labels = [cell.label for cell in differences]
    medians = "; ".join(
        f"{cell.label} median {float(np.median(own)):+.2f} %" for cell, own in differences.items()
    )
    line = {"type": "line", "x0": 0, "line": {"color": colour("text"), "width": 1.5}}
    return Figure(
        name="window-times",
        caption=(
            "How much longer each window took than the same window of off x off, in per cent: "
            "wider where more of them lie, with the quarters and the median inside. Left of 0 is "
            f"faster. The {100 * _TAIL:g} % at each end are not drawn; the table has the times."
        ),
        alternative=f"Distribution of window times less those of off x off. {medians}.",
        data=tuple(_violin(cell, own) for cell, own in differences.items()),
        layout=layout(
            axis("window time less that of off x off, %"), categories(labels), shapes=[line]
        ),
        height=_ROW * len(differences) + _REST,
    )


def _violin(cell: Cell, differences: Times) -> dict[str, Any]:
    """Drawn from quantiles: the shape of many windows in few numbers."""
    quantiles = np.quantile(differences, np.linspace(_TAIL, 1 - _TAIL, _POINTS))
    tint = colour("faster" if cell.nwor_mode is NworMode.STAGE else "ambiguous")
    return {
        "type": "violin",
        "name": cell.label,
        "x": [float(f"{value:.5g}") for value in quantiles],
        "y0": cell.label,
        "line": {"color": tint},
    }


def _table(times: dict[Cell, Times]) -> Block:
    points = {"Least": 0.0, "1 %": 0.01, "25 %": 0.25, "Median": 0.5, "75 %": 0.75, "99 %": 0.99,
              "Most": 1.0}  # fmt: skip
    rows = [
        [cell.label, count(len(own)),
         *(decimal(float(value), 2) for value in np.quantile(own, list(points.values())))]
        for cell, own in times.items()
    ]  # fmt: skip
    caption = "Milliseconds of a window: that many per cent of the cell's windows took less"
    return table(["Cell", "Windows", *points], rows, caption=caption)
