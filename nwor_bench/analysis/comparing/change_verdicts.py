"""Verdicts on the cells' changes from BASE to NEW. The first rule that holds decides:

1. ONLY IN BASE or ONLY IN NEW: the other run does not have the cell.
2. REGRESSION: in NEW but not in BASE the cell is INVALID or its mode never fired (INEFFECTIVE; in
   a stage cell also SCV's mode). IMPROVEMENT: the reverse.
3. AMBIGUOUS: INVALID in both runs. NOT COMPARED: INEFFECTIVE in both runs.
4. NOT COMPARED: off x off (unless the time decides) and the A/A arm, which show changes of the
   machine and chance.
5. AMBIGUOUS: a number or its interval is missing, or the output was not checked in NEW.
6. SAME: the whole interval is within 1 +- threshold.
7. REGRESSION (IMPROVEMENT): the interval is above (below) 1, the p value adjusted for the number of
   cells (Holm) is below 0.05, and the change exceeds both the threshold and the A/A arm's change.
8. AMBIGUOUS otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from nwor_bench.analysis.comparing.change_estimates import Change
from nwor_bench.analysis.comparing.preconditions import DecideBy
from nwor_bench.analysis.verdicts import verdict
from nwor_bench.records.types import AA, Cell, CellResult, Verdict
from nwor_bench.stats.multiple import SIGNIFICANCE, holm


class ChangeVerdict(StrEnum):
    """Verdict on a cell's change between the two runs."""

    REGRESSION = "REGRESSION"
    IMPROVEMENT = "IMPROVEMENT"
    SAME = "SAME"
    AMBIGUOUS = "AMBIGUOUS"
    NOT_COMPARED = "NOT COMPARED"
    ONLY_IN_BASE = "ONLY IN BASE"
    ONLY_IN_NEW = "ONLY IN NEW"


@dataclass(frozen=True)
class CellChange:
    """One cell in both runs.

    `ratio` is the change of its ratio to off x off, `time` that of its time per window,
    `work` that of its ratio of the GPU's work.
    `p_value_holm` belongs to the one that decides. `outcome` is None until `change_verdicts`.
    """

    cell: Cell
    base: CellResult | None
    new: CellResult | None
    ratio: Change | None = None
    time: Change | None = None
    work: Change | None = None
    outcome: ChangeVerdict | None = None
    reason: str | None = None
    p_value_holm: float | None = None

    @property
    def label(self) -> str:
        """Label such as `stage x graph`."""
        return self.cell.label

    @property
    def is_reference(self) -> bool:
        """True for off x off."""
        return self.cell.is_baseline


def change_verdicts(
    cells: Sequence[CellChange], by: DecideBy, threshold: float, floor: float | None
) -> list[CellChange]:
    """The cells with their verdicts, in the same order.

    Args:
        cells: matched cells with their changes.
        by: which change decides.
        threshold: smaller changes do not count, a fraction.
        floor: largest distance from 1 of the A/A arm's change, or None.
    """
    cells = [_without_numbers(cell, by) for cell in cells]
    p_values = [_p_value(cell, by) for cell in cells if cell.outcome is None]
    adjusted = iter(holm(p_values))
    decided = []
    for cell in cells:
        if cell.outcome is None:
            cell = replace(cell, p_value_holm=next(adjusted))
            cell = _by_numbers(cell, by, threshold, floor, len(p_values))
        decided.append(cell)
    return decided


def _p_value(cell: CellChange, by: DecideBy) -> float:
    change = _deciding(cell, by)
    assert change is not None
    assert change.interval is not None
    assert change.interval.p_value is not None
    return change.interval.p_value


def _deciding(cell: CellChange, by: DecideBy) -> Change | None:
    return cell.ratio if by is DecideBy.RATIO else cell.time


def _without_numbers(cell: CellChange, by: DecideBy) -> CellChange:
    """Apply rules 1 to 5; the outcome stays None if the interval decides."""
    found = _by_presence(cell) or _by_state(cell) or _by_role(cell, by)
    if found is not None:
        return replace(cell, outcome=found[0], reason=found[1])
    change = _deciding(cell, by)
    if change is None:
        return replace(cell, outcome=ChangeVerdict.AMBIGUOUS, reason=_why_no_number(cell, by))
    if change.interval is None:
        return replace(cell, outcome=ChangeVerdict.AMBIGUOUS, reason=change.why_open)
    return cell


def _by_presence(cell: CellChange) -> tuple[ChangeVerdict, str] | None:
    if cell.base is None:
        return ChangeVerdict.ONLY_IN_NEW, "BASE has no such cell"
    if cell.new is None:
        return ChangeVerdict.ONLY_IN_BASE, "NEW has no such cell"
    return None


def _by_state(cell: CellChange) -> tuple[ChangeVerdict, str] | None:
    """Rules 2 and 3: INVALID or INEFFECTIVE in one or both runs."""
    before, after = _state(cell.base), _state(cell.new)
    if after == before == Verdict.INVALID:
        return ChangeVerdict.AMBIGUOUS, "INVALID in both runs"
    if after == before == Verdict.INEFFECTIVE:
        return ChangeVerdict.NOT_COMPARED, "INEFFECTIVE in both runs"
    assert cell.base is not None
    assert cell.new is not None
    if after is not None and before != Verdict.INVALID:
        return ChangeVerdict.REGRESSION, f"{after} in NEW{_because(cell.new)}"
    if before is not None:
        now = "INEFFECTIVE, no longer INVALID, in NEW" if after else "no longer so in NEW"
        return ChangeVerdict.IMPROVEMENT, f"{before} in BASE{_because(cell.base)}; {now}"
    if cell.base.scv_status == "ok" and cell.new.scv_status == Verdict.INEFFECTIVE:
        return (
            ChangeVerdict.REGRESSION,
            f"SCV's mode fired in BASE and never in NEW{_because(cell.new)}",
        )
    return None


def _state(cell: CellResult | None) -> Verdict | None:
    states = (Verdict.INVALID, Verdict.INEFFECTIVE)
    return next((state for state in states if cell is not None and cell.verdict == state), None)


def _because(cell: CellResult) -> str:
    return f": {cell.reason.rstrip('.')}" if cell.reason else ""


def _by_role(cell: CellChange, by: DecideBy) -> tuple[ChangeVerdict, str] | None:
    if cell.cell.arm == AA:
        return ChangeVerdict.NOT_COMPARED, "it shows only changes by chance"
    if cell.is_reference and by is DecideBy.RATIO:
        return ChangeVerdict.NOT_COMPARED, "it is the reference of the other cells' ratios"
    assert cell.base is not None
    assert cell.new is not None
    if cell.new.parity is None and cell.base.parity is not None:
        return ChangeVerdict.AMBIGUOUS, "the output was checked in BASE and not in NEW"
    return None


def _why_no_number(cell: CellChange, by: DecideBy) -> str:
    if by is DecideBy.TIME:
        return "a run has no time for it"
    missing = [
        name
        for name, side in (("BASE", cell.base), ("NEW", cell.new))
        if side is None or side.ratio_to_off is None
    ]
    if cell.cell.drafts is not None:
        return "too few groups of windows in a run, or too few requests of the same text"
    if missing:
        return f"no ratio to off x off in {' and '.join(missing)}"
    return "one run timed windows, the other whole batches only"


def _by_numbers(
    cell: CellChange, by: DecideBy, threshold: float, floor: float | None, cells: int
) -> CellChange:
    """Apply rules 6 to 8."""
    change = _deciding(cell, by)
    assert change is not None
    assert change.interval is not None
    bar = max(threshold, floor or 0.0)
    found = verdict(change.interval, threshold, p_adjusted=cell.p_value_holm, noise_floor=bar)
    match found:
        case Verdict.SAME:
            return replace(cell, outcome=ChangeVerdict.SAME)
        case Verdict.SLOWER:
            return replace(cell, outcome=ChangeVerdict.REGRESSION)
        case Verdict.FASTER:
            return replace(cell, outcome=ChangeVerdict.IMPROVEMENT)
    reason = _why_ambiguous(change, threshold, floor, cell.p_value_holm, cells)
    return replace(cell, outcome=ChangeVerdict.AMBIGUOUS, reason=reason)


def _why_ambiguous(
    change: Change, threshold: float, floor: float | None, p_adjusted: float | None, cells: int
) -> str:
    interval = change.interval
    assert interval is not None
    if interval.low <= 1 <= interval.high:
        return f"the interval contains 1 and exceeds the threshold of {_percent(threshold)}"
    if p_adjusted is not None and p_adjusted >= SIGNIFICANCE:
        return f"the interval excludes 1, but not after correction for {cells} cells"
    size = _percent(abs(change.ratio - 1))
    if abs(change.ratio - 1) <= threshold:
        return f"{size} is within the threshold of {_percent(threshold)}, but its interval is not"
    assert floor is not None
    return f"{size} is within the A/A arm's change of {_percent(floor)}"


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"
