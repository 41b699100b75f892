"""The section on what a window asks of the driver: launches, graph launches, waits of the host."""

from statistics import fmean

from nwor_bench.analysis.invariants import full_windows, windows_by_batch
from nwor_bench.records.cell import cell_order
from nwor_bench.records.store import RunData
from nwor_bench.records.types import LAUNCH_COUNTS, Phase
from nwor_bench.report.document import Paragraph, Section, table
from nwor_bench.report.text import count, decimal

TITLE = "Launches and waits of a window"

ABOUT = (
    "Counted by PyTorch's profiler in one block apart from the timed ones: means over the windows "
    "with all requests in them, from the start of a step on the host to the start of the next one. "
    "A graph launch replays many kernels. Host waits are calls that wait for the GPU; one that "
    "finds it idle costs little."
)


def launch_section(run: RunData) -> Section | None:
    """One table; None where no launches were counted."""
    windows = windows_by_batch(run)
    batches = [batch for batch in run.batches if batch.phase == Phase.LAUNCHES]
    rows = []
    for cell in sorted({batch.cell for batch in batches}, key=cell_order):
        own = [batch for batch in batches if batch.cell == cell]
        full = [w for w in full_windows(own, windows) if w.kernel_launches is not None]
        means = [fmean(getattr(w, n) for w in full) if full else None for n in LAUNCH_COUNTS]
        rows.append([cell.label, *(decimal(mean, 2) for mean in means), count(len(full))])
    if not rows:
        return None
    heads = ["Cell", "Kernel launches", "Graph launches", "Host waits", "Async copies", "Windows"]
    return Section(TITLE, (table(heads, rows, caption="A window"), Paragraph(ABOUT)), folded=True)
