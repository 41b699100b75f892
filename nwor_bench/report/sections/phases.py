"""The section on where a window's time goes, and what deciding on the device costs."""

from collections.abc import Sequence
from typing import Any

from nwor_bench.analysis.phases import PHASES, CellPhases, cell_phases
from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult, Verdict
from nwor_bench.report.document import Block, Figure, Paragraph, Section, table
from nwor_bench.report.plots import axis, categories, colour, layout
from nwor_bench.report.sections.verdicts import on_cpu
from nwor_bench.report.text import NOT_MEASURED, count, decimal, percent

TITLE = "Where a window's time goes"

ON_DEVICE = (
    "Device: milliseconds between events on the GPU, medians over the windows of one probed batch "
    "a cell, apart from the timed ones. Forward includes the preparation of attention. There is "
    "no mask time where the commit decides by itself. Probe: a probed window's time over a timed "
    "one's, which is what the events cost."
)
ON_HOST = (
    "Host: milliseconds that our hooks add to a window, and the part of it that decides what was "
    "accepted (waiting for the device included), medians over the timed windows. Launches and "
    "waits are those of deciding. Windows that captured a graph have the path capture."
)

_COLOURS = {"forward_ms": "ambiguous", "sample_ms": "faster", "mask_ms": "ineffective",
            "commit_ms": "slower"}  # fmt: skip
_SHORT = ("sample_ms", "mask_ms", "commit_ms")
_ROW = 34
_REST = 150


def phase_section(run: RunData, cells: Sequence[CellResult]) -> Section:
    """A timeline and two tables; a line that says why not where nothing was probed."""
    invalid = {cell.cell for cell in cells if cell.verdict == Verdict.INVALID}
    rows = [row for row in cell_phases(run) if row.cell not in invalid]
    if not rows:
        return Section(TITLE, (Paragraph(_why_not(run)),))
    device = table(
        ["Cell", "Window ms", "Forward", "Sample", "Mask", "Commit", "Probe"],
        [[row.cell.label, decimal(row.window_ms, 3), *_device(row)] for row in rows],
        caption="A window on the device, ms",
    )
    host = table(
        ["Cell", "Hooks ms", "Deciding ms", "Share of window", "Launches", "Host waits",
         "Windows by path"],
        [_host(row) for row in rows],
        caption="What the hooks add on the host",
    )  # fmt: skip
    drawn = [row for row in rows if any(value is not None for value in row.device_ms.values())]
    timeline: Block = (
        _timeline(drawn)
        if drawn
        else Paragraph("The probe measured no phase on the device, so there is no timeline.")
    )
    blocks = (timeline, device, Paragraph(ON_DEVICE), host, Paragraph(ON_HOST))
    return Section(TITLE, blocks, brief=True, folded=True)


def _why_not(run: RunData) -> str:
    if on_cpu(run.header):
        return (
            "Not measured: forward, sample, mask and commit are timed between events on a GPU, and "
            "this run had none."
        )
    return "Not measured: no batch was probed, or none whose times count."


def _timeline(rows: Sequence[CellPhases]) -> Figure:
    """A window's phases one after the other; below, the short ones on an axis of their own."""
    labels = [row.cell.label for row in rows]
    whole = [_bar(name, rows, "x", "y", legend=True) for name in PHASES]
    short = [_bar(name, rows, "x2", "y2", legend=False) for name in _SHORT]
    data = [trace for trace in (*whole, _ends(rows), *short) if trace]
    upper = axis("ms", anchor="y", rangemode="tozero")
    lower = axis("the short phases alone, ms", anchor="y2", rangemode="tozero")
    return Figure(
        name="timeline",
        caption=(
            "A window from its start, medians of the probed windows: forward, sample, mask (who "
            "was accepted), commit. The mark is the whole window in the timed batches, host and "
            "drafter included. Below: the short phases on an axis of their own. A phase that was "
            "not measured is not drawn."
        ),
        alternative=f"Timeline of a window, ms. {'; '.join(map(_in_words, rows))}.",
        data=tuple(data),
        layout=layout(
            upper,
            categories(labels, domain=[0.58, 1]),
            xaxis2=lower,
            yaxis2=categories(labels, domain=[0, 0.42]),
            barmode="stack",
            showlegend=True,
        ),
        height=2 * _ROW * len(rows) + _REST,
    )


def _bar(
    name: str, rows: Sequence[CellPhases], xaxis: str, yaxis: str, *, legend: bool
) -> dict[str, Any] | None:
    """One phase of all cells; None if no cell has it."""
    measured = [row for row in rows if row.device_ms[name] is not None]
    if not measured:
        return None
    return {
        "type": "bar",
        "orientation": "h",
        "name": name.removesuffix("_ms"),
        "legendgroup": name,
        "showlegend": legend,
        "xaxis": xaxis,
        "yaxis": yaxis,
        "y": [row.cell.label for row in measured],
        "x": [row.device_ms[name] for row in measured],
        "marker": {"color": colour(_COLOURS[name])},
    }


def _ends(rows: Sequence[CellPhases]) -> dict[str, Any] | None:
    timed = [row for row in rows if row.window_ms is not None]
    if not timed:
        return None
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "whole window",
        "xaxis": "x",
        "yaxis": "y",
        "y": [row.cell.label for row in timed],
        "x": [row.window_ms for row in timed],
        "marker": {"symbol": "line-ns-open", "size": 16, "color": colour("text"),
                   "line": {"width": 2}},
    }  # fmt: skip


def _in_words(row: CellPhases) -> str:
    phases = ", ".join(
        f"{name.removesuffix('_ms')} {decimal(value, 3)}"
        for name, value in row.device_ms.items()
        if value is not None
    )
    return f"{row.cell.label}: {phases}"


def _device(row: CellPhases) -> list[str]:
    return [*(decimal(row.device_ms[name], 3) for name in PHASES), decimal(row.probe_cost, 3)]


def _host(row: CellPhases) -> list[str]:
    paths = ", ".join(f"{path} {count(number)}" for path, number in sorted(row.paths.items()))
    return [
        row.cell.label,
        decimal(row.hook_ms, 3),
        decimal(row.scv_host_ms, 3),
        percent(row.deciding_share),
        decimal(row.launches, 2),
        decimal(row.host_syncs, 2),
        paths or NOT_MEASURED,
    ]
