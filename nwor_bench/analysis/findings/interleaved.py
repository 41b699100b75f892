"""Findings about windows that took turns: do their ratios hold? Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import expm1

from nwor_bench.analysis.effects import (
    WINDOWS,
    PairEffect,
    carries_over,
    correlation_of_clocks,
    mean_disagrees,
)
from nwor_bench.analysis.findings.finding import (
    HOST_REMEDY,
    Finding,
    FindingKind,
    Severity,
)
from nwor_bench.analysis.statistics import SIGNIFICANCE
from nwor_bench.instruments.robust import Estimate, RatioInterval
from nwor_bench.records.cell import Cell
from nwor_bench.records.fallback_reasons import in_words
from nwor_bench.records.types import CellResult

TOGETHER = 0.75
"""Correlation of both clocks from which the host sets the pace. On H200s it was -0.04 to 0.59 in
six settings that the GPU paced, 0.77 to 1 in 20 runs on a busy host (sweeps/studies/interleave)."""

MANY_LEFT_OUT = 0.05
"""Share of groups that may be left out before it is said."""

NEIGHBOURS_COMPARED = "Nothing to do: neighbouring windows are compared"

_CLOCK_KINDS = (FindingKind.THROTTLING, FindingKind.CLOCKS)


def interleaved_findings(
    effects: Mapping[Cell, PairEffect], cells: Sequence[CellResult]
) -> Iterator[Finding]:
    """What weakens ratios of neighbouring windows; `effects` are those over off x off."""
    compared = [cell for cell in cells if cell.interleaved and cell.ratio_to_off is not None]
    count = sum(effect.decisive is not None for effect in effects.values())
    for cell in compared:
        effect = effects.get(cell.cell)
        if effect is not None:
            yield from _of_cell(cell, effect, count)
    yield from _pace(effects.values())


def with_borne_warnings_as_notes(
    found: Sequence[Finding],
    effects: Mapping[Cell, PairEffect],
    cells: Sequence[CellResult],
) -> list[Finding]:
    """The findings, with notes for warnings that ratios of neighbouring windows bear.

    Times that were not steady are borne by every such ratio; clocks that moved, where the ratios
    themselves show it.
    """
    if not _windows_decide(cells):
        return list(found)
    shown: dict[FindingKind, str] = {FindingKind.WARMUP: NEIGHBOURS_COMPARED + "."}
    if any(finding.kind in _CLOCK_KINDS for finding in found):
        clocks = _clocks_do_not_matter(effects, cells)
        shown |= dict.fromkeys(_CLOCK_KINDS, clocks) if clocks is not None else {}
    return [
        replace(finding, severity=Severity.NOTE, remedy=shown[finding.kind])
        if finding.kind in shown
        else finding
        for finding in found
    ]


def _windows_decide(cells: Sequence[CellResult]) -> bool:
    """True if every ratio of the run is one of neighbouring windows."""
    compared = [cell for cell in cells if cell.ratio_to_off is not None]
    return bool(compared) and all(cell.interleaved == WINDOWS for cell in compared)


def depends_on_clock(effect: PairEffect, cells: int) -> bool:
    """True if the ratio goes with the clock or with throttling (Bonferroni over the cells)."""
    found = effect.conditions
    return any(
        slope is not None and slope.p_value * cells < SIGNIFICANCE
        for slope in (found.per_100_mhz, found.if_throttled)
    )


def _clocks_do_not_matter(
    effects: Mapping[Cell, PairEffect], cells: Sequence[CellResult]
) -> str | None:
    """By how much a ratio goes with the clock at most; None if one does, or it is not known."""
    own = [effects[cell.cell] for cell in cells if cell.ratio_to_off is not None]
    slopes: list[tuple[Cell, Estimate]] = []
    for effect in own:
        state = effect.conditions
        known = [slope for slope in (state.per_100_mhz, state.if_throttled) if slope is not None]
        if depends_on_clock(effect, len(own)) or not known:
            return None
        slopes.append((effect.pair.treated, known[0]))
    cell, widest = max(slopes, key=lambda each: abs(each[1].value) + each[1].half_width())
    unit = "for 100 MHz" if effects[cell].conditions.per_100_mhz else "where it is throttled"
    return (
        f"{NEIGHBOURS_COMPARED}, and no ratio goes with the clock (at most "
        f"{cell.label}, by {slope_words(widest)} {unit})."
    )


def slope_words(slope: Estimate) -> str:
    """`+0.02 % [-0.03, 0.07]`."""
    half = slope.half_width()
    low, high = (100 * expm1(end) for end in (slope.value - half, slope.value + half))
    return f"{100 * expm1(slope.value):+.2f} % [{low:.2f}, {high:.2f}]"


def _pace(effects: Iterable[PairEffect]) -> Iterator[Finding]:
    """Does the host set the pace? It does so for all cells or for none."""
    found = {effect.pair.treated: correlation_of_clocks(effect.groups) for effect in effects}
    known = {cell: together for cell, together in found.items() if together is not None}
    if not known:
        return
    cell, least = min(known.items(), key=lambda each: each[1])
    if least < TOGETHER:
        return
    yield Finding(
        FindingKind.HOST_PACE,
        Severity.WARNING,
        "The host sets the pace: groups of windows that took longer on its clock did so on the "
        f"GPU's too (rank correlation {least:.2f} or more, {cell.label}). The GPU waited, so that "
        "a difference in its own work may not show.",
        HOST_REMEDY,
    )


def _of_cell(cell: CellResult, effect: PairEffect, cells: int) -> Iterator[Finding]:
    name, found = cell.label, effect.decisive
    if found is not None and cell.interleaved != WINDOWS:
        yield Finding(
            FindingKind.WINDOWS_DISAGREE,
            Severity.WARNING,
            f"{name}: neighbouring windows give {_interval(found.robust)}, whole batches "
            f"{_bounds(cell.ratio_batches, cell.ratio_batches_low, cell.ratio_batches_high)}. "
            "The intervals do not overlap, so whole batches decide.",
            "Measure with --interleave batches, and report the disagreement.",
            name,
        )
    if found is not None and carries_over(effect, cells) and effect.carry_over is not None:
        yield Finding(
            FindingKind.CARRY_OVER,
            Severity.WARNING,
            f"{name}: its ratio depends on how long runs of windows are. In runs of two it is "
            f"{_interval(effect.carry_over)} times that in long ones.",
            "A mode leaves something behind in the window after it: measure with --interleave "
            "batches.",
            name,
        )
    if found is not None and mean_disagrees(effect, cells):
        yield Finding(
            FindingKind.LONG_WINDOWS,
            Severity.WARNING,
            f"{name}: a few long windows carry a difference. The mean ratio is "
            f"{_interval(found.mean)}, without their weight it is {_interval(found.robust)}.",
            "Look for what makes single windows long (windows.csv); the verdict leaves them out.",
            name,
        )
    if found is not None and depends_on_clock(effect, cells):
        yield _clock_effect(name, effect)
    left_out = sum(effect.left_out.values())
    if left_out > MANY_LEFT_OUT * (left_out + len(effect.groups)):
        reasons = ", ".join(f"{n} {in_words(why)}" for why, n in sorted(effect.left_out.items()))
        yield Finding(
            FindingKind.GROUPS_LEFT_OUT,
            Severity.NOTE,
            f"{name}: groups of windows left out: {left_out} of {left_out + len(effect.groups)} "
            f"({reasons}).",
            "Nothing to do while the interval is narrow enough.",
            name,
        )


def _clock_effect(name: str, effect: PairEffect) -> Finding:
    parts = []
    if effect.conditions.per_100_mhz is not None:
        parts.append(f"{slope_words(effect.conditions.per_100_mhz)} for 100 MHz more")
    if effect.conditions.if_throttled is not None:
        parts.append(f"{slope_words(effect.conditions.if_throttled)} while throttled")
    return Finding(
        FindingKind.CLOCK_EFFECT,
        Severity.WARNING,
        f"{name}: its ratio goes with the GPU's clock: {', '.join(parts)}.",
        "The ratio is that of the clocks of this run; lock them (nvidia-smi --lock-gpu-clocks).",
        name,
    )


def _interval(ratio: RatioInterval) -> str:
    return _bounds(ratio.ratio, ratio.low, ratio.high)


def _bounds(ratio: float | None, low: float | None, high: float | None) -> str:
    return f"{ratio:.4f} [{low:.4f}, {high:.4f}]"
