"""Tests, corrections and verdicts, against known cases and simulated truth."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import assume, given
from hypothesis import strategies as st

from nwor_bench.analysis.statistics import holm, outlying, paired_ratio, smallest_effect, verdict
from nwor_bench.instruments.robust import RatioInterval
from nwor_bench.records.types import Verdict


def interval(low: float, high: float) -> RatioInterval:
    return RatioInterval((low * high) ** 0.5, low, high, blocks=9)


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


def test_one_wild_block_is_outlying_and_counts():
    treated = [1.001, 0.999, 1.002, 0.998, 1.0005, 0.9995, 1.0015, 3.0]
    assert outlying(np.log(treated).tolist()) == [7]
    assert paired_ratio(treated, [1.0] * 8).ratio > 1.1  # it counts


def test_equal_sides_have_no_difference():
    found = paired_ratio([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert (found.low, found.high, found.p_value) == (1.0, 1.0, 1.0)
    assert outlying([0.0] * 6) == []


@pytest.mark.parametrize("cells", [1, 5])
def test_an_effect_of_the_smallest_size_is_called_in_four_of_five_runs(cells):
    """The known standard error gives the effect; runs with that true effect must call it so often.

    2,000 runs of 12 blocks; the tolerance is four standard errors of a binomial, and the formula's
    own approximation (a shifted t for a non-central one) costs up to two points.
    """
    rng = np.random.default_rng(3)
    runs, blocks, noise = 2000, 12, 0.01
    interval = RatioInterval(1.0, 0.99, 1.01, blocks, 0.5, noise / blocks**0.5)
    effect = math.log1p(smallest_effect(interval, cells))
    logs = rng.normal(effect, noise, (runs, blocks))
    p_values = scipy.stats.ttest_1samp(logs, 0.0, axis=1).pvalue
    called = np.mean(p_values < 0.05 / cells)
    assert abs(called - 0.8) < 4 * math.sqrt(0.16 / runs) + 0.02


@pytest.mark.parametrize(
    ("p_adjusted", "noise_floor", "expected"),
    [
        (0.01, 0.005, Verdict.SLOWER),
        (0.06, 0.005, Verdict.AMBIGUOUS),
        (0.01, 0.05, Verdict.AMBIGUOUS),
        (None, None, Verdict.SLOWER),
    ],
)
def test_a_difference_must_pass_correction_and_noise_floor(p_adjusted, noise_floor, expected):
    found = verdict(interval(1.01, 1.05), p_adjusted=p_adjusted, noise_floor=noise_floor)
    assert found is expected
    same = verdict(interval(0.995, 1.004), p_adjusted=p_adjusted, noise_floor=noise_floor)
    assert same is Verdict.SAME


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.995, 1.004, Verdict.SAME),
        (1.002, 1.006, Verdict.SAME),
        (0.991, 0.997, Verdict.SAME),
        (0.99, 1.01, Verdict.SAME),
        (1.002, 1.02, Verdict.SLOWER),
        (1.03, 1.05, Verdict.SLOWER),
        (0.9, 0.999, Verdict.FASTER),
        (0.8, 0.9, Verdict.FASTER),
        (0.98, 1.005, Verdict.AMBIGUOUS),
        (0.9, 1.1, Verdict.AMBIGUOUS),
        (1.0, 1.05, Verdict.AMBIGUOUS),
    ],
)
def test_verdicts(low, high, expected):
    assert verdict(interval(low, high)) is expected


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.002, 1.004, Verdict.SLOWER),
        (0.991, 0.997, Verdict.FASTER),
        (0.999, 1.001, Verdict.SAME),
        (1.0005, 1.0009, Verdict.SAME),  # below the noise floor
        (0.98, 1.005, Verdict.AMBIGUOUS),
    ],
)
def test_where_small_differences_count_they_come_first(low, high, expected):
    found = verdict(interval(low, high), p_adjusted=0.01, noise_floor=0.001, small_counts=True)
    assert found is expected


def test_no_interval_is_ambiguous():
    assert verdict(None) is Verdict.AMBIGUOUS


@given(low=st.floats(0.5, 2), high=st.floats(0.5, 2))
def test_the_sides_mirror_each_other(low, high):
    """Swapping treated and baseline swaps FASTER and SLOWER (with no margin, exactly)."""
    assume(low <= high)
    mirror = {Verdict.FASTER: Verdict.SLOWER, Verdict.SLOWER: Verdict.FASTER}
    there = verdict(interval(low, high), margin=0.0)
    back = verdict(interval(1 / high, 1 / low), margin=0.0)
    assert back is mirror.get(there, there)
