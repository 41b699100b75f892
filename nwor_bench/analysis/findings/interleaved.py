"""Findings about interleaved windows: can their ratios be trusted? Pure."""

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
from nwor_bench.analysis.findings.table import Finding, FindingKind, Severity, found
from nwor_bench.records.cell import Cell
from nwor_bench.records.types import CellResult
from nwor_bench.stats.interval import Interval
from nwor_bench.stats.multiple import SIGNIFICANCE

TOGETHER = 0.75
"""Correlation of both clocks from which a run counts as host-bound. On H200s it was -0.04 to 0.59
in six settings that were not, 0.77 to 1 in 20 runs on a busy host (sweeps/studies/interleave)."""

NEIGHBOURS = "Nothing to do. Neighbouring windows are compared"

_CLOCK_KINDS = (FindingKind.THROTTLING, FindingKind.CLOCKS)


def interleaved_findings(
    effects: Mapping[Cell, PairEffect], cells: Sequence[CellResult]
) -> Iterator[Finding]:
    """Weaknesses of ratios of neighbouring windows; `effects` are those over off x off."""
    count = sum(effect.decisive is not None for effect in effects.values())
    for cell in cells:
        effect = effects.get(cell.cell)
        if effect is not None and cell.interleaved and cell.ratio_to_off is not None:
            yield from _of_cell(cell, effect, count)
    yield from _pace(effects.values())


def unaffected_as_notes(
    every: Sequence[Finding], effects: Mapping[Cell, PairEffect], cells: Sequence[CellResult]
) -> list[Finding]:
    """The findings, with warnings as notes if ratios of neighbouring windows are unaffected.

    Unsteady times affect no such ratio; changed clocks none if the ratios themselves show it.
    """
    compared = [cell for cell in cells if cell.ratio_to_off is not None]
    if not compared or any(cell.interleaved != WINDOWS for cell in compared):
        return list(every)
    remedies = {FindingKind.WARMUP: f"{NEIGHBOURS}."}
    if any(finding.kind in _CLOCK_KINDS for finding in every):
        clocks = _clocks_do_not_matter([effects[cell.cell] for cell in compared])
        remedies |= dict.fromkeys(_CLOCK_KINDS, clocks) if clocks is not None else {}
    return [
        replace(finding, severity=Severity.NOTE, remedy=remedies[finding.kind])
        if finding.kind in remedies
        else finding
        for finding in every
    ]


def _slopes(effect: PairEffect) -> list[tuple[Interval, str]]:
    """How the ratio changes with the clock and with throttling, as far as known."""
    state = effect.conditions
    known = ((state.per_100_mhz, "for 100 MHz more"), (state.if_throttled, "while throttled"))
    return [(slope, unit) for slope, unit in known if slope is not None]


def _depends_on_clock(effect: PairEffect, cells: int) -> bool:
    """True if the ratio depends on the clock or on throttling (Bonferroni over the cells)."""
    return any(slope.p_value * cells < SIGNIFICANCE for slope, _ in _slopes(effect))


def _clocks_do_not_matter(effects: Sequence[PairEffect]) -> str | None:
    """The largest dependence of a ratio on the clock; None if one matters, or it is unknown."""
    widest: tuple[float, str] = (0.0, "")
    for effect in effects:
        slopes = _slopes(effect)
        if not slopes or _depends_on_clock(effect, len(effects)):
            return None
        slope, unit = slopes[0]
        text = f"{effect.pair.treated.label}, by {_slope_words(slope)} {unit}"
        widest = max(widest, (abs(slope.value) + slope.half_width, text))
    return f"{NEIGHBOURS}, and no ratio depends on the clock (at most {widest[1]})."


def _slope_words(slope: Interval) -> str:
    """`+0.02 % [-0.03, 0.07]`."""
    half = slope.half_width
    low, high = (100 * expm1(end) for end in (slope.value - half, slope.value + half))
    return f"{100 * expm1(slope.value):+.2f} % [{low:.2f}, {high:.2f}]"


def _pace(effects: Iterable[PairEffect]) -> Iterator[Finding]:
    """A run is host-bound for all cells or for none."""
    every = {effect.pair.treated: correlation_of_clocks(effect.groups) for effect in effects}
    known = [(together, cell.label) for cell, together in every.items() if together is not None]
    if known and min(known)[0] >= TOGETHER:
        least, name = min(known)
        yield found(FindingKind.HOST_PACE, least=least, name=name)


def _of_cell(cell: CellResult, effect: PairEffect, cells: int) -> Iterator[Finding]:
    name, ratio = cell.label, effect.decisive
    if ratio is not None:
        if cell.interleaved != WINDOWS:
            whole = (cell.ratio_batches, cell.ratio_batches_low, cell.ratio_batches_high)
            windows, batches = _interval(ratio.robust), _bounds(*whole)
            yield found(FindingKind.WINDOWS_DISAGREE, name, windows=windows, batches=batches)
        if carries_over(effect, cells) and effect.carry_over is not None:
            yield found(FindingKind.CARRY_OVER, name, ratio=_interval(effect.carry_over))
        if mean_disagrees(effect, cells):
            mean, robust = _interval(ratio.mean), _interval(ratio.robust)
            yield found(FindingKind.LONG_WINDOWS, name, mean=mean, robust=robust)
        if _depends_on_clock(effect, cells):
            slopes = ", ".join(f"{_slope_words(slope)} {unit}" for slope, unit in _slopes(effect))
            yield found(FindingKind.CLOCK_EFFECT, name, slopes=slopes)


def _interval(ratio: Interval) -> str:
    return _bounds(ratio.value, ratio.low, ratio.high)


def _bounds(ratio: float | None, low: float | None, high: float | None) -> str:
    return f"{ratio:.4f} [{low:.4f}, {high:.4f}]"
