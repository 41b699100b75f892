"""Cells that cannot fire on this machine, as the gate proves: no time is spent on them.

Without CUDA no graph can be captured. Such a cell's windows are those of the same NWOR mode with
SCV off, and their time says nothing of SCV.
"""

from nwor_bench.analysis.invariants import windows_by_batch
from nwor_bench.records.lines import batch_key
from nwor_bench.records.store import RunData
from nwor_bench.records.types import Cell, Phase, ScvMode

_FOR_GOOD = {"no_cuda": "there is no CUDA device"}
"""Fallback reasons that no later window of the run can be without, in words."""


def cannot_fire(run: RunData) -> dict[Cell, str]:
    """Cells whose windows in the gate all fell back for a reason that stays, and why."""
    windows = windows_by_batch(run)
    found: dict[Cell, str] = {}
    for batch in run.batches:
        if batch.phase != Phase.GATE or batch.cell.scv_mode is ScvMode.OFF:
            continue
        reasons = {window.scv_fallback_reason for window in windows[batch_key(batch)]}
        reasons.discard(None)  # a window without drafts has none
        counters = batch.scv_counters
        validated = counters.get("scv_graph_hits", 0) + counters.get("scv_device_validations", 0)
        fell_back = counters.get("scv_fallback_count", 0)
        if fell_back and validated <= fell_back and len(reasons) == 1:
            why = _FOR_GOOD.get(str(*reasons))
            if why is not None:
                found[batch.cell] = f"{why}, so SCV cannot fire: proven by the gate, not timed"
    return found
