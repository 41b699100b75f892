"""Windows against whole batches, and against themselves: which of two estimates decides?"""

from collections import Counter
from math import expm1, log

from nwor_bench.analysis.interleaved.effects import PairEffect
from nwor_bench.analysis.interleaved.robust import LEAST_APART
from nwor_bench.analysis.significance import SIGNIFICANCE
from nwor_bench.analysis.statistics import RatioInterval, simultaneous_bounds
from nwor_bench.records.types import Interleave

WINDOWS = Interleave.WINDOWS.value
BATCHES = Interleave.BATCHES.value


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
    if one.standard_error is None or other.standard_error is None:
        return False
    low, high = simultaneous_bounds(one, cells)
    other_low, other_high = simultaneous_bounds(other, cells)
    return high < other_low or other_high < low


def visible_bias(
    windows: RatioInterval | None, batches: RatioInterval | None, cells: int = 1
) -> float | None:
    """The bias from which on `disagree` sees it in half of the runs or more, a fraction.

    Both half widths together, on the log scale. None if one estimate has no standard error.
    """
    if windows is None or batches is None:
        return None
    if windows.standard_error is None or batches.standard_error is None:
        return None
    tops = ((each, simultaneous_bounds(each, cells)[1]) for each in (windows, batches))
    return expm1(sum(log(top / each.ratio) for each, top in tops))


def mean_disagrees(effect: PairEffect, cells: int = 1) -> bool:
    """True if the mean lies apart from the robust location: a few windows carry a difference."""
    found = effect.decisive
    return found is not None and disagree(found.robust, found.mean, cells)


def carries_over(effect: PairEffect, cells: int = 1) -> bool:
    """True if the effect depends on the length of run (Bonferroni over the compared cells)."""
    found = effect.carry_over
    return found is not None and found.p_value is not None and found.p_value * cells < SIGNIFICANCE


def why_carry_over_untested(effect: PairEffect) -> str | None:
    """Why the groups carry no slope against the length of runs; None if they do."""
    if effect.carry_over is not None:
        return None
    lengths_run = Counter(group.run_length for group in effect.groups)
    own = [f"{groups} of {length}" for length, groups in sorted(lengths_run.items())]
    lengths = ", ".join(own) or "none"
    return f"groups by windows of a run: {lengths}; {LEAST_APART} beside the commonest are needed"
