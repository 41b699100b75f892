"""Ratios and verdicts, against known cases and simulated truth."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nwor_bench.records import Verdict
from nwor_bench.stats import RatioInterval, geometric_mean_ratio, paired_ratio, verdict

LATENCIES = st.lists(st.floats(1.0, 1e4), min_size=3, max_size=12)


def interval(low: float, high: float) -> RatioInterval:
    return RatioInterval((low * high) ** 0.5, low, high, blocks=9, confidence=0.95)


def test_the_ratio_is_the_geometric_mean_over_blocks():
    # Twice as slow on one block, half as slow on another: no difference on the whole.
    assert geometric_mean_ratio([200, 5000], [100, 10_000]) == pytest.approx(1.0)
    assert geometric_mean_ratio([2, 2, 8], [1, 1, 1]) == pytest.approx(32 ** (1 / 3))


@given(baseline=LATENCIES, factor=st.floats(0.25, 4))
def test_a_constant_factor_is_found_exactly(baseline, factor):
    found = paired_ratio([factor * x for x in baseline], baseline, seed=1)
    assert (found.ratio, found.low, found.high) == pytest.approx((factor, factor, factor))
    assert found.blocks == len(baseline)


@given(treated=LATENCIES, baseline=LATENCIES)
def test_the_interval_holds_the_ratio_and_inverts_with_the_sides(treated, baseline):
    size = min(len(treated), len(baseline))
    treated, baseline = treated[:size], baseline[:size]
    there = paired_ratio(treated, baseline, seed=3)
    back = paired_ratio(baseline, treated, seed=3)
    assert there.low <= there.ratio * (1 + 1e-9)
    assert there.ratio <= there.high * (1 + 1e-9)
    assert there.ratio == pytest.approx(1 / back.ratio)


def test_the_same_seed_gives_the_same_interval():
    treated, baseline = [1.0, 2.0, 3.5, 4.0], [1.1, 1.9, 3.0, 4.4]
    assert paired_ratio(treated, baseline, seed=5) == paired_ratio(treated, baseline, seed=5)


def test_more_confidence_is_a_wider_interval():
    treated, baseline = [1.0, 2.0, 3.5, 4.0, 5.0], [1.1, 1.9, 3.0, 4.4, 5.2]
    narrow = paired_ratio(treated, baseline, seed=5, confidence=0.8)
    wide = paired_ratio(treated, baseline, seed=5, confidence=0.99)
    assert wide.low < narrow.low < narrow.high < wide.high


@pytest.mark.parametrize("blocks", [1, 2])
def test_too_few_blocks_give_no_interval(blocks):
    assert paired_ratio([1.0] * blocks, [2.0] * blocks, seed=0) is None


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
    with pytest.raises(ValueError, match=r"latencies|as many"):
        paired_ratio(treated, baseline, seed=0)


@pytest.mark.parametrize("blocks", [3, 6, 20])
def test_the_interval_covers_the_truth_as_often_as_it_says(blocks):
    """Blocks differ tenfold in length, cells by 3 % and 4 % of noise a block."""
    rng = np.random.default_rng(blocks)
    trials, truth, covered = 250, 1.03, 0
    for trial in range(trials):
        baseline = rng.uniform(100, 1000, blocks)
        treated = truth * baseline * np.exp(rng.normal(0, 0.04, blocks))
        found = paired_ratio(treated.tolist(), baseline.tolist(), seed=trial)
        covered += found.low <= truth <= found.high
    # Three standard errors of a binomial around 95 %; wider than promised is no fault.
    assert covered / trials >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / trials)


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
