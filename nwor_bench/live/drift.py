"""A watch of hours in bounded memory: did acceptance or tokens/s drift?"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nwor_bench.stats.trend import Trend, trend

MAX_KEPT = 256
"""Readings kept. If there are more every other one goes, and from then on readings are kept twice
as far apart: after a day of traffic about every ten minutes."""

MIN_SPANS = 30
"""Spans of a trend: as many or more, fewer than twice. The longer they are the less neighbours
depend on each other, and the test takes them for independent."""

RATES = {"acceptance_rate": (2, 1), "tokens_per_s": (3, 5), "requests_running": (4, 5)}
"""What may drift: the columns of `OverTime.kept` whose growth is divided, and by which."""


@dataclass(frozen=True)
class Drift:
    """A rate over a watch: medians of its first and last third, and its trend."""

    what: str
    first: float
    last: float
    trend: Trend


class OverTime:
    """Readings of a watch of any length.

    `kept` are sums since its start: time, drafts, accepted, tokens, seconds of running requests,
    and seconds in which tokens came.
    """

    def __init__(self) -> None:
        self.kept: list[list[float]] = []
        self._sums = [0.0] * 5
        self._apart_s = 1e-9  # of seconds in which tokens came: idle hours take no memory
        self._last: tuple[float, Sequence[float]] | None = None

    def add(self, at_s: float, counted: Sequence[float] | None) -> None:
        """Take a reading's counts. They add nothing without new tokens, or if one fell: a
        restarted server's begin at 0."""
        if counted is None:
            return
        (last_s, last), self._last = self._last or (at_s, counted), (at_s, counted)
        grown = [new - old for new, old in zip(counted[:3], last[:3], strict=True)]
        if min(grown) >= 0 and grown[2]:
            grown += [counted[3] * (at_s - last_s), at_s - last_s]
            self._sums = [total + more for total, more in zip(self._sums, grown, strict=True)]
        if not self.kept or self._sums[4] - self.kept[-1][5] >= self._apart_s:
            self.kept.append([at_s, *self._sums])
        if len(self.kept) > MAX_KEPT:
            self.kept = self.kept[::2]
            self._apart_s = self.kept[-1][5] / (len(self.kept) - 1)

    def drifts(self) -> list[Drift]:
        """Every rate with enough values, drifted or not."""
        spans = self.kept[:: max(1, len(self.kept) // (MIN_SPANS + 1))]
        grown = np.diff(np.array(spans).reshape(-1, 6), axis=0)
        found = []
        for what, (part, whole) in RATES.items():
            known = grown[grown[:, whole] > 0]
            values = known[:, part] / known[:, whole]
            if len(values) >= MIN_SPANS and np.median(values) > 0:
                third = len(values) // 3
                first, last = (float(np.median(of)) for of in (values[:third], values[-third:]))
                found.append(Drift(what, first, last, trend(values.tolist())))
        return found
