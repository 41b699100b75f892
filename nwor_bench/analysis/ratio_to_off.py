"""One cell compared with off x off, before the run's other cells and its noise floor count.

The paired ratio is that of neighbouring windows where the cell took turns with off x off within
batches, unless whole batches disagree with it (`interleaved.agreement`); else that of whole
batches, block by block.
"""

from dataclasses import dataclass, replace
from typing import Any

from nwor_bench.analysis.cell_data import REFERENCE, CellData, values_compared
from nwor_bench.analysis.idle_modes import idle_reason
from nwor_bench.analysis.interleaved.agreement import WINDOWS, deciding, visible_bias
from nwor_bench.analysis.interleaved.effects import PairEffect
from nwor_bench.analysis.interleaved.robust import MIN_GROUPS
from nwor_bench.analysis.paired import PairedTimes, pair_times
from nwor_bench.analysis.significance import smallest_effect
from nwor_bench.analysis.statistics import (
    MIN_BLOCKS,
    RatioInterval,
    geometric_mean_ratio,
    log_ratios,
    outlying,
    paired_ratio,
)
from nwor_bench.records.types import Verdict

VALUES_NOT_COMPARED = (
    "the gate did not compare its K/V with mode off's, and with synthetic acceptance nothing else "
    "shows wrong values"
)


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
    outlier_blocks: tuple[int, ...] = ()
    ratio_simultaneous_low: float | None = None
    ratio_simultaneous_high: float | None = None
    simultaneous_cells: int | None = None
    interleaved: str | None = None
    groups: int | None = None
    groups_left_out: int | None = None
    ratio_batches: float | None = None
    ratio_batches_low: float | None = None
    ratio_batches_high: float | None = None
    visible_bias: float | None = None


@dataclass(frozen=True)
class ComparedCell:
    """A cell's result before Holm's correction."""

    cell: CellData
    cell_verdict: CellVerdict
    interval: RatioInterval | None = None
    """That of the paired ratio; None where the verdict needs none (rules 1 to 4)."""


def compare_with_off(
    cell: CellData,
    baseline: CellData | None,
    violation: str | None,
    effect: PairEffect | None,
    in_turn: int,
) -> ComparedCell:
    """Compare a cell, or give it the verdict of the rules 1 to 4 of `cell_verdicts`.

    Args:
        cell: the cell's data.
        baseline: off x off, or None if there is none to trust.
        violation: the cell's first count that does not add up, or None.
        effect: that of its windows, if it took turns with off x off.
        in_turn: cells that have such an effect.
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
    if not values_compared(cell):
        return _ambiguous(cell, VALUES_NOT_COMPARED)
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
        return ComparedCell(cell, unchecked)
    return case


def _ambiguous(cell: CellData, reason: str) -> ComparedCell:
    return ComparedCell(cell, CellVerdict(str(Verdict.AMBIGUOUS), reason))


def _compare(cell: CellData, times: PairedTimes) -> ComparedCell:
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
        return ComparedCell(cell, replace(cell_verdict, verdict=str(Verdict.AMBIGUOUS), reason=few))
    away = outlying(log_ratios(times.treated, times.baseline).tolist())
    cell_verdict = replace(
        cell_verdict,
        ratio_ci_low=interval.low,
        ratio_ci_high=interval.high,
        p_value=interval.p_value,
        smallest_effect=smallest_effect(interval),
        outlier_blocks=tuple(times.blocks[place] for place in away),
    )
    return ComparedCell(cell, cell_verdict, interval)


def _in_turn(batches: ComparedCell, effect: PairEffect, cells: int) -> ComparedCell:
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
        "visible_bias": visible_bias(windows, batches.interval, cells),
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
        return ComparedCell(batches.cell, own, windows)
    reason = whole.reason
    if windows is not None:
        reason = f"its windows ({windows.ratio:.4f}) and whole batches disagree, so these decide"
    elif batches.interval is None:
        few = f"its groups of windows are {len(effect.groups)}"
        reason = f"{few}, and an interval needs {MIN_GROUPS}"
    return replace(batches, cell_verdict=replace(whole, reason=reason, **beside))
