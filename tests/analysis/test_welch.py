"""The interval of two independent runs: against scipy's own Welch test, and how often it holds."""

import numpy as np
import pytest
from scipy import stats

from nwor_bench.analysis.statistics import from_bounds, paired_ratio, unpaired_ratio
from nwor_bench.instruments.robust import RatioInterval


def estimate(logs: np.ndarray) -> RatioInterval:
    """Geometric mean with the plain standard error of independent values."""
    mean, error = float(logs.mean()), float(stats.sem(logs))
    half = stats.t.ppf(0.975, len(logs) - 1) * error
    return RatioInterval(
        float(np.exp(mean)), float(np.exp(mean - half)), float(np.exp(mean + half)),
        len(logs), standard_error=error,
    )  # fmt: skip


@pytest.mark.parametrize(("many", "few"), [(5, 5), (40, 4), (3, 60)])
def test_it_is_the_welch_interval_of_the_logs(many: int, few: int) -> None:
    rng = np.random.default_rng()
    above, below = rng.normal(0.1, 0.05, many), rng.normal(0.05, 0.2, few)
    ours = unpaired_ratio(estimate(above), estimate(below))
    theirs = stats.ttest_ind(above, below, equal_var=False)
    bounds = theirs.confidence_interval(0.95)
    assert ours.p_value == pytest.approx(theirs.pvalue, rel=1e-9)
    assert (ours.low, ours.high) == pytest.approx(np.exp([bounds.low, bounds.high]), rel=1e-9)


def test_an_interval_gives_its_standard_error_back() -> None:
    logs = np.random.default_rng().normal(0.03, 0.02, 9)
    whole = estimate(logs)
    kept = from_bounds(whole.ratio, whole.low, whole.high, 9)
    assert kept.standard_error == pytest.approx(whole.standard_error, rel=1e-9)
    assert from_bounds(1.0, 0.9, 1.1, 1) is None


def test_without_spread_it_is_certain() -> None:
    same = RatioInterval(1.5, 1.5, 1.5, 4, standard_error=0.0)
    other = RatioInterval(3.0, 3.0, 3.0, 4, standard_error=0.0)
    assert unpaired_ratio(same, same).p_value == 1
    assert (unpaired_ratio(other, same).p_value, unpaired_ratio(other, same).low) == (0, 2)
    assert unpaired_ratio(same, RatioInterval(1, 1, 1, 4)) is None


@pytest.mark.slow  # many simulated runs
def test_the_truth_lies_in_the_interval_as_often_as_it_says() -> None:
    # Blocks of very unequal length, heavy-tailed noise, other prompts in each run: 2,000 pairs
    # of runs whose true change is 3 %.
    rng = np.random.default_rng(20)
    ones = [1.0] * 12
    inside = 0
    for _ in range(2000):
        base = np.exp(rng.normal(3, 0.3, 12) + 0.02 * rng.standard_t(4, 12))
        new = np.exp(np.log(1.03) + rng.normal(3, 0.3, 12) + 0.02 * rng.standard_t(4, 12))
        change = unpaired_ratio(paired_ratio(list(new), ones), paired_ratio(list(base), ones))
        inside += change.low <= 1.03 <= change.high
    assert 0.93 <= inside / 2000 <= 0.97
