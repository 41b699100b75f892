"""Warm-up ends when times are steady: trends found, noise borne, by known cases."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nwor_bench.stats.trend import MAX_SPREAD, not_steady, trend
from nwor_bench.workload.run_spec import WARMUP_LOOKBACK

unsteady = partial(not_steady, lookback=WARMUP_LOOKBACK)
TIMES = st.lists(st.floats(1.0, 1e4), min_size=3, max_size=12)


def test_a_straight_line_has_its_own_drift():
    found = trend([100.0, 102.0, 104.0, 106.0, 108.0])
    assert found.drift == pytest.approx(8 / 104)
    assert found.p_value == pytest.approx(2 / 120)  # 1 of 5! orders, on two sides
    assert found.matters
    assert not trend([100.0, 100.1, 99.9, 250.0, 100.0, 99.8, 100.2]).matters  # one wild value
    certain = trend([100 * (1 + 0.0005 * i) for i in range(10)])  # half a per cent
    assert certain.p_value < 0.001
    assert not certain.matters


@given(TIMES)
def test_backwards_the_drift_has_the_other_sign(values):
    there, back = trend(values), trend(values[::-1])
    assert there.drift == pytest.approx(-back.drift)
    assert there.p_value == pytest.approx(back.p_value)


@pytest.mark.parametrize("values", [[], [5.0], [5.0, 6.0], [5.0] * 9])
def test_nothing_to_see_is_no_trend(values):
    assert (trend(values).p_value, trend(values).drift) == (1.0, 0.0)


def test_a_machine_that_warms_up_is_not_steady_until_it_is():
    """Each batch takes off a third of what the first ones cost too much."""
    times = [100 * (1 + 0.8 * 0.67**i) for i in range(30)]
    ended = next(n for n in range(31) if unsteady(times[:n]) is None)
    assert times[ended - 1] < 102
    assert "trend" in str(unsteady(times[:8]))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], f"only 0 of the {WARMUP_LOOKBACK} batches that the check needs"),
        ([10.0] * (WARMUP_LOOKBACK - 1), f"only {WARMUP_LOOKBACK - 1} of the"),
        ([10.0] * WARMUP_LOOKBACK, None),
        ([500.0, 300.0, *[100.0, 101.0, 100.5, 100.2, 100.7]], None),  # only the last ones count
        ([100.0, 100 * (1 + 2 * MAX_SPREAD), 100.0, 101.0, 100.5], "spread of 20 %"),
    ],
)
def test_what_is_not_steady_yet(values, words):
    found = unsteady(values)
    assert found is None if words is None else words in str(found)


@pytest.mark.slow  # many simulated runs
def test_steady_noise_is_seldom_called_a_trend():
    """2 % of noise, nothing else: at most 1 run in 20 by the test's own level."""
    rng = np.random.default_rng(1)
    called = sum("trend" in str(unsteady(rng.normal(100, 2, 5).tolist())) for _ in range(500))
    assert called / 500 < 0.05
