"""The section on what a request sees: TTFT, TPOT and ITL beside window time and throughput."""

from collections.abc import Sequence

from nwor_bench.analysis.request_times import PERCENTILES
from nwor_bench.records.types import CellResult
from nwor_bench.report.document import Paragraph, Section, table
from nwor_bench.report.text import decimal, label

TITLE = "Request latency"

NOTE = (
    "vLLM's own request metrics over the timed batches, defined as in vllm bench serve. All "
    "requests of a batch arrive at once, so TTFT includes waiting for each other's prefills. Only "
    "the ratio above is paired block by block; compare cells by it."
)
HEADS = {
    name: f"{name.split('_')[0].upper()} {name.split('_')[-1]}" for name in PERCENTILES
}  # fmt: skip


def request_time_section(cells: Sequence[CellResult]) -> Section | None:
    """One row a cell; None for a run without request metrics."""
    if not any(_values(cell) for cell in cells):
        return None
    shown = [name for name in PERCENTILES if any(getattr(c, name) is not None for c in cells)]
    rows = [
        [label(c), *(decimal(getattr(c, name), 2) for name in shown),
         decimal(c.window_ms_mean, 2), decimal(c.tokens_per_s)]
        for c in cells
    ]  # fmt: skip
    heads = ["Cell", *(HEADS[name] for name in shown), "Window", "Output tokens/s"]
    body = table(heads, rows, caption="Milliseconds, but for output tokens/s")
    return Section(TITLE, (Paragraph(NOTE), body))


def _values(cell: CellResult) -> list[float]:
    found = [getattr(cell, name) for name in PERCENTILES]
    return [value for value in found if value is not None]
