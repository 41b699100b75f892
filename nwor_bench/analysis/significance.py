"""Which time ratios count as differences: correction for many cells, and the verdict.

Pure functions on plain numbers and on the intervals of `statistics`.
"""

from collections.abc import Sequence

import numpy as np
from scipy import stats

from nwor_bench.analysis.statistics import RatioInterval
from nwor_bench.records.types import Verdict

DEFAULT_MARGIN = 0.01
"""Differences within this fraction count as none."""

SIGNIFICANCE = 0.05
"""Chance of calling a difference where there is none, over all cells of a run (Holm)."""

POWER = 0.8
"""Chance of detecting an effect of size `smallest_effect`."""


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p values, in the order given (Scandinavian Journal of Statistics 6, 1979).

    Calling only those below alpha keeps the chance of any false call below alpha.
    """
    count = len(p_values)
    adjusted = [0.0] * count
    highest = 0.0
    for rank, place in enumerate(sorted(range(count), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (count - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted


def smallest_effect(interval: RatioInterval, cells: int = 1) -> float | None:
    """The smallest relative effect that this many blocks with this noise detect.

    exp((t_{1 - alpha / 2m} + t_{0.8}) standard error) - 1, with n - 1 degrees of freedom, alpha
    0.05 and m compared cells: a true effect of this size is called in 80 % of such runs (Cohen,
    Statistical Power Analysis, 1988, with Bonferroni's bound, Holm's hardest case). None where
    the standard error is not known.
    """
    if interval.standard_error is None:
        return None
    free = interval.free
    quantiles = stats.t.ppf(1 - SIGNIFICANCE / 2 / cells, free) + stats.t.ppf(POWER, free)
    return float(np.expm1(quantiles * interval.standard_error))


def verdict(
    interval: RatioInterval | None,
    margin: float = DEFAULT_MARGIN,
    *,
    p_adjusted: float | None = None,
    noise_floor: float | None = None,
    small_counts: bool = False,
) -> Verdict:
    """The verdict from an interval of time ratios. The first rule that holds decides:

    1. No interval: AMBIGUOUS.
    2. The whole interval is within 1 +- margin: SAME, even if it excludes 1, because such a
       difference is too small to matter. With `small_counts` rule 3 comes first.
    3. The interval excludes 1, the p value adjusted for the number of cells (if given) is below
       0.05, and the ratio's distance from 1 exceeds the noise floor (if given): FASTER below 1,
       SLOWER above.
    4. Otherwise AMBIGUOUS.
    """
    if interval is None:
        return Verdict.AMBIGUOUS
    certain = p_adjusted is None or p_adjusted < SIGNIFICANCE
    beyond = noise_floor is None or abs(interval.ratio - 1) > noise_floor
    differs = certain and beyond and not interval.low <= 1 <= interval.high
    is_small = 1 - margin <= interval.low and interval.high <= 1 + margin
    if is_small and not (small_counts and differs):
        return Verdict.SAME
    if differs:
        return Verdict.FASTER if interval.high < 1 else Verdict.SLOWER
    return Verdict.AMBIGUOUS
