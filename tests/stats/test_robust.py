"""The robust location: coverage, outliers, degenerate values, slopes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.signal import lfilter

from nwor_bench.stats.interval import Interval
from nwor_bench.stats.robust import (
    MIN_GROUPS,
    from_ends,
    long_run_variance,
    mean_location,
    robust_location,
    robust_slope,
)

GROUPS = 100


@pytest.mark.slow  # many simulated runs
@pytest.mark.parametrize("noise", ["independent", "heavy", "autocorrelated"])
def test_the_interval_holds_the_truth_in_95_percent_of_runs(noise: str) -> None:
    rng, held, runs = np.random.default_rng(18), 0, 200
    for _ in range(runs):
        drawn = {
            "independent": lambda: rng.standard_normal(GROUPS),
            "heavy": lambda: rng.standard_t(2, GROUPS),
            "autocorrelated": lambda: lfilter([1], [1, -0.5], rng.standard_t(3, 150))[50:],
        }[noise]()
        found = robust_location(list(0.003 + 0.01 * drawn))
        assert found is not None
        held += abs(found.value - 0.003) <= found.half_width
    assert 0.9 <= held / runs <= 0.99


def test_one_group_of_another_world_hardly_moves_it() -> None:
    values = list(0.01 * np.random.default_rng(1).standard_normal(99))
    quiet, disturbed = (robust_location([*values, last]) for last in (0.0, 50.0))
    assert quiet is not None
    assert disturbed is not None
    assert abs(disturbed.value - quiet.value) < 0.001
    assert disturbed.half_width < 1.2 * quiet.half_width
    mean = mean_location([*values, 50.0])
    assert mean is not None
    assert mean.value == pytest.approx(0.5, abs=0.01)
    assert mean.half_width > 0.5


def test_few_groups_have_no_interval_and_what_does_not_vary_no_slope() -> None:
    values = [0.1] * (MIN_GROUPS - 1)
    assert robust_location(values) is None
    assert mean_location(values) is None
    assert robust_slope(values, list(range(MIN_GROUPS - 1))) is None
    assert robust_slope([0.1, 0.2] * 10, [1980.0] * 20) is None


@pytest.mark.parametrize("values", [[0.0] * 20, [0.0] * 19 + [1.0], [0.0] * 11 + [1.0] * 9])
def test_ties(values: list[float]) -> None:
    found = robust_location(values)
    assert found is not None
    assert 0 <= found.value < 1
    assert np.isfinite(found.half_width)
    assert found.p_value <= 1


@given(
    values=st.lists(st.floats(-1, 1), min_size=MIN_GROUPS, max_size=60),
    shift=st.floats(-1, 1),
)
def test_it_moves_with_the_values_and_turns_with_their_sign(
    values: list[float], shift: float
) -> None:
    found = robust_location(values)
    moved = robust_location([value + shift for value in values])
    turned = robust_location([-value for value in values])
    assert found is not None
    assert moved is not None
    assert turned is not None
    assert min(values) - 1e-9 <= found.value <= max(values) + 1e-9
    assert turned.value == pytest.approx(-found.value, abs=1e-6)
    if np.ptp(values) > 1e-6:  # below, rounding decides what is tied
        assert moved.value == pytest.approx(found.value + shift, abs=1e-6)


def test_the_interval_as_a_ratio_and_back() -> None:
    found = robust_location([0.01 * ((7 * n) % 11 - 5) - 0.03 for n in range(110)])
    assert found is not None
    ratio = found.exp()
    assert ratio.value == pytest.approx(np.exp(-0.03), abs=1e-4)
    assert ratio.low < ratio.value < ratio.high
    assert (ratio.count, ratio.degrees, ratio.p_value) == (110, found.degrees, found.p_value)
    for value, error, count in ((0.3, 0.02, 60), (-1.0, 0.2, 12), (0.0, 0.0, 400)):
        degrees = int(max(4, int(0.4 * count ** (2 / 3))))
        ratio = Interval.of(value, error, degrees, count).exp()
        back = from_ends(ratio.value, ratio.low, ratio.high, count).ln()
        assert (back.value, back.error) == pytest.approx((value, error))
        assert (back.degrees, back.count) == (degrees, count)


def test_an_offset_is_added_to_the_interval_and_taken_from_the_evidence() -> None:
    """0.3 +- t x 0.1, perhaps 0.1 off: as sure to differ from 0 as 0.2 +- t x 0.1."""
    sure, off = Interval.of(0.2, 0.1, 9, 10), Interval.of(0.3, 0.1, 9, 10, offset=0.1)
    assert off.half_width == pytest.approx(sure.half_width + 0.1)
    assert off.half_at(0.99) == pytest.approx(0.1 * stats.t.ppf(0.99, 9) + 0.1)
    assert off.p_value == pytest.approx(sure.p_value)
    assert off.exp().low == pytest.approx(np.exp(0.2 - sure.half_width))
    assert Interval.of(0.05, 0.0, 9, 10, offset=0.1).p_value == 1
    assert Interval.of(0.2, 0.0, 9, 10, offset=0.1).p_value == 0


def test_a_slope_is_found_and_none_is_not() -> None:
    rng = np.random.default_rng(4)
    clocks = np.repeat([14.1, 17.0, 19.8], 100)
    rng.shuffle(clocks)
    noise = 0.004 * rng.standard_t(3, 300)
    for slope in (0.0, 0.002):
        found = robust_slope(list(slope * clocks + noise), list(clocks))
        assert found is not None
        assert abs(found.value - slope) <= found.half_width
        assert found.half_width < 0.001
        assert (found.p_value < 0.05) == (slope != 0)


def test_the_long_run_variance_of_independent_scores_is_their_variance() -> None:
    rng = np.random.default_rng(2)
    found = [long_run_variance(rng.standard_normal(200))[0] for _ in range(300)]
    assert np.mean(found) == pytest.approx(1, abs=0.07)
