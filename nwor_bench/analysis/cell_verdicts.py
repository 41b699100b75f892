"""Verdict of each cell. The first rule that holds decides:

1. INVALID: its output differed from that of off x off in any batch, or its counts do not add up.
   The cell gets no times.
2. "reference": the cell is off x off itself.
3. INEFFECTIVE: its mode never fired. NWOR `stage` staged nothing, `control` never acted or, with
   NWOR off, the SCV mode validated nothing as asked; or the gate proved that its SCV mode cannot
   fire on this machine, so that it was not timed. The cell gets no ratio.
4. AMBIGUOUS: nothing can be compared (no valid off x off, too few blocks, output not checked).
5. Otherwise `significance.verdict` decides from the paired ratio, its p value adjusted for the
   number of compared cells (Holm), and the noise floor (the A/A arm's largest distance from 1).

The paired ratio is that of neighbouring windows where the cell took turns with off x off within
batches, unless whole batches disagree with it (`interleaved.agreement`); else that of whole
batches, block by block.

The A/A arm's verdict uses its own interval alone, without Holm's correction and the noise floor:
the arm is not a hypothesis of the run.

A timed `stage` cell whose SCV mode never fired keeps its NWOR verdict; `scv_status` and its reason
report the SCV mode.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nwor_bench.analysis.cell_data import REFERENCE, CellData
from nwor_bench.analysis.interleaved.agreement import WINDOWS, deciding
from nwor_bench.analysis.interleaved.effects import PairEffect
from nwor_bench.analysis.paired import PairedTimes, pair_times
from nwor_bench.analysis.significance import (
    DEFAULT_MARGIN,
    SIGNIFICANCE,
    holm,
    signed_rank_p,
    smallest_effect,
    verdict,
)
from nwor_bench.analysis.statistics import (
    MIN_BLOCKS,
    RatioInterval,
    block_bootstrap,
    geometric_mean_ratio,
    log_ratios,
    outlying,
    paired_ratio,
    simultaneous_bounds,
)
from nwor_bench.records.types import Cell, NworMode, Verdict


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
    wilcoxon_p: float | None = None
    wilcoxon_p_holm: float | None = None
    smallest_effect: float | None = None
    outlier_blocks: tuple[int, ...] = ()
    bootstrap_low: float | None = None
    bootstrap_high: float | None = None
    ratio_simultaneous_low: float | None = None
    ratio_simultaneous_high: float | None = None
    simultaneous_cells: int | None = None
    interleaved: str | None = None
    groups: int | None = None
    groups_left_out: int | None = None
    ratio_batches: float | None = None
    ratio_batches_low: float | None = None
    ratio_batches_high: float | None = None
    ratio_host: float | None = None
    ratio_host_low: float | None = None
    ratio_host_high: float | None = None
    ratio_mean: float | None = None
    ratio_mean_low: float | None = None
    ratio_mean_high: float | None = None


@dataclass(frozen=True)
class _Case:
    """A cell's result before Holm's correction."""

    cell: CellData
    cell_verdict: CellVerdict
    interval: RatioInterval | None = None


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
        _prepare(cell, baseline, violation, effects.get(cell.cell), in_turn)
        for cell, violation in zip(cells, violations, strict=True)
    ]
    floor = next((c.interval.distance for c in cases if c.cell.is_aa and c.interval), None)
    open_cases = [c for c in cases if c.interval and not c.cell.is_aa]
    p_values = iter(holm([c.cell_verdict.p_value or 0.0 for c in open_cases]))
    ranked = [p for c in open_cases if (p := c.cell_verdict.wilcoxon_p) is not None]
    ranks = iter(holm(ranked))
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
                wilcoxon_p_holm=(None if case.cell_verdict.wilcoxon_p is None else next(ranks)),
                smallest_effect=smallest_effect(case.interval, len(open_cases)),
            )
            verdicts.append(_decide(replace(case, cell_verdict=adjusted), floor, len(open_cases)))
    return verdicts


def _prepare(
    cell: CellData,
    baseline: CellData | None,
    violation: str | None,
    effect: PairEffect | None,
    in_turn: int,
) -> _Case:
    if cell.parity == Verdict.INVALID:
        where = f" ({cell.first_mismatch})" if cell.first_mismatch else ""
        text = f"it changed the model's output{where}"
        return _Case(cell, CellVerdict(str(Verdict.INVALID), text))
    if violation is not None:
        return _Case(cell, CellVerdict(str(Verdict.INVALID), violation))
    if cell.is_baseline:
        return _Case(cell, CellVerdict(REFERENCE))
    idle = _idle_reason(cell)
    if idle is not None:
        return _Case(cell, CellVerdict(str(Verdict.INEFFECTIVE), idle))
    if baseline is None:
        return _ambiguous(cell, "there is no valid off x off to compare it with")
    times = pair_times(cell, baseline)
    if times is None:
        case = _ambiguous(cell, "no block was timed both in it and in off x off")
    else:
        case = _compare(cell, times)
    if effect is not None:
        case = _in_turn(case, effect, in_turn)
    if case.interval is not None and cell.parity is None:
        text = "its output was not checked"
        unchecked = replace(case.cell_verdict, verdict=str(Verdict.AMBIGUOUS), reason=text)
        return _Case(cell, unchecked)
    return case


def _ambiguous(cell: CellData, reason: str) -> _Case:
    return _Case(cell, CellVerdict(str(Verdict.AMBIGUOUS), reason))


def _compare(cell: CellData, times: PairedTimes) -> _Case:
    cell_verdict = CellVerdict(
        verdict="",
        ratio_to_off=geometric_mean_ratio(times.treated, times.baseline),
        compared=times.compared,
        matched_windows=times.matched_windows,
        unmatched_windows=times.unmatched_windows,
    )
    interval = paired_ratio(times.treated, times.baseline)
    if interval is None:
        few = f"its timed blocks are {len(times.blocks)}, and an interval needs {MIN_BLOCKS}"
        return _Case(cell, replace(cell_verdict, verdict=str(Verdict.AMBIGUOUS), reason=few))
    bootstrapped = block_bootstrap(times.treated, times.baseline) or (None, None)
    away = outlying(log_ratios(times.treated, times.baseline).tolist())
    cell_verdict = replace(
        cell_verdict,
        ratio_ci_low=interval.low,
        ratio_ci_high=interval.high,
        p_value=interval.p_value,
        wilcoxon_p=signed_rank_p(times.treated, times.baseline),
        smallest_effect=smallest_effect(interval),
        outlier_blocks=tuple(times.blocks[place] for place in away),
        bootstrap_low=bootstrapped[0],
        bootstrap_high=bootstrapped[1],
    )
    return _Case(cell, cell_verdict, interval)


def _in_turn(batches: _Case, effect: PairEffect, cells: int) -> _Case:
    """The cell's case where its windows alternated with those of off x off.

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
        "groups_left_out": sum(effect.left_out.values()),
        "ratio_batches": whole.ratio_to_off,
        "ratio_batches_low": whole.ratio_ci_low,
        "ratio_batches_high": whole.ratio_ci_high,
        **_fields("ratio_host", None if effect.host is None else effect.host.robust),
        **_fields("ratio_mean", None if found is None else found.mean),
    }
    if decides == WINDOWS:
        assert windows is not None
        own = CellVerdict(
            verdict="",
            ratio_to_off=windows.ratio,
            ratio_ci_low=windows.low,
            ratio_ci_high=windows.high,
            compared=effect.clock,
            p_value=windows.p_value,
            smallest_effect=smallest_effect(windows),
            **beside,
        )
        return _Case(batches.cell, own, windows)
    reason = whole.reason
    if windows is not None:
        reason = f"its windows ({windows.ratio:.4f}) and whole batches disagree, so these decide"
    return replace(batches, cell_verdict=replace(whole, reason=reason, **beside))


def _fields(name: str, interval: RatioInterval | None) -> dict[str, float]:
    """The fields of a CellVerdict that an interval fills."""
    if interval is None:
        return {}
    return {name: interval.ratio, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _decide(case: _Case, floor: float | None, compared_cells: int | None) -> CellVerdict:
    interval, adjusted = case.interval, case.cell_verdict.p_value_holm
    assert interval is not None
    # Windows in turn tell differences of less than 1 %. The A/A arm is to show none that matters.
    small_counts = case.cell_verdict.interleaved == WINDOWS and case.cell.cell.arm is None
    found = verdict(interval, p_adjusted=adjusted, noise_floor=floor, small_counts=small_counts)
    reasons = [case.cell_verdict.reason] if case.cell_verdict.reason else []
    if found is Verdict.AMBIGUOUS:
        reasons.append(_why_ambiguous(interval, adjusted, floor, compared_cells))
    idle_scv = _idle_scv(case.cell)
    if idle_scv:
        reasons.append(f"{idle_scv}; its NWOR result stands")
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


def _idle_reason(cell: CellData) -> str | None:
    """Why the cell's mode never fired, or None if it did or nothing was timed yet."""
    if cell.cannot_fire is not None and not cell.measured:
        return cell.cannot_fire
    if cell.cell.nwor_mode is NworMode.CONTROL:
        acted = cell.controlled or not cell.measured
        return None if acted else "attention read no draft token from the window"
    if cell.cell.nwor_mode is not NworMode.STAGE:
        return _idle_scv(cell)
    if cell.staged or not cell.measured:
        return None
    if not cell.draft_tokens:
        return "no draft token was proposed, so nothing was staged"
    return f"no draft token was staged{_most_common(cell.fallbacks)}"


def _idle_scv(cell: CellData) -> str | None:
    if cell.scv_status != Verdict.INEFFECTIVE:
        return None
    return f"SCV validated no window as asked{_most_common(cell.scv_fallbacks)}"


def _most_common(reasons: dict[str, int]) -> str:
    ranked = Counter(reasons).most_common(1)
    return f" (most often: {ranked[0][0]})" if ranked else ""
