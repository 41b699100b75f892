"""The section on what a window asks of the driver: launches, graph launches, waits of the host."""

from statistics import fmean

from nwor_bench.analysis.invariants import (
    cell_key,
    cell_label,
    cell_order,
    full_windows,
    windows_by_batch,
)
from nwor_bench.records.store import RunData
from nwor_bench.records.types import LAUNCH_COUNTS
from nwor_bench.report.document import Paragraph, Section, table
from nwor_bench.report.text import count, decimal

TITLE = "Launches and waits of a window"
PHASE = "launches"

ABOUT = (
    "Counted by PyTorch's profiler in one block apart from the timed ones: means over the windows "
    "with all requests in them, from the start of a step on the host to the start of the next one. "
    "A graph launch replays many kernels. Host waits are calls that wait for the GPU; one that "
    "finds it idle costs little."
)


def launch_section(run: RunData) -> Section | None:
    """One table; None where no launches were counted."""
    windows = windows_by_batch(run)
    batches = [batch for batch in run.batches if batch.phase == PHASE]
    rows = []
    for cell in sorted({cell_key(batch) for batch in batches}, key=cell_order):
        own = [batch for batch in batches if cell_key(batch) == cell]
        full = [w for w in full_windows(own, windows) if w.kernel_launches is not None]
        means = [fmean(getattr(w, n) for w in full) if full else None for n in LAUNCH_COUNTS]
        rows.append([cell_label(cell), *(decimal(mean, 2) for mean in means), count(len(full))])
    if not rows:
        return None
    heads = ["Cell", "Kernel launches", "Graph launches", "Host waits", "Async copies", "Windows"]
    return Section(TITLE, (table(heads, rows, caption="A window"), Paragraph(ABOUT)))
