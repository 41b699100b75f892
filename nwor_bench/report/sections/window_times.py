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
    blocks: list[Block] = [_figure(times), _table(times)]
    left_out = [label(cell) for cell in cells if cell.cell in idle]
    if left_out:
        blocks.append(Paragraph(f"Left out, because their times do not count: {joined(left_out)}."))
    return Section(TITLE, tuple(blocks))


def _times(cell: CellData) -> Times:
    return np.array([window.wall_ms for window in cell.windows if window.wall_ms is not None])


def _figure(times: dict[Cell, Times]) -> Figure:
    labels = [cell.label for cell in times]
    medians = "; ".join(
        f"{cell.label} median {decimal(float(np.median(own)), 2)} ms" for cell, own in times.items()
    )
    return Figure(
        name="window-times",
        caption=(
            "How long single windows took: wider where more of them lie, with the quarters and the "
            f"median inside. The fastest and slowest {100 * _TAIL:g} % are in the table alone. "
            "Short windows are those in which fewer requests were still running."
        ),
        alternative=f"Distribution of window times in milliseconds. {medians}.",
        data=tuple(_violin(cell, own) for cell, own in times.items()),
        layout=layout(axis("window, ms", rangemode="tozero"), categories(labels)),
        height=_ROW * len(times) + _REST,
    )


def _violin(cell: Cell, times: Times) -> dict[str, Any]:
    """Drawn from quantiles: the shape of many windows in few numbers."""
    quantiles = np.quantile(times, np.linspace(_TAIL, 1 - _TAIL, _POINTS))
    tint = colour("faster" if cell.nwor_mode is NworMode.STAGE else "ambiguous")
    return {
        "type": "violin",
        "orientation": "h",
        "name": cell.label,
        "x": [float(f"{value:.5g}") for value in quantiles],
        "y0": cell.label,
        "points": False,
        "spanmode": "hard",
        "box": {"visible": True, "width": 0.3},
        "line": {"color": tint, "width": 1.5},
        "width": 0.85,
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
