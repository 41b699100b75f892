"""Windows against whole batches, and against themselves: which of two estimates decides?"""

from math import log

from scipy import stats

from nwor_bench.analysis.interleaved.effects import PairEffect
from nwor_bench.analysis.statistics import CONFIDENCE, SIGNIFICANCE, RatioInterval

WINDOWS = "windows"
BATCHES = "batches"


def deciding(windows: RatioInterval | None, batches: RatioInterval | None, cells: int) -> str:
    """WINDOWS, unless there is no estimate of them or whole batches disagree with it.

    Args:
        windows: the ratio from groups of neighbouring windows.
        batches: the same cell's ratio from whole batches.
        cells: compared cells: in 19 of 20 runs without a real difference none disagrees.
    """
    if windows is None:
        return BATCHES
    if batches is None or not disagree(windows, batches, cells):
        return WINDOWS
    return BATCHES


def disagree(one: RatioInterval, other: RatioInterval, cells: int = 1) -> bool:
    """True if the intervals do not overlap; each is widened so that those of all cells hold."""
    apart = abs(log(one.ratio) - log(other.ratio))
    return apart > _half(one, cells) + _half(other, cells)


def mean_disagrees(effect: PairEffect, cells: int = 1) -> bool:
    """True if the mean lies apart from the robust location: a few windows carry a difference."""
    found = effect.decisive
    return found is not None and disagree(found.robust, found.mean, cells)


def carries_over(effect: PairEffect, cells: int = 1) -> bool:
    """True if the effect depends on the length of run (Bonferroni over the compared cells)."""
    found = effect.carry_over
    return found is not None and found.p_value is not None and found.p_value * cells < SIGNIFICANCE


def _half(interval: RatioInterval, cells: int) -> float:
    """Half the log ratio's interval that holds for so many cells at once; infinite if unknown."""
    if interval.standard_error is None:
        return float("inf")
    confidence = 1 - (1 - CONFIDENCE) / cells
    return float(stats.t.ppf((1 + confidence) / 2, interval.free)) * interval.standard_error
