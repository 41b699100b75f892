"""A value with its confidence interval: the one form of an interval in the project.

Sums of effects are computed on logarithms, ratios are what readers see: `Interval.exp` leads from
one to the other. numpy and scipy are imported when an interval is computed, since records, which
load this module, must be light.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf

CONFIDENCE = 0.95

TWO_SIDED = (1 + CONFIDENCE) / 2
"""Share below the upper end of a 95 % interval."""


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval. The error, degrees and p value of a ratio are its log's."""

    value: float
    low: float
    high: float
    count: int
    """Values behind it: blocks, groups or prompts."""
    p_value: float
    """Two-sided p of "no difference" (a log of 0, a ratio of 1)."""
    error: float
    """Standard error, autocorrelation included."""
    degrees: float
    """Degrees of freedom of Student's t."""
    offset: float = 0.0
    """How far it may be off however many values there are: the interval is wider by it."""

    @classmethod
    def of(
        cls, value: float, error: float, degrees: float, count: int, offset: float = 0.0
    ) -> "Interval":
        """The 95 % interval of a log ratio, a slope or an amount.

        Without any scatter p is 1 for no difference, otherwise 0.
        """
        half = t_quantile(TWO_SIDED, degrees) * error + offset
        beyond = max(abs(value) - offset, 0.0)
        p_value = _tails(beyond / error, degrees) if error else float(beyond == 0)
        return cls(value, value - half, value + half, count, p_value, error, degrees, offset)

    @classmethod
    def unbounded(cls, value: float, count: int) -> "Interval":
        """A value from too few others for an interval: it may be anything."""
        return cls(value, -inf, inf, count, 1.0, inf, max(count - 1, 1))

    @property
    def is_bounded(self) -> bool:
        """False if too few values were measured for an interval."""
        return self.high < inf

    @property
    def half_width(self) -> float:
        """Half the interval's length: 0.005 is a ratio known to +- 0.5 %."""
        return (self.high - self.low) / 2

    @property
    def distance(self) -> float:
        """How far a ratio's interval reaches from 1, at its farther end."""
        return max(abs(self.low - 1), abs(self.high - 1))

    def holds(self, value: float) -> bool:
        """True if the interval contains the value."""
        return self.low <= value <= self.high

    def half_at(self, share: float) -> float:
        """Half of the interval whose upper end has this share below it."""
        return t_quantile(share, self.degrees) * self.error + self.offset

    def exp(self) -> "Interval":
        """A log ratio as a ratio."""
        from numpy import exp

        low, high = float(exp(self.low)), float(exp(self.high))
        return replace(self, value=float(exp(self.value)), low=low, high=high)

    def ln(self) -> "Interval":
        """A ratio as its log, to which error and degrees belong."""
        from numpy import log

        low, high = float(log(self.low)) if self.low > 0 else -inf, float(log(self.high))
        return replace(self, value=float(log(self.value)), low=low, high=high)

    def inverse(self) -> "Interval":
        """A ratio seen from the other side: the baseline over the treated."""
        return replace(self, value=1 / self.value, low=1 / self.high, high=1 / self.low)


@cache
def t_quantile(share: float, degrees: float) -> float:
    """Student's t below which that share lies; the same few are asked for again and again."""
    from scipy.special import stdtrit  # scipy.stats would take half a second

    return float(stdtrit(degrees, share))


def _tails(t: float, degrees: float) -> float:
    from scipy.special import stdtr

    return float(2 * stdtr(degrees, -t))


def combined(value: float, parts: Sequence[Interval]) -> Interval:
    """A sum or difference of independent logs, with Welch's degrees of freedom (Biometrika 34,
    1947). Parts with the same offset share it: two engines of a run may differ by as much as any
    other two. Those of two runs add up. It is unbounded if a part is."""
    if not all(part.is_bounded for part in parts):
        return Interval.unbounded(value, min(part.count for part in parts))
    variances = [part.error**2 for part in parts]
    total, spread = sum(variances), zip(variances, parts, strict=True)
    weighed = sum(variance**2 / part.degrees for variance, part in spread if variance)
    degrees, offset = total**2 / weighed if weighed else 1, sum({part.offset for part in parts})
    count = min((part.count for part in parts if part.error), default=parts[0].count)
    return Interval.of(value, total**0.5, degrees, count, offset)


def quotient(new: Interval, base: Interval) -> Interval:
    """new / base of two independent ratios."""
    return combined(new.ln().value - base.ln().value, [new, base]).exp()


ENDS = ("ratio", "low", "high")
"""Columns of an interval in JSON and CSV files, behind a prefix or not."""


def flat(interval: Interval | None, names: Sequence[str] = ENDS) -> dict[str, float | None]:
    """Value, low and high end under three names; None for what was not measured."""
    if interval is None:
        return dict.fromkeys(names)
    ends = (interval.low, interval.high) if interval.is_bounded else (None, None)
    return dict(zip(names, (interval.value, *ends), strict=True))
