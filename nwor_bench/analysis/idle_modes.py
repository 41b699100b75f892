"""Why a cell's NWOR or SCV mode never fired: what makes a cell INEFFECTIVE."""

from collections import Counter

from nwor_bench.analysis.cell_data import CellData
from nwor_bench.records.types import NworMode, Verdict


def idle_reason(cell: CellData) -> str | None:
    """Why the cell's mode never fired, or None if it did or nothing was timed yet."""
    if cell.cannot_fire is not None and not cell.measured:
        return cell.cannot_fire
    if cell.cell.nwor_mode is NworMode.CONTROL:
        acted = cell.controlled or not cell.measured
        return None if acted else "attention read no draft token from the window"
    if cell.cell.nwor_mode is not NworMode.STAGE:
        return idle_scv(cell)
    if cell.staged or not cell.measured:
        return None
    if not cell.draft_tokens:
        return "no draft token was proposed, so nothing was staged"
    return f"no draft token was staged{_most_common(cell.fallbacks)}"


def idle_scv(cell: CellData) -> str | None:
    """Why the cell's SCV mode never fired, or None if it did or is off."""
    if cell.scv_status != Verdict.INEFFECTIVE:
        return None
    return f"SCV validated no window as asked{_most_common(cell.scv_fallbacks)}"


def _most_common(reasons: dict[str, int]) -> str:
    ranked = Counter(reasons).most_common(1)
    return f" (most often: {ranked[0][0]})" if ranked else ""
