"""Paired latency ratios, their intervals, and the verdicts that they allow.

Pure functions on plain numbers; a block's two latencies are a pair because both cells ran
the same prompts. Lengths are in any one unit: only ratios come out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from nwor_bench.records import Verdict

MIN_BLOCKS = 3
"""Fewest paired blocks for which an interval is given at all."""

DEFAULT_MARGIN = 0.01
"""Differences within this fraction count as none."""

_RESAMPLES = 9999


@dataclass(frozen=True)
class RatioInterval:
    """Treated over baseline (1.02 = 2 % slower) with its confidence interval."""

    ratio: float
    low: float
    high: float
    blocks: int
    confidence: float


def geometric_mean_ratio(treated: Sequence[float], baseline: Sequence[float]) -> float:
    """exp(mean(log(treated_i / baseline_i))): every block weighs the same, long or short,
    and swapping the two sides inverts the result.

    Raises ValueError if the lengths differ, are zero, or a value is not finite and positive.
    """
    return float(np.exp(_log_ratios(treated, baseline).mean()))


def paired_ratio(
    treated: Sequence[float],
    baseline: Sequence[float],
    *,
    seed: int,
    confidence: float = 0.95,
) -> RatioInterval | None:
    """The geometric mean ratio over paired blocks with a confidence interval, or None.

    With d_i = log(treated_i / baseline_i), the ratio is exp(mean(d)). Its interval is the
    exponential of the hull of two intervals for mean(d):

    - the percentile bootstrap, whole blocks drawn with replacement (Efron and Tibshirani,
      An Introduction to the Bootstrap, 1993, chapter 13; scipy.stats.bootstrap), and
    - Student's t, mean(d) +- t_{n-1} s / sqrt(n).

    The bootstrap alone is too narrow on few blocks: it can never leave the range of the d_i,
    which for three blocks holds the true median only 3 times in 4. Student's t is right for
    few blocks if the d_i are about normal; the hull errs on the wide side.

    Fewer than MIN_BLOCKS blocks give None: no interval was measured. Raises ValueError as
    `geometric_mean_ratio` does.
    """
    logs = _log_ratios(treated, baseline)
    count = len(logs)
    if count < MIN_BLOCKS:
        return None
    mean = float(logs.mean())
    resampled = stats.bootstrap(
        (logs,),
        np.mean,
        confidence_level=confidence,
        n_resamples=_RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    quantile = float(stats.t.ppf((1 + confidence) / 2, count - 1))
    half = quantile * float(logs.std(ddof=1)) / count**0.5
    return RatioInterval(
        ratio=float(np.exp(mean)),
        low=float(np.exp(min(resampled.low, mean - half))),
        high=float(np.exp(max(resampled.high, mean + half))),
        blocks=count,
        confidence=confidence,
    )


def verdict(interval: RatioInterval | None, margin: float = DEFAULT_MARGIN) -> Verdict:
    """What an interval of latency ratios allows one to say; the first rule that holds wins.

    1. No interval: AMBIGUOUS.
    2. The whole interval lies within 1 +- margin: SAME, even if it excludes 1. A difference
       that is certain but too small to matter is no difference.
    3. It lies below 1: FASTER. It lies above 1: SLOWER.
    4. It holds 1 and reaches beyond the margin: AMBIGUOUS.
    """
    if interval is None:
        return Verdict.AMBIGUOUS
    if 1 - margin <= interval.low and interval.high <= 1 + margin:
        return Verdict.SAME
    if interval.high < 1:
        return Verdict.FASTER
    if interval.low > 1:
        return Verdict.SLOWER
    return Verdict.AMBIGUOUS


def _log_ratios(treated: Sequence[float], baseline: Sequence[float]) -> NDArray[np.float64]:
    above, below = np.asarray(treated, dtype=float), np.asarray(baseline, dtype=float)
    if above.shape != below.shape or above.ndim != 1 or above.size == 0:
        raise ValueError(f"need as many treated as baseline values, not {len(above)}, {len(below)}")
    both = np.concatenate([above, below])
    if not (np.isfinite(both).all() and (both > 0).all()):
        raise ValueError("latencies must be finite and positive")
    return np.log(above) - np.log(below)
