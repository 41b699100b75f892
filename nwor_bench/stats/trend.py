"""Trend tests of a series of times, for warm-up and drift. Pure.

The trend is Mann and Kendall's (Kendall's tau against time; exact for short series without
ties, scipy.stats.kendalltau), its size that of Theil and Sen's slope (scipy.stats.theilslopes).
Both use ranks and medians, so one outlier moves neither.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_DRIFT = 0.01
"""Largest drift over the whole series that does not matter, even if significant."""

MAX_SPREAD = 0.10
"""Longest over shortest of the steady batches, less 1."""

_SIGNIFICANCE = 0.05


@dataclass(frozen=True)
class Trend:
    """A series' drift from its first to its last value, as a fraction of its median."""

    p_value: float
    drift: float

    @property
    def matters(self) -> bool:
        """True if there is a trend (p < 0.05) of more than MAX_DRIFT."""
        return self.p_value < _SIGNIFICANCE and abs(self.drift) > MAX_DRIFT


def trend(values: Sequence[float]) -> Trend:
    """The trend of positive values in the order of measurement.

    Fewer than three values, or equal values, have no trend (p = 1).
    """
    count = len(values)
    if count < 3 or len(set(values)) == 1:
        return Trend(1.0, 0.0)
    places = np.arange(count)
    from scipy import stats  # here, since refusals of bad input must not wait for it

    p_value = float(stats.kendalltau(places, values).pvalue)
    slope = float(stats.theilslopes(values, places).slope)
    return Trend(p_value, slope * (count - 1) / float(np.median(values)))


def not_steady(values: Sequence[float], lookback: int) -> str | None:
    """Why the last `lookback` values are not steady, in words; None if they are.

    Steady means: there are that many, they show no trend that matters, and the longest is at
    most MAX_SPREAD over the shortest.
    """
    if len(values) < lookback:
        return f"only {len(values)} of the {lookback} batches that the check needs"
    last = list(values[-lookback:])
    over_time = trend(last)
    if over_time.matters:
        return f"a trend of {100 * over_time.drift:+.1f} % over {lookback} batches"
    spread = max(last) / min(last) - 1
    if spread > MAX_SPREAD:
        return f"a spread of {100 * spread:.0f} % over {lookback} batches"
    return None
