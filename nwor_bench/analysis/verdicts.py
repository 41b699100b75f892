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

Rules 1 to 6 are decided cell by cell. The paired ratio is that of neighbouring windows if the cell
was interleaved with off x off, unless whole batches disagree with it; else that of whole batches,
block by block.

The A/A arm's verdict uses only its own interval, without Holm's correction and the noise floor:
the arm is not a hypothesis of the run.

A timed `stage` cell whose SCV mode never fired keeps its NWOR verdict; `scv_status` and its reason
report the SCV mode.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from nwor_bench.records.types import Cell, CellResult, Verdict
from nwor_bench.stats.interval import Interval
from nwor_bench.stats.multiple import SIGNIFICANCE, holm, ratio_at_once
from nwor_bench.stats.paired import MIN_BLOCKS, paired_ratio
from nwor_bench.stats.robust import MIN_GROUPS

OPEN = ""
"""Verdict of a result that its ratio decides, until the ratios of all cells are known."""

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


def with_verdicts(
    cells: Sequence[CellData],
    results: Sequence[CellResult],
    baseline: CellData | None,
    violations: Sequence[str | None],
    effects: Mapping[Cell, PairEffect],
    *,
    checks_only: bool = False,
) -> list[CellResult]:
    """Results of one pair's cells with their ratios and verdicts, in the order given.

    Args:
        cells: all cells of the pair, off x off and its A/A arm among them.
        results: their counts and times.
        baseline: off x off, or None if there is none to trust.
        violations: each cell's first count that does not add up, or None.
        effects: of the cells that were interleaved with off x off.
        checks_only: the run times nothing.
    """
    interleaved = sum(effect.decisive is not None for effect in effects.values())
    sound = {
        cell.cell: cell
        for cell, fault in zip(cells, violations, strict=True)
        if fault is None and cell.parity != Verdict.INVALID
    }
    compared = []
    for cell, result, violation in zip(cells, results, violations, strict=True):
        known = _without_times(cell, violation, checks_only=checks_only)
        if known is not None:
            compared.append(replace(result, verdict=known[0], reason=known[1]))
            continue
        twin = cell.cell.stock_twin
        over = baseline if twin is None else sound.get(twin)
        effect = effects.get(cell.cell)
        compared.append(_compare_with_off(cell, result, over, effect, interleaved))
    return _corrected(cells, compared)


def _without_times(
    cell: CellData, violation: str | None, *, checks_only: bool
) -> tuple[str, str | None] | None:
    """Verdict and reason by the rules 1 to 5 above; None if none of them holds."""
    if cell.parity == Verdict.INVALID:
        where = f" ({cell.first_mismatch})" if cell.first_mismatch else ""
        return str(Verdict.INVALID), f"it changed the model's output{where}"
    if violation is not None:
        return str(Verdict.INVALID), violation
    if cell.is_baseline:
        return REFERENCE, None
    if (idle := idle_reason(cell)) is not None:
        return str(Verdict.INEFFECTIVE), idle
    if (missing := missing_checks(cell)) is not None:
        return str(Verdict.AMBIGUOUS), missing
    return (str(Verdict.CHECKED), None) if checks_only else None


def _ambiguous(result: CellResult, reason: str) -> CellResult:
    return replace(result, verdict=str(Verdict.AMBIGUOUS), reason=reason)


def _compare_with_off(
    cell: CellData,
    result: CellResult,
    baseline: CellData | None,
    effect: PairEffect | None,
    interleaved: int,
) -> CellResult:
    """The result with its ratio; the verdict stays open unless rule 6 gives it.

    Args:
        cell: the cell's data.
        result: its counts and times.
        baseline: off x off, or None if there is none to trust.
        effect: that of its windows, if it was interleaved with off x off.
        interleaved: cells that have such an effect.
    """
    if baseline is None:
        return _ambiguous(result, "there is no valid off x off to compare it with")
    times = pair_times(cell, baseline)
    if times is None:
        batches = _ambiguous(result, "no block was timed both in it and in off x off")
    else:
        batches = _by_batches(result, times)
    return batches if effect is None else _by_windows(cell, result, batches, effect, interleaved)


def _by_windows(
    cell: CellData, result: CellResult, batches: CellResult, effect: PairEffect, interleaved: int
) -> CellResult:
    """The result of a cell whose windows were interleaved; `batches` is that by whole batches."""
    windows = None if effect.decisive is None else effect.decisive.robust
    whole = batches.ratio if batches.verdict == OPEN else None
    beside: dict[str, Any] = {
        "interleaved": deciding(windows, whole, interleaved),
        "groups": len(effect.groups),
        "whole": batches.ratio,
        "work": effect.work,
    }
    if windows is not None and beside["interleaved"] == WINDOWS:
        same = cell.cell.drafts is None and cell.parity in _SAME_TOKENS
        rate = rate_of_same_tokens(windows, effect.clock) if same else rate_of_groups(effect.groups)
        beside |= _rate_fields(rate)
        return replace(result, ratio=windows, compared=effect.clock, **beside)
    reason = batches.reason
    if windows is not None:
        reason = f"its windows ({windows.value:.4f}) and whole batches disagree, so these decide"
    elif whole is None:
        few = f"its groups of windows are {len(effect.groups)}"
        reason = f"{few}, and an interval needs {MIN_GROUPS}"
    return replace(batches, reason=reason, **beside)


def _by_batches(result: CellResult, times: PairedTimes) -> CellResult:
    compared = replace(
        result,
        ratio=paired_ratio(times.treated, times.baseline),
        compared=times.compared,
        matched_windows=times.matched_windows,
        unmatched_windows=times.unmatched_windows,
        **_rate_fields(rate_of_blocks(times)),
    )
    if compared.ratio is not None and compared.ratio.is_bounded:
        return compared
    few = f"its timed blocks are {len(times.blocks)}, and an interval needs {MIN_BLOCKS}"
    return _ambiguous(compared, few)


def _rate_fields(rate: RateRatio | None) -> dict[str, Any]:
    if rate is None:
        return {}
    return {
        "rate": rate.ratio,
        "tokens_per_s_clock": rate.clock,
        "tokens_per_s_noise": rate.noise,
    }


def _corrected(cells: Sequence[CellData], results: Sequence[CellResult]) -> list[CellResult]:
    """The results with intervals and p values for all of them at once, and their verdicts."""
    both = list(zip(cells, results, strict=True))
    timed = [(cell, result.ratio) for cell, result in both if result.verdict == OPEN]
    floor = next((ratio.distance for cell, ratio in timed if cell.is_aa and ratio), None)
    ratios = [ratio for cell, ratio in timed if ratio and not cell.is_aa]
    p_values = iter(holm([ratio.p_value for ratio in ratios]))
    decided = []
    for cell, result in both:
        if result.verdict != OPEN or result.ratio is None:
            decided.append(result)
        elif cell.is_aa:
            decided.append(_decide(cell, result, None))
        else:
            sure = ratio_at_once(result.ratio, len(ratios))
            rate = result.rate if result.rate and result.rate.is_bounded else None
            wide = replace(
                result,
                sure=replace(sure, p_value=next(p_values)),
                simultaneous_cells=len(ratios),
                sure_rate=None if rate is None else ratio_at_once(rate, len(ratios)),
            )
            decided.append(_decide(cell, wide, floor))
    return decided


def _decide(cell: CellData, result: CellResult, floor: float | None) -> CellResult:
    interval = result.ratio
    adjusted = None if result.sure is None else result.sure.p_value
    assert interval is not None
    # Interleaved windows show differences below 1 %. The A/A arm should show none that matters.
    small_counts = result.interleaved == WINDOWS and result.arm is None
    shown = verdict(interval, p_adjusted=adjusted, noise_floor=floor, small_counts=small_counts)
    reasons = [result.reason] if result.reason else []
    if shown is Verdict.AMBIGUOUS:
        reasons.append(_why_ambiguous(interval, adjusted, floor, result.simultaneous_cells))
    idle = idle_scv(cell)
    if idle:
        reasons.append(f"{idle}; its NWOR result stands")
    return replace(result, verdict=str(shown), reason="; ".join(reasons) or None)


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
