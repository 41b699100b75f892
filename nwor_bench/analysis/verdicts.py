"""Verdict of each cell. The first rule that holds decides:

1. INVALID: its output differed from that of off x off in any batch, or its counts do not add up.
   The cell gets no times.
2. "reference": the cell is off x off itself.
3. INEFFECTIVE: its mode never fired. NWOR `stage` staged nothing, `control` never acted or, with
   NWOR off, the SCV mode validated nothing as asked; or the gate proved that its SCV mode cannot
   fire on this machine, so that it was not timed. The cell gets no ratio.
4. AMBIGUOUS: a check of the gate that the cell needs compared nothing (`parity/required.py`). The
   cell gets no ratio.
5. CHECKED: the run times nothing, as asked (`--batches 0`).
6. AMBIGUOUS: there is no valid off x off, or too few blocks.
7. Otherwise `statistics.verdict` decides from the paired ratio, its p value adjusted for the
   number of compared cells (Holm), and the noise floor (the A/A arm's largest distance from 1).

`compare_with_off` decides 1 to 6, cell by cell, and gives the paired ratio: that of neighbouring
windows if the cell was interleaved with off x off, unless whole batches disagree with it; else
that of whole batches, block by block.

The A/A arm's verdict uses only its own interval, without Holm's correction and the noise floor:
the arm is not a hypothesis of the run.

A timed `stage` cell whose SCV mode never fired keeps its NWOR verdict; `scv_status` and its reason
report the SCV mode.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nwor_bench.analysis.cell_data import CellData, idle_reason, idle_scv
from nwor_bench.analysis.effects import WINDOWS, PairEffect, deciding
from nwor_bench.analysis.paired import PairedTimes, pair_times
from nwor_bench.analysis.parity.required import missing_checks
from nwor_bench.analysis.parity.tokens import ACCEPTANCE_ONLY, EXACT, REFERENCE
from nwor_bench.analysis.throughput import (
    RateRatio,
    rate_of_blocks,
    rate_of_groups,
    rate_of_same_tokens,
)
from nwor_bench.records.types import Cell, Verdict
from nwor_bench.stats.interval import Interval
from nwor_bench.stats.multiple import SIGNIFICANCE, holm, ratio_at_once, smallest_change
from nwor_bench.stats.paired import MIN_BLOCKS, paired_ratio
from nwor_bench.stats.robust import MIN_GROUPS

DEFAULT_MARGIN = 0.01
"""Differences within this fraction count as none."""

_SAME_TOKENS = (EXACT, ACCEPTANCE_ONLY)
"""What the gate found if a cell needs as many windows as off x off."""


def verdict(
    interval: Interval,
    margin: float = DEFAULT_MARGIN,
    *,
    p_adjusted: float | None = None,
    noise_floor: float | None = None,
    small_counts: bool = False,
) -> Verdict:
    """The verdict from an interval of time ratios. The first rule that holds decides:

    1. The whole interval is within 1 +- margin: SAME, even if it excludes 1, because such a
       difference is too small to matter. With `small_counts` rule 2 comes first.
    2. The interval excludes 1, the p value adjusted for the number of cells (if given) is below
       0.05, and the ratio's distance from 1 exceeds the noise floor (if given): FASTER below 1,
       SLOWER above.
    3. Otherwise AMBIGUOUS.
    """
    certain = p_adjusted is None or p_adjusted < SIGNIFICANCE
    beyond = noise_floor is None or abs(interval.value - 1) > noise_floor
    differs = certain and beyond and not interval.holds(1)
    is_small = 1 - margin <= interval.low and interval.high <= 1 + margin
    if is_small and not (small_counts and differs):
        return Verdict.SAME
    if differs:
        return Verdict.FASTER if interval.high < 1 else Verdict.SLOWER
    return Verdict.AMBIGUOUS


@dataclass(frozen=True)
class CellVerdict:
    """The fields of a CellResult that a comparison gives; `verdict` is "" until all are known."""

    verdict: str
    reason: str | None = None
    ratio_to_off: float | None = None
    ratio_ci_low: float | None = None
    ratio_ci_high: float | None = None
    compared: str | None = None
    matched_windows: int | None = None
    unmatched_windows: int | None = None
    p_value: float | None = None
    p_value_holm: float | None = None
    smallest_effect: float | None = None
    ratio_simultaneous_low: float | None = None
    ratio_simultaneous_high: float | None = None
    simultaneous_cells: int | None = None
    interleaved: str | None = None
    groups: int | None = None
    ratio_batches: float | None = None
    ratio_batches_low: float | None = None
    ratio_batches_high: float | None = None
    tokens_per_s_ratio: float | None = None
    tokens_per_s_ratio_low: float | None = None
    tokens_per_s_ratio_high: float | None = None
    tokens_per_s_ratio_simultaneous_low: float | None = None
    tokens_per_s_ratio_simultaneous_high: float | None = None
    tokens_per_s_clock: str | None = None
    tokens_per_s_noise: str | None = None
    work_ratio: float | None = None
    work_ratio_ci_low: float | None = None
    work_ratio_ci_high: float | None = None


@dataclass(frozen=True)
class ComparedCell:
    """A cell's result before Holm's correction."""

    cell: CellData
    cell_verdict: CellVerdict
    interval: Interval | None = None
    """Interval of the paired ratio; None if the verdict needs none (rules 1 to 6)."""
    rate: RateRatio | None = None
    """Tokens per second over off x off; None if the cell has no ratio."""


def compare_with_off(
    cell: CellData,
    baseline: CellData | None,
    violation: str | None,
    effect: PairEffect | None,
    interleaved: int,
    *,
    checks_only: bool = False,
) -> ComparedCell:
    """Compare a cell, or give it the verdict of the rules 1 to 6 above.

    Args:
        cell: the cell's data.
        baseline: off x off, or None if there is none to trust.
        violation: the cell's first count that does not add up, or None.
        effect: that of its windows, if it was interleaved with off x off.
        interleaved: cells that have such an effect.
        checks_only: the run times nothing.
    """
    if cell.parity == Verdict.INVALID:
        where = f" ({cell.first_mismatch})" if cell.first_mismatch else ""
        text = f"it changed the model's output{where}"
        return ComparedCell(cell, CellVerdict(str(Verdict.INVALID), text))
    if violation is not None:
        return ComparedCell(cell, CellVerdict(str(Verdict.INVALID), violation))
    if cell.is_baseline:
        return ComparedCell(cell, CellVerdict(REFERENCE))
    idle = idle_reason(cell)
    if idle is not None:
        return ComparedCell(cell, CellVerdict(str(Verdict.INEFFECTIVE), idle))
    missing = missing_checks(cell)
    if missing is not None:
        return _ambiguous(cell, missing)
    if checks_only:
        return ComparedCell(cell, CellVerdict(str(Verdict.CHECKED)))
    if baseline is None:
        return _ambiguous(cell, "there is no valid off x off to compare it with")
    times = pair_times(cell, baseline)
    if times is None:
        case = _ambiguous(cell, "no block was timed both in it and in off x off")
    else:
        case = _compare(cell, times)
    return case if effect is None else _interleaved(case, effect, interleaved)


def _ambiguous(cell: CellData, reason: str) -> ComparedCell:
    return ComparedCell(cell, CellVerdict(str(Verdict.AMBIGUOUS), reason))


def _compare(cell: CellData, times: PairedTimes) -> ComparedCell:
    interval, rate = paired_ratio(times.treated, times.baseline), rate_of_blocks(times)
    cell_verdict = CellVerdict(
        verdict="",
        ratio_to_off=interval.value,
        compared=times.compared,
        matched_windows=times.matched_windows,
        unmatched_windows=times.unmatched_windows,
    )
    if not interval.is_bounded:
        few = f"its timed blocks are {len(times.blocks)}, and an interval needs {MIN_BLOCKS}"
        cell_verdict = replace(cell_verdict, verdict=str(Verdict.AMBIGUOUS), reason=few)
        return ComparedCell(cell, cell_verdict, rate=rate)
    cell_verdict = replace(
        cell_verdict,
        ratio_ci_low=interval.low,
        ratio_ci_high=interval.high,
        p_value=interval.p_value,
        smallest_effect=smallest_change(interval),
    )
    return ComparedCell(cell, cell_verdict, interval, rate)


def _interleaved(batches: ComparedCell, effect: PairEffect, cells: int) -> ComparedCell:
    """The case of a cell whose windows were interleaved with those of off x off.

    Args:
        batches: its case by whole batches.
        effect: that of its groups of neighbouring windows.
        cells: cells that have such an effect.
    """
    found, whole = effect.decisive, batches.cell_verdict
    windows = None if found is None else found.robust
    decides = deciding(windows, batches.interval, cells)
    beside: dict[str, Any] = {
        "interleaved": decides,
        "groups": len(effect.groups),
        "ratio_batches": whole.ratio_to_off,
        "ratio_batches_low": whole.ratio_ci_low,
        "ratio_batches_high": whole.ratio_ci_high,
    }
    if effect.work is not None:
        beside |= {
            "work_ratio": effect.work.value,
            "work_ratio_ci_low": effect.work.low,
            "work_ratio_ci_high": effect.work.high,
        }
    if decides == WINDOWS:
        assert windows is not None
        own = CellVerdict(
            verdict="",
            ratio_to_off=windows.value,
            ratio_ci_low=windows.low,
            ratio_ci_high=windows.high,
            compared=effect.clock,
            p_value=windows.p_value,
            smallest_effect=smallest_change(windows),
            **beside,
        )
        same = batches.cell.cell.drafts is None and batches.cell.parity in _SAME_TOKENS
        rate = rate_of_same_tokens(windows, effect.clock) if same else rate_of_groups(effect.groups)
        return ComparedCell(batches.cell, own, windows, rate)
    reason = whole.reason
    if windows is not None:
        reason = f"its windows ({windows.value:.4f}) and whole batches disagree, so these decide"
    elif batches.interval is None:
        few = f"its groups of windows are {len(effect.groups)}"
        reason = f"{few}, and an interval needs {MIN_GROUPS}"
    return replace(batches, cell_verdict=replace(whole, reason=reason, **beside))


def cell_verdicts(
    cells: Sequence[CellData],
    baseline: CellData | None,
    violations: Sequence[str | None],
    effects: Mapping[Cell, PairEffect] | None = None,
    *,
    checks_only: bool = False,
) -> list[CellVerdict]:
    """Verdicts of one pair's cells, in the order given.

    Args:
        cells: all cells of the pair, off x off and its A/A arm among them.
        baseline: off x off, or None if there is none to trust.
        violations: each cell's first count that does not add up, or None.
        effects: of the cells that were interleaved with off x off.
        checks_only: the run times nothing.
    """
    effects = effects or {}
    interleaved = sum(effect.decisive is not None for effect in effects.values())
    sound = {
        cell.cell: cell
        for cell, fault in zip(cells, violations, strict=True)
        if fault is None and cell.parity != Verdict.INVALID
    }
    cases = []
    for cell, violation in zip(cells, violations, strict=True):
        twin = cell.cell.stock_twin
        over = baseline if twin is None else sound.get(twin)
        own = effects.get(cell.cell)
        cases.append(
            compare_with_off(cell, over, violation, own, interleaved, checks_only=checks_only)
        )
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
            wide = ratio_at_once(case.interval, len(open_cases))
            adjusted = replace(
                case.cell_verdict,
                ratio_simultaneous_low=wide.low,
                ratio_simultaneous_high=wide.high,
                simultaneous_cells=len(open_cases),
                p_value_holm=next(p_values),
                smallest_effect=smallest_change(case.interval, len(open_cases)),
            )
            verdicts.append(_decide(replace(case, cell_verdict=adjusted), floor, len(open_cases)))
    return [
        replace(found, **_rate_fields(case, len(open_cases)))
        for found, case in zip(verdicts, cases, strict=True)
    ]


def _rate_fields(case: ComparedCell, cells: int) -> dict[str, Any]:
    """The fields of tokens per second; simultaneous bounds as the time's ratio has them."""
    if case.rate is None:
        return {}
    own = case.rate.ratio
    found: dict[str, Any] = {"ratio": own.value}
    found |= {"clock": case.rate.clock, "noise": case.rate.noise}
    if own.is_bounded:
        found |= {"ratio_low": own.low, "ratio_high": own.high}
        if case.interval is not None and not case.cell.is_aa:
            wide = ratio_at_once(own, cells)
            found |= {"ratio_simultaneous_low": wide.low, "ratio_simultaneous_high": wide.high}
    return {f"tokens_per_s_{name}": value for name, value in found.items()}


def _decide(case: ComparedCell, floor: float | None, compared_cells: int | None) -> CellVerdict:
    interval, adjusted = case.interval, case.cell_verdict.p_value_holm
    assert interval is not None
    # Interleaved windows show differences below 1 %. The A/A arm should show none that matters.
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
    interval: Interval, adjusted: float | None, floor: float | None, cells: int | None
) -> str:
    if interval.holds(1):
        return f"its interval holds 1 and reaches beyond {100 * DEFAULT_MARGIN:g} %"
    if adjusted is not None and adjusted >= SIGNIFICANCE:
        return f"its interval excludes 1, but not after correction for {cells} cells"
    assert floor is not None
    away = 100 * abs(interval.value - 1)
    return f"its {away:.2f} % are within the noise floor of {100 * floor:.2f} %"
