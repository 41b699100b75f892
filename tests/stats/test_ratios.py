"""Ratios, intervals, corrections and verdicts, against known cases, scipy and simulated truth."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats
from simulated_noise import design_t3, neighbours_t3

from nwor_bench.analysis.verdicts import verdict
from nwor_bench.records.types import Verdict
from nwor_bench.stats.interval import Interval, quotient, t_quantile
from nwor_bench.stats.multiple import holm, ratio_at_once, smallest_change
from nwor_bench.stats.paired import paired_ratio, variance_inflation

LATENCIES = st.lists(st.floats(1.0, 1e4), min_size=3, max_size=12)


def test_the_ratio_is_the_geometric_mean_over_blocks():
    # Twice as slow on one block, half as slow on another: no difference on the whole.
    assert paired_ratio([200, 5000], [100, 10_000]).value == pytest.approx(1.0)
    assert paired_ratio([2, 2, 8], [1, 1, 1]).value == pytest.approx(32 ** (1 / 3))


@given(baseline=LATENCIES, factor=st.floats(0.25, 4))
def test_a_constant_factor_is_found_exactly(baseline, factor):
    found = paired_ratio([factor * x for x in baseline], baseline)
    assert (found.value, found.low, found.high) == pytest.approx((factor, factor, factor))
    assert found.count == len(baseline)


@given(treated=LATENCIES, baseline=LATENCIES)
def test_the_interval_holds_the_ratio_and_inverts_with_the_sides(treated, baseline):
    size = min(len(treated), len(baseline))
    treated, baseline = treated[:size], baseline[:size]
    there = paired_ratio(treated, baseline)
    back = paired_ratio(baseline, treated)
    assert there.low <= there.value * (1 + 1e-9)
    assert there.value <= there.high * (1 + 1e-9)
    assert there.value == pytest.approx(1 / back.value)
    assert (there.low, there.high) == pytest.approx((1 / back.high, 1 / back.low))
    assert there.p_value == pytest.approx(back.p_value)


@pytest.mark.parametrize("blocks", [1, 2])
def test_too_few_blocks_give_no_interval(blocks):
    found = paired_ratio([1.0] * blocks, [2.0] * blocks)
    assert (found.value, found.is_bounded, found.count) == (0.5, False, blocks)
    assert not quotient(found, paired_ratio([1.0] * 3, [2.0] * 3)).is_bounded
    assert verdict(found) is Verdict.AMBIGUOUS


def test_without_spread_it_is_certain():
    same, other = (paired_ratio([ratio] * 4, [1.0] * 4) for ratio in (1.5, 3.0))
    assert quotient(same, same).p_value == 1
    assert (quotient(other, same).p_value, quotient(other, same).low) == (0, pytest.approx(2))
    found = paired_ratio([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert (found.low, found.high, found.p_value) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("treated", "baseline"),
    [
        ([], []),
        ([1.0, 2.0], [1.0]),
        ([1.0, 0.0, 1.0], [1.0, 1.0, 1.0]),
        ([1.0, 1.0, 1.0], [1.0, -1.0, 1.0]),
        ([1.0, math.nan, 1.0], [1.0, 1.0, 1.0]),
        ([1.0, math.inf, 1.0], [1.0, 1.0, 1.0]),
    ],
)
def test_latencies_that_cannot_be_are_refused(treated, baseline):
    with pytest.raises(ValueError, match=r"finite|as many"):
        paired_ratio(treated, baseline)


@given(treated=LATENCIES, baseline=LATENCIES)
def test_the_p_value_belongs_to_the_interval(treated, baseline):
    """p < 0.05 exactly if the 95 % interval excludes 1."""
    size = min(len(treated), len(baseline))
    found = paired_ratio(treated[:size], baseline[:size])
    assume(abs(found.p_value - 0.05) > 1e-9)
    assert (found.p_value < 0.05) == (not found.low <= 1 <= found.high)


def test_without_autocorrelation_the_interval_is_students_t():
    """Alternating log ratios correlate negatively: nothing is corrected."""
    logs = np.array([0.01, -0.02, 0.03, -0.01, 0.02, -0.03, 0.015, -0.015])
    found = paired_ratio(np.exp(logs).tolist(), [1.0] * 8)
    expected = scipy.stats.ttest_1samp(logs, 0.0)
    assert found.p_value == pytest.approx(expected.pvalue)
    ends = expected.confidence_interval(0.95)
    assert (math.log(found.low), math.log(found.high)) == pytest.approx((ends.low, ends.high))


def test_the_inflation_recovers_that_of_a_known_autoregression():
    """Long series of r = 0.3 and 0.6: (1 + r) / (1 - r) = 1.857 and 4."""
    rng = np.random.default_rng(11)
    for r, truth in ((0.3, 1.857), (0.6, 4.0)):
        series = [rng.normal()]
        for _ in range(20_000):
            series.append(r * series[-1] + rng.normal())
        assert variance_inflation(np.array(series)) == pytest.approx(truth, rel=0.08)
    assert variance_inflation(np.zeros(5)) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("model", "blocks"), [(design_t3, 5), (neighbours_t3, 60)])
def test_intervals_hold_the_truth_in_95_of_100_runs(model, blocks):
    """A short form of sweeps/studies/interval-coverage: 300 runs with a known true ratio.

    Noise has heavy tails (Student's t with 3 degrees of freedom) and is autocorrelated. The
    tolerance is 93 to 97 % plus three standard errors of a binomial of 300.
    """
    runs, truth = 300, 1.013
    beside = 3 * math.sqrt(0.05 * 0.95 / runs)
    logs = model(np.random.default_rng(blocks), runs, blocks) * 0.02 + math.log(truth)
    found = [paired_ratio(np.exp(row).tolist(), [1.0] * blocks) for row in logs]
    assert 0.93 - beside <= np.mean([own.low <= truth <= own.high for own in found])
    assert np.mean([own.low <= truth <= own.high for own in found]) <= 0.97 + beside


def test_a_simultaneous_interval_is_students_t_at_a_share_of_the_error():
    """Bonferroni by scipy's own interval of a mean, in logs."""
    treated, cells = [1.02, 1.05, 0.99, 1.03, 1.01, 1.04], 5
    found = paired_ratio(treated, [1.0] * 6)
    logs = np.log(treated)
    error = scipy.stats.sem(logs)
    assert found.error == pytest.approx(error)  # no autocorrelation to make up for
    low, high = scipy.stats.t.interval(1 - 0.05 / cells, 5, logs.mean(), error)
    wide, alone = ratio_at_once(found, cells), ratio_at_once(found, 1)
    assert (wide.low, wide.high) == pytest.approx((np.exp(low), np.exp(high)))
    assert (alone.low, alone.high) == pytest.approx((found.low, found.high))
    for none in (0, -1):
        with pytest.raises(ValueError, match="1 comparison or more"):
            ratio_at_once(found, none)


def interval(low: float, high: float) -> Interval:
    middle, half = math.log(low * high) / 2, math.log(high / low) / 2
    found = Interval.of(middle, half / t_quantile(0.975, 8), 8, 9).exp()
    return replace(found, low=low, high=high)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_adjusts_as_its_definition_says(p_values):
    """Step down: the k-th smallest is called if it and all smaller pass alpha / (m - k)."""
    adjusted = holm(p_values)
    for alpha in (0.01, 0.05, 0.2):
        ranked = sorted(range(len(p_values)), key=lambda i: p_values[i])
        called = set()
        for rank, place in enumerate(ranked):
            if p_values[place] * (len(p_values) - rank) >= alpha:
                break
            called.add(place)
        assert {i for i, p in enumerate(adjusted) if p < alpha} == called


@pytest.mark.parametrize("cells", [1, 5])
def test_an_effect_of_the_smallest_size_is_called_in_four_of_five_runs(cells):
    """The known standard error gives the effect; runs with that true effect must call it so often.

    2,000 runs of 12 blocks; the tolerance is four standard errors of a binomial, and the formula's
    own approximation (a shifted t for a non-central one) costs up to two points.
    """
    rng = np.random.default_rng(3)
    runs, blocks, noise = 2000, 12, 0.01
    interval = Interval.of(0.0, noise / blocks**0.5, blocks - 1, blocks).exp()
    effect = math.log1p(smallest_change(interval, cells))
    logs = rng.normal(effect, noise, (runs, blocks))
    p_values = scipy.stats.ttest_1samp(logs, 0.0, axis=1).pvalue
    called = np.mean(p_values < 0.05 / cells)
    assert abs(called - 0.8) < 4 * math.sqrt(0.16 / runs) + 0.02


CALLED = {"p_adjusted": 0.01, "noise_floor": 0.005}
SMALL = {"p_adjusted": 0.01, "noise_floor": 0.001, "small_counts": True}


@pytest.mark.parametrize(
    ("low", "high", "given", "expected"),
    [
        (0.995, 1.004, {}, Verdict.SAME),
        (1.002, 1.006, {}, Verdict.SAME),
        (0.991, 0.997, {}, Verdict.SAME),
        (0.99, 1.01, {}, Verdict.SAME),
        (1.002, 1.02, {}, Verdict.SLOWER),
        (1.03, 1.05, {}, Verdict.SLOWER),
        (0.9, 0.999, {}, Verdict.FASTER),
        (0.8, 0.9, {}, Verdict.FASTER),
        (0.98, 1.005, {}, Verdict.AMBIGUOUS),
        (0.9, 1.1, {}, Verdict.AMBIGUOUS),
        (1.0, 1.05, {}, Verdict.AMBIGUOUS),
        # A difference must pass the correction and the noise floor; SAME needs neither.
        (1.01, 1.05, CALLED, Verdict.SLOWER),
        (1.01, 1.05, CALLED | {"p_adjusted": 0.06}, Verdict.AMBIGUOUS),
        (1.01, 1.05, CALLED | {"noise_floor": 0.05}, Verdict.AMBIGUOUS),
        (0.995, 1.004, CALLED | {"p_adjusted": 0.06}, Verdict.SAME),
        (0.995, 1.004, CALLED | {"noise_floor": 0.05}, Verdict.SAME),
        # If small differences count, they come first.
        (1.002, 1.004, SMALL, Verdict.SLOWER),
        (0.991, 0.997, SMALL, Verdict.FASTER),
        (0.999, 1.001, SMALL, Verdict.SAME),
        (1.0005, 1.0009, SMALL, Verdict.SAME),  # below the noise floor
        (0.98, 1.005, SMALL, Verdict.AMBIGUOUS),
    ],
)
def test_verdicts(low, high, given, expected):
    assert verdict(interval(low, high), **given) is expected


@given(low=st.floats(0.5, 2), high=st.floats(0.5, 2))
def test_the_sides_mirror_each_other(low, high):
    """Swapping treated and baseline swaps FASTER and SLOWER (with no margin, exactly)."""
    assume(low <= high)
    mirror = {Verdict.FASTER: Verdict.SLOWER, Verdict.SLOWER: Verdict.FASTER}
    there = verdict(interval(low, high), margin=0.0)
    back = verdict(interval(1 / high, 1 / low), margin=0.0)
    assert back is mirror.get(there, there)


def estimate(logs: np.ndarray) -> Interval:
    """Geometric mean with the plain standard error of independent values."""
    mean, error = float(logs.mean()), float(stats.sem(logs))
    return Interval.of(mean, error, len(logs) - 1, len(logs)).exp()


@pytest.mark.parametrize(("many", "few"), [(5, 5), (40, 4), (3, 60)])
def test_it_is_the_welch_interval_of_the_logs(many: int, few: int) -> None:
    rng = np.random.default_rng()
    above, below = rng.normal(0.1, 0.05, many), rng.normal(0.05, 0.2, few)
    ours = quotient(estimate(above), estimate(below))
    theirs = stats.ttest_ind(above, below, equal_var=False)
    bounds = theirs.confidence_interval(0.95)
    assert ours.p_value == pytest.approx(theirs.pvalue, rel=1e-9)
    assert (ours.low, ours.high) == pytest.approx(np.exp([bounds.low, bounds.high]), rel=1e-9)


@pytest.mark.slow  # many simulated runs
def test_the_truth_lies_in_the_interval_as_often_as_it_says() -> None:
    # Blocks of very unequal length, heavy-tailed noise, other prompts in each run: 300 pairs
    # of runs whose true change is 3 %.
    rng = np.random.default_rng(20)
    ones = [1.0] * 12
    inside = 0
    for _ in range(300):
        base = np.exp(rng.normal(3, 0.3, 12) + 0.02 * rng.standard_t(4, 12))
        new = np.exp(np.log(1.03) + rng.normal(3, 0.3, 12) + 0.02 * rng.standard_t(4, 12))
        change = quotient(paired_ratio(list(new), ones), paired_ratio(list(base), ones))
        inside += change.low <= 1.03 <= change.high
    assert 0.91 <= inside / 300 <= 0.99
