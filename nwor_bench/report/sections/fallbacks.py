"""The section on windows that did not run as asked, by reason."""

from collections.abc import Sequence

from nwor_bench.records.types import CellResult
from nwor_bench.report.document import Block, Paragraph, Section, table
from nwor_bench.report.text import NOT_MEASURED, count, label

MEANINGS = {
    "no_cuda": "no CUDA device, so no graph can be captured; the device path ran eagerly",
    "capture_not_supported": "this runner cannot capture a graph of the kernel; it ran eagerly",
    "uneven_windows": "requests had different numbers of drafts, which no graph is made for",
    "breakable_cuda_graphs": "a breakable piecewise CUDA graph holds the cache's write",
    "beside_prefill": "the step ran a prefill too, whose rows it writes anyway",
    "window_beside_prefill_of_its_request": "a request was still in its prefill in this step",
    "full_graph_of_another_shape": "vLLM replayed a CUDA graph that was captured without staging",
    "full_graph_with_uneven_windows": "a full CUDA graph needs all requests to have equally many "
    "drafts",
    "micro_batches": "vLLM split the step into micro-batches",
    "step_not_finished": "vLLM did not sample after this step's forward pass",
    "layer_staged_twice": "a layer ran twice in one step",
    "sampled_ids_shape": "the sampled ids had an unknown shape",
    "sampled_ids_dtype": "the sampled ids had an unknown type",
    "more_drafts_than_capacity": "more drafts than the staging buffers hold",
    "no_target_layers": "no attention layer of the target was found",
    "kv_shape": "K or V came in an unknown shape",
}
"""In words; a reason that is not here stands for itself."""


def fallback_section(cells: Sequence[CellResult]) -> Section:
    """A row for each cell and reason."""
    rows = [row for cell in cells for row in _rows(cell)]
    blocks: list[Block] = [
        Paragraph(
            "An NWOR fallback is a window whose draft tokens were written directly; an SCV "
            "fallback is one that was not validated in the way that the mode asks for. Neither "
            "changes the output."
        )
    ]
    if rows:
        heads = ["Cell", "Kind", "Reason", "Meaning", "Fallbacks", "Windows"]
        caption = "Fallbacks, and the cell's windows in all"
        blocks.append(table(heads, rows, numbers_from=4, caption=caption))
    else:
        blocks.append(Paragraph("No timed window fell back."))
    return Section("Fallbacks by reason", tuple(blocks), brief=True, folded=True)


def _rows(cell: CellResult) -> list[list[str]]:
    scv = dict(cell.scv_fallbacks)
    unexplained = (cell.scv_fallback_count or 0) - sum(scv.values())
    if unexplained > 0:
        scv["(reason not recorded)"] = unexplained
    return [
        [label(cell), kind, reason, MEANINGS.get(reason, NOT_MEASURED), count(times),
         count(cell.windows)]
        for kind, reasons in (("NWOR", cell.fallbacks), ("SCV", scv))
        for reason, times in reasons.items()
    ]  # fmt: skip
