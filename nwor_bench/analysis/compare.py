"""Compare two runs cell by cell. Pure.

Cells are matched by pair, NWOR mode, SCV mode and arm; with `force` the pairs' names may differ.
The first rule that holds decides a cell's verdict:

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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from nwor_bench.analysis.changes import (
    Change,
    ratio_change,
    time_change,
    token_time_change,
    work_change,
)
from nwor_bench.analysis.stored_run import Difference, StoredRun, differences
from nwor_bench.analysis.verdicts import verdict
from nwor_bench.errors import ExitCode, NotComparableError
from nwor_bench.records.cell import AA, Cell, cell_order
from nwor_bench.records.types import CellResult, Verdict
from nwor_bench.stats.interval import Interval
from nwor_bench.stats.multiple import SIGNIFICANCE, holm

DEFAULT_THRESHOLD = 0.01


class DecideBy(StrEnum):
    """The number that decides a change's verdict: the ratio to off x off, or the time."""

    RATIO = "ratio"
    TIME = "time"


class ChangeVerdict(StrEnum):
    """Verdict on a cell's change between the two runs."""

    REGRESSION = "REGRESSION"
    IMPROVEMENT = "IMPROVEMENT"
    SAME = "SAME"
    AMBIGUOUS = "AMBIGUOUS"
    NOT_COMPARED = "NOT COMPARED"
    ONLY_IN_BASE = "ONLY IN BASE"
    ONLY_IN_NEW = "ONLY IN NEW"


WORST_FIRST = (
    ChangeVerdict.REGRESSION,
    ChangeVerdict.AMBIGUOUS,
    ChangeVerdict.ONLY_IN_BASE,
    ChangeVerdict.ONLY_IN_NEW,
    ChangeVerdict.IMPROVEMENT,
    ChangeVerdict.SAME,
    ChangeVerdict.NOT_COMPARED,
)
"""The order in which the cells' verdicts make the comparison's own."""


def worst_outcome(outcomes: Iterable[ChangeVerdict | None]) -> ChangeVerdict:
    """The worst of these verdicts."""
    known = set(outcomes)
    return next(outcome for outcome in WORST_FIRST if outcome in known)


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

    def deciding(self, by: DecideBy) -> Change | None:
        """The change that decides."""
        return self.ratio if by is DecideBy.RATIO else self.time


@dataclass(frozen=True)
class Comparison:
    """Two runs compared.

    `forced` are differences that would be refused without --force, `others` those that may explain
    a change. `noise_floor` is the largest distance from 1 of the A/A arm's change; None without an
    A/A arm.
    """

    base: StoredRun
    new: StoredRun
    cells: tuple[CellChange, ...]
    decide_by: DecideBy
    threshold: float
    noise_floor: float | None
    forced: tuple[Difference, ...]
    others: tuple[Difference, ...]

    def having(self, *outcomes: ChangeVerdict) -> list[CellChange]:
        """The cells with these verdicts."""
        return [cell for cell in self.cells if cell.outcome in outcomes]

    @property
    def by_drafts(self) -> bool:
        """True if its cells are draft counts."""
        return self.base.counts is not None and self.new.counts is not None

    @property
    def too_noisy(self) -> bool:
        """True if a regression just above the threshold could not be found."""
        return self.noise_floor is not None and self.noise_floor > self.threshold

    @property
    def untimed(self) -> bool:
        """True if no cell's change has an interval: the runs say nothing of times."""
        return all(cell.p_value_holm is None for cell in self.cells)

    @property
    def outcome(self) -> ChangeVerdict:
        """The worst verdict of its cells; AMBIGUOUS if the runs are too noisy for a better one,
        NOT COMPARED if they are untimed."""
        worst = worst_outcome(cell.outcome for cell in self.cells)
        if worst is ChangeVerdict.REGRESSION or not (self.too_noisy or self.untimed):
            return worst
        return ChangeVerdict.AMBIGUOUS if self.too_noisy else ChangeVerdict.NOT_COMPARED

    def exit_code(self, *, strict: bool = False) -> ExitCode:
        """REGRESSION if a cell regressed, INCONCLUSIVE if the runs are too noisy or untimed.

        `strict`: INCONCLUSIVE also if a cell is AMBIGUOUS or only in BASE.
        """
        if self.having(ChangeVerdict.REGRESSION):
            return ExitCode.REGRESSION
        if self.too_noisy or self.untimed:
            return ExitCode.INCONCLUSIVE
        if strict and self.having(ChangeVerdict.AMBIGUOUS, ChangeVerdict.ONLY_IN_BASE):
            return ExitCode.INCONCLUSIVE
        return ExitCode.OK


def compare_runs(
    base: StoredRun,
    new: StoredRun,
    *,
    threshold: float = DEFAULT_THRESHOLD,
    decide_by: DecideBy = DecideBy.RATIO,
    force: bool = False,
) -> Comparison:
    """Match the cells of two runs and give each change a verdict; `threshold` is a fraction.

    Raises NotComparableError if the runs have no cell in common or, without `force`, if they
    differ in work or machine.
    """
    blocking, others = differences(base.header, new.header)
    if blocking and not force:
        lines = "\n".join(f"  {difference}" for difference in blocking)
        raise NotComparableError.at(
            "BASE and NEW",
            f"are not comparable:\n{lines}\nRun NEW as BASE ran, or compare anyway with --force.",
            tuple(blocking),
            joint=" ",
        )
    if force and len(base.pairs) == len(new.pairs) == 1:
        new = new.under_pair(*base.pairs)
    every = sorted(base.cells.keys() | new.cells.keys(), key=cell_order)
    if not base.cells.keys() & new.cells.keys():
        raise NotComparableError.at(
            "BASE and NEW have no cell in common", f"BASE has {_names(base)}; NEW has {_names(new)}"
        )
    cells = [_matched(base, new, cell) for cell in every]
    floor = None
    if decide_by is DecideBy.RATIO:
        controls = (change.ratio for change in cells if change.cell.arm == AA)
        floor = max((c.ratio.distance for c in controls if c and c.ratio.is_bounded), default=None)
    return Comparison(
        base=base,
        new=new,
        cells=tuple(change_verdicts(cells, decide_by, threshold, floor)),
        decide_by=decide_by,
        threshold=threshold,
        noise_floor=floor,
        forced=tuple(blocking),
        others=tuple(others),
    )


def compare_sweeps(
    base: Mapping[str, StoredRun], new: Mapping[str, StoredRun], **options: Any
) -> dict[str, Comparison]:
    """Compare the runs at the same places of two sweeps, by place; options as of `compare_runs`.

    Raises NotComparableError if no place is in both, or as `compare_runs` with the run's place.
    """
    common = [place for place in base if place in new]
    if not common:
        raise NotComparableError.at(
            "BASE and NEW have no run in common",
            f"BASE has {', '.join(base)}; NEW {', '.join(new)}",
        )
    comparisons = {}
    for place in common:
        try:
            comparisons[place] = compare_runs(base[place], new[place], **options)
        except NotComparableError as error:
            raise error.within(place) from error
    return comparisons


def _names(run: StoredRun) -> str:
    return ", ".join(f"{cell.pair}: {cell.label}" for cell in sorted(run.cells, key=cell_order))


def _matched(base: StoredRun, new: StoredRun, cell: Cell) -> CellChange:
    change = CellChange(cell, base.cells.get(cell), new.cells.get(cell))
    if change.base is None or change.new is None:
        return change
    if base.counts is not None and new.counts is not None:
        ratio = token_time_change(base.counts, new.counts, cell)
    else:
        ratio = ratio_change(base, new, cell)
    time = time_change(base, new, cell)
    work = work_change(change.base, change.new)
    return replace(change, ratio=ratio, time=time, work=work)


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
    changes = [cell.deciding(by) for cell in cells if cell.outcome is None]
    intervals = [change.ratio for change in changes if change is not None]
    adjusted = holm([interval.p_value for interval in intervals])
    numbers = iter(zip(intervals, adjusted, strict=True))
    decided = []
    for cell in cells:
        if cell.outcome is None:
            interval, p_adjusted = next(numbers)
            outcome, reason = _by_numbers(interval, p_adjusted, threshold, floor, len(intervals))
            cell = replace(cell, outcome=outcome, reason=reason, p_value_holm=p_adjusted)
        decided.append(cell)
    return decided


Decision = tuple[ChangeVerdict, str | None]


def _without_numbers(cell: CellChange, by: DecideBy) -> CellChange:
    """Apply rules 1 to 5; the outcome stays None if the interval decides."""
    for rule in _RULES:
        if (decided := rule(cell, by)) is not None:
            return replace(cell, outcome=decided[0], reason=decided[1])
    return cell


def _by_presence(cell: CellChange, by: DecideBy) -> Decision | None:
    if cell.base is None:
        return ChangeVerdict.ONLY_IN_NEW, "BASE has no such cell"
    if cell.new is None:
        return ChangeVerdict.ONLY_IN_BASE, "NEW has no such cell"
    return None


def _by_state(cell: CellChange, by: DecideBy) -> Decision | None:
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


def _by_role(cell: CellChange, by: DecideBy) -> Decision | None:
    if cell.cell.arm == AA:
        return ChangeVerdict.NOT_COMPARED, "it shows only changes by chance"
    if cell.cell.is_baseline and by is DecideBy.RATIO:
        return ChangeVerdict.NOT_COMPARED, "it is the reference of the other cells' ratios"
    assert cell.base is not None
    assert cell.new is not None
    if cell.new.parity is None and cell.base.parity is not None:
        return ChangeVerdict.AMBIGUOUS, "the output was checked in BASE and not in NEW"
    return None


def _by_missing_number(cell: CellChange, by: DecideBy) -> Decision | None:
    change = cell.deciding(by)
    if change is None:
        return ChangeVerdict.AMBIGUOUS, _why_no_number(cell, by)
    return None if change.ratio.is_bounded else (ChangeVerdict.AMBIGUOUS, change.why_open)


_RULES: tuple[Callable[[CellChange, DecideBy], Decision | None], ...] = (
    *(_by_presence, _by_state, _by_role, _by_missing_number),
)


def _why_no_number(cell: CellChange, by: DecideBy) -> str:
    if by is DecideBy.TIME:
        return "a run has no time for it"
    missing = [
        name
        for name, side in (("BASE", cell.base), ("NEW", cell.new))
        if side is None or side.ratio is None
    ]
    if cell.cell.drafts is not None:
        return "too few groups of windows in a run, or too few requests of the same text"
    if missing:
        return f"no ratio to off x off in {' and '.join(missing)}"
    return "one run timed windows, the other whole batches only"


def _by_numbers(
    interval: Interval, p_adjusted: float, threshold: float, floor: float | None, cells: int
) -> Decision:
    """Apply rules 6 to 8."""
    bar = max(threshold, floor or 0.0)
    match verdict(interval, threshold, p_adjusted=p_adjusted, noise_floor=bar):
        case Verdict.SAME:
            return ChangeVerdict.SAME, None
        case Verdict.SLOWER:
            return ChangeVerdict.REGRESSION, None
        case Verdict.FASTER:
            return ChangeVerdict.IMPROVEMENT, None
    size = abs(interval.value - 1)
    if interval.holds(1):
        reason = f"the interval contains 1 and exceeds the threshold of {_percent(threshold)}"
    elif p_adjusted >= SIGNIFICANCE:
        reason = f"the interval excludes 1, but not after correction for {cells} cells"
    elif size <= threshold:
        within = f"{_percent(size)} is within the threshold of {_percent(threshold)}"
        reason = f"{within}, but its interval is not"
    else:
        assert floor is not None
        reason = f"{_percent(size)} is within the A/A arm's change of {_percent(floor)}"
    return ChangeVerdict.AMBIGUOUS, reason


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"
