"""The ratio of two independent estimates, with its interval. Pure."""

from math import exp, log

from scipy import stats

from nwor_bench.analysis.statistics import CONFIDENCE, RatioInterval


def unpaired_ratio(new: RatioInterval, base: RatioInterval) -> RatioInterval | None:
    """new / base of two estimates from different runs; None if a standard error is not known.

    Welch's t interval on the logarithms (Biometrika 34, 1947): the standard errors add in
    squares, with Satterthwaite's degrees of freedom. `blocks` is the smaller side's number.
    """
    if new.standard_error is None or base.standard_error is None:
        return None
    difference = log(new.ratio) - log(base.ratio)
    above, below = new.standard_error**2, base.standard_error**2
    error = (above + below) ** 0.5
    half = error * float(stats.t.ppf((1 + CONFIDENCE) / 2, _degrees(new, base)))
    if error == 0:
        p_value = 1.0 if difference == 0 else 0.0
    else:
        p_value = float(2 * stats.t.sf(abs(difference) / error, _degrees(new, base)))
    return RatioInterval(
        ratio=exp(difference),
        low=exp(difference - half),
        high=exp(difference + half),
        blocks=min(new.blocks, base.blocks),
        confidence=CONFIDENCE,
        p_value=p_value,
        standard_error=error,
    )


def from_bounds(ratio: float, low: float, high: float, blocks: int) -> RatioInterval | None:
    """An estimate from its stored 95 % interval; None below two blocks.

    The interval is Student's t on the log ratios with blocks - 1 degrees of freedom, so its
    length gives the standard error back. One that was made wider gives a larger error.
    """
    if blocks < 2:
        return None
    error = (log(high) - log(low)) / 2 / float(stats.t.ppf((1 + CONFIDENCE) / 2, blocks - 1))
    return RatioInterval(ratio, low, high, blocks, CONFIDENCE, standard_error=error)


def _degrees(new: RatioInterval, base: RatioInterval) -> float:
    assert new.standard_error is not None
    assert base.standard_error is not None
    above, below = new.standard_error**2, base.standard_error**2
    if above + below == 0:
        return new.free + base.free
    return (above + below) ** 2 / (above**2 / new.free + below**2 / base.free)
