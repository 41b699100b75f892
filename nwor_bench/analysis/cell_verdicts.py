"""Verdict of each cell. The first rule that holds decides:

1. INVALID: its output differed from that of off x off in any batch, or its counts do not add up.
   The cell gets no times.
2. "reference": the cell is off x off itself.
3. INEFFECTIVE: its mode never fired. NWOR `stage` staged nothing, `control` never acted or, with
   NWOR off, the SCV mode validated nothing as asked; or the gate proved that its SCV mode cannot
   fire on this machine, so that it was not timed. The cell gets no ratio.
4. AMBIGUOUS: nothing can be compared (no valid off x off, too few blocks, output not checked),
   or its values were not (`cell_data.values_compared`): then it gets no ratio.
5. Otherwise `significance.verdict` decides from the paired ratio, its p value adjusted for the
   number of compared cells (Holm), and the noise floor (the A/A arm's largest distance from 1).

`ratio_to_off` decides 1 to 4, cell by cell, and gives the paired ratio.

The A/A arm's verdict uses its own interval alone, without Holm's correction and the noise floor:
the arm is not a hypothesis of the run.

A timed `stage` cell whose SCV mode never fired keeps its NWOR verdict; `scv_status` and its reason
report the SCV mode.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from nwor_bench.analysis.cell_data import CellData
from nwor_bench.analysis.idle_modes import idle_scv
from nwor_bench.analysis.interleaved.agreement import WINDOWS
from nwor_bench.analysis.interleaved.effects import PairEffect
from nwor_bench.analysis.ratio_to_off import CellVerdict, ComparedCell, compare_with_off
from nwor_bench.analysis.significance import (
    DEFAULT_MARGIN,
    SIGNIFICANCE,
    holm,
    smallest_effect,
    verdict,
)
from nwor_bench.analysis.statistics import RatioInterval, simultaneous_bounds
from nwor_bench.records.types import Cell, Verdict


def cell_verdicts(
    cells: Sequence[CellData],
    baseline: CellData | None,
    violations: Sequence[str | None],
    effects: Mapping[Cell, PairEffect] | None = None,
) -> list[CellVerdict]:
    """Verdicts of one pair's cells, in the order given.

    Args:
        cells: all cells of the pair, off x off and its A/A arm among them.
        baseline: off x off, or None if there is none to trust.
        violations: each cell's first count that does not add up, or None.
        effects: of the cells that took turns with off x off window by window.
    """
    effects = effects or {}
    in_turn = sum(effect.decisive is not None for effect in effects.values())
    cases = [
        compare_with_off(cell, baseline, violation, effects.get(cell.cell), in_turn)
        for cell, violation in zip(cells, violations, strict=True)
    ]
    floor = next((c.interval.distance for c in cases if c.cell.is_aa and c.interval), None)
    open_cases = [c for c in cases if c.interval and not c.cell.is_aa]
    p_values = iter(holm([c.cell_verdict.p_value or 0.0 for c in open_cases]))
    verdicts = []
    for case in cases:
        if case.interval is None:
            verdicts.append(case.cell_verdict)
        elif case.cell.is_aa:
            verdicts.append(_decide(case, None, None))
        else:
            low, high = simultaneous_bounds(case.interval, len(open_cases))
            adjusted = replace(
                case.cell_verdict,
                ratio_simultaneous_low=low,
                ratio_simultaneous_high=high,
                simultaneous_cells=len(open_cases),
                p_value_holm=next(p_values),
                smallest_effect=smallest_effect(case.interval, len(open_cases)),
            )
            verdicts.append(_decide(replace(case, cell_verdict=adjusted), floor, len(open_cases)))
    return verdicts


def _decide(case: ComparedCell, floor: float | None, compared_cells: int | None) -> CellVerdict:
    interval, adjusted = case.interval, case.cell_verdict.p_value_holm
    assert interval is not None
    # Windows in turn tell differences of less than 1 %. The A/A arm is to show none that matters.
    small_counts = case.cell_verdict.interleaved == WINDOWS and case.cell.cell.arm is None
    found = verdict(interval, p_adjusted=adjusted, noise_floor=floor, small_counts=small_counts)
    reasons = [case.cell_verdict.reason] if case.cell_verdict.reason else []
    if found is Verdict.AMBIGUOUS:
        reasons.append(_why_ambiguous(interval, adjusted, floor, compared_cells))
    idle = idle_scv(case.cell)
    if idle:
        reasons.append(f"{idle}; its NWOR result stands")
    return replace(case.cell_verdict, verdict=str(found), reason="; ".join(reasons) or None)


def _why_ambiguous(
    interval: RatioInterval, adjusted: float | None, floor: float | None, cells: int | None
) -> str:
    if interval.low <= 1 <= interval.high:
        return f"its interval holds 1 and reaches beyond {100 * DEFAULT_MARGIN:g} %"
    if adjusted is not None and adjusted >= SIGNIFICANCE:
        return f"its interval excludes 1, but not after correction for {cells} cells"
    assert floor is not None
    away = 100 * abs(interval.ratio - 1)
    return f"its {away:.2f} % are within the noise floor of {100 * floor:.2f} %"
