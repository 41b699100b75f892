"""Compare two runs cell by cell. Pure; the rules are in `change_verdicts`.

Cells are matched by pair, NWOR mode, SCV mode and arm; with `force` the pairs' names may differ. A
cell in only one of the runs is listed with that verdict.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nwor_bench.analysis.comparing.change_estimates import ratio_change, time_change, work_change
from nwor_bench.analysis.comparing.change_verdicts import CellChange, ChangeVerdict, change_verdicts
from nwor_bench.analysis.comparing.draft_changes import token_time_change
from nwor_bench.analysis.comparing.preconditions import (
    DecideBy,
    Difference,
    blocking_differences,
    other_differences,
)
from nwor_bench.analysis.comparing.stored_run import StoredRun
from nwor_bench.errors import ExitCode, NotComparableError
from nwor_bench.records.cell import AA, Cell, cell_order

__all__ = ["CellChange", "ChangeVerdict", "Comparison", "DecideBy", "compare_runs"]

DEFAULT_THRESHOLD = 0.01

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
        found = {cell.outcome for cell in self.cells}
        worst = next(outcome for outcome in WORST_FIRST if outcome in found)
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
    differences = blocking_differences(base.header, new.header)
    if differences and not force:
        lines = "\n".join(f"  {difference}" for difference in differences)
        raise NotComparableError.at(
            "BASE and NEW",
            f"are not comparable:\n{lines}\nRun NEW as BASE ran, or compare anyway with --force.",
            tuple(differences),
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
        floor = max((c.interval.distance for c in controls if c and c.interval), default=None)
    return Comparison(
        base=base,
        new=new,
        cells=tuple(change_verdicts(cells, decide_by, threshold, floor)),
        decide_by=decide_by,
        threshold=threshold,
        noise_floor=floor,
        forced=tuple(differences),
        others=tuple(other_differences(base.header, new.header)),
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
    found = {}
    for place in common:
        try:
            found[place] = compare_runs(base[place], new[place], **options)
        except NotComparableError as error:
            raise error.within(place) from error
    return found


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
