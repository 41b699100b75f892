"""Where a window's time goes, and what deciding on the device costs."""

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from nwor_bench.analysis.analyse import Analysis
from nwor_bench.analysis.invariants import full_windows, windows_by_batch
from nwor_bench.analysis.phases import PHASES, CellPhases, cell_phases
from nwor_bench.records.cell import cell_order
from nwor_bench.records.store import RunData
from nwor_bench.records.types import LAUNCH_COUNTS, Phase, Verdict
from nwor_bench.report.answer import on_cpu
from nwor_bench.report.document import Block, Paragraph, Section, table
from nwor_bench.report.text import NOT_MEASURED, count, decimal, percent

if TYPE_CHECKING:
    pass

TITLE = "Where a window's time goes"

ON_DEVICE = (
    "Device: milliseconds between events on the GPU, medians over the windows of one probed batch "
    "a cell, separate from the timed ones. Forward includes the preparation of attention. There is "
    "no mask time if the commit decides by itself. Probe: a probed window's time over a timed "
    "one's, the cost of the events."
)
ON_HOST = (
    "Host: milliseconds that our hooks add to a window, and the part of it that decides which "
    "drafts were accepted (waiting for the device included), medians over the timed windows. "
    "Launches and waits are those of deciding. Windows that captured a graph have the path capture."
)
LAUNCHES = (
    "Counted by PyTorch's profiler in one separate block: means over the windows with all "
    "requests, from the start of a step on the host to the start of the next. A graph launch "
    "replays many kernels. Host waits are calls that wait for the GPU."
)


def phase_section(analysis: Analysis) -> Section:
    """Tables of phases, or the reason why nothing was probed; then launches."""
    run = analysis.run
    invalid = {cell.cell for cell in analysis.cells if cell.verdict == Verdict.INVALID}
    rows = [row for row in cell_phases(run) if row.cell not in invalid]
    blocks = _phases(rows) if rows else [Paragraph(_why_not(run))]
    return Section(TITLE, (*blocks, *_launches(run)), brief=True, folded=True)


def _phases(rows: Sequence[CellPhases]) -> list[Block]:
    device = table(
        ["Cell", "Window ms", "Forward", "Sample", "Mask", "Commit", "Probe"],
        [
            [row.cell.label, decimal(row.window_ms, 3),
             *(decimal(row.device_ms[name], 3) for name in PHASES), decimal(row.probe_cost, 3)]
            for row in rows
        ],
        caption="A window on the device, ms",
    )  # fmt: skip
    host = table(
        ["Cell", "Hooks ms", "Deciding ms", "Share of window", "Launches", "Host waits",
         "Windows by path"],
        [
            [row.cell.label, decimal(row.hook_ms, 3), decimal(row.scv_host_ms, 3),
             percent(row.deciding_share), decimal(row.launches, 2), decimal(row.host_syncs, 2),
             ", ".join(f"{path} {count(n)}" for path, n in sorted(row.paths.items()))
             or NOT_MEASURED]
            for row in rows
        ],
        caption="What the hooks add on the host",
    )  # fmt: skip
    return [device, Paragraph(ON_DEVICE), host, Paragraph(ON_HOST)]


def _why_not(run: RunData) -> str:
    if on_cpu(run.header):
        return (
            "Not measured: forward, sample, mask and commit are timed between events on a GPU, and "
            "this run had none."
        )
    return "Not measured: no batch was probed, or none whose times count."


def _launches(run: RunData) -> list[Block]:
    """One table with its note; nothing if no launches were counted."""
    windows = windows_by_batch(run)
    batches = [batch for batch in run.batches if batch.phase == Phase.LAUNCHES]
    rows = []
    for cell in sorted({batch.cell for batch in batches}, key=cell_order):
        own = [batch for batch in batches if batch.cell == cell]
        full = [w for w in full_windows(own, windows) if w.kernel_launches is not None]
        means = [fmean(getattr(w, n) for w in full) if full else None for n in LAUNCH_COUNTS]
        rows.append([cell.label, *(decimal(mean, 2) for mean in means), count(len(full))])
    heads = ["Cell", "Kernel launches", "Graph launches", "Host waits", "Async copies", "Windows"]
    body = table(heads, rows, caption="Launches and waits of a window")
    return [body, Paragraph(LAUNCHES)] if rows else []
