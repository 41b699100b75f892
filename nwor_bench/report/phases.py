"""The section on where a window's time goes, and what deciding on the device costs."""

from nwor_bench.invariants import cell_label
from nwor_bench.phases import PHASES, CellPhases, cell_phases
from nwor_bench.report.document import Block, Paragraph, Section, table
from nwor_bench.report.text import NOT_MEASURED, count, decimal, percent
from nwor_bench.store import RunData

ON_DEVICE = (
    "Device: milliseconds between events on the GPU, medians over the windows of one probed batch "
    "a cell, apart from the timed ones. Forward includes the preparation of attention. There is "
    "no mask time where the commit decides by itself. Probe: a probed window's time over a timed "
    "one's, which is what the events cost."
)
ON_HOST = (
    "Host: milliseconds that our hooks add to a window, and the part of it that decides what was "
    "accepted (waiting for the device included), medians over the timed windows. Launches and "
    "waits are those of deciding. Windows that captured a graph are under `capture`."
)


def phase_section(run: RunData) -> Section | None:
    """Two tables; None where nothing was probed."""
    rows = cell_phases(run)
    if not rows:
        return None
    device = table(
        ["Cell", "Window ms", "Forward", "Sample", "Mask", "Commit", "Probe"],
        [[cell_label(row.cell), decimal(row.window_ms, 3), *_device(row)] for row in rows],
    )
    host = table(
        ["Cell", "Hooks ms", "Deciding ms", "Share of window", "Launches", "Host waits",
         "Windows by path"],
        [_host(row) for row in rows],
    )  # fmt: skip
    blocks: tuple[Block, ...] = (device, Paragraph(ON_DEVICE), host, Paragraph(ON_HOST))
    return Section("Where a window's time goes", blocks)


def _device(row: CellPhases) -> list[str]:
    return [*(decimal(row.device_ms[name], 3) for name in PHASES), decimal(row.probe_cost, 3)]


def _host(row: CellPhases) -> list[str]:
    paths = ", ".join(f"{path} {count(number)}" for path, number in sorted(row.paths.items()))
    return [
        cell_label(row.cell),
        decimal(row.hook_ms, 3),
        decimal(row.scv_host_ms, 3),
        percent(row.deciding_share),
        decimal(row.launches, 2),
        decimal(row.host_syncs, 2),
        paths or NOT_MEASURED,
    ]
