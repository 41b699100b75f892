"""When a sweep stops, and how widths and durations are written."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from simulated_noise import heavy

from nwor_bench.cli.commands.plan import parse_acceptance
from nwor_bench.run.microbench.cases import parse_acceptances
from nwor_bench.stats.paired import paired_ratio
from nwor_bench.workload.config import load_scenario, resolve
from nwor_bench.workload.options import fraction, seconds
from nwor_bench.workload.stopping import (
    FIRST_LOOK,
    LOOK_STEP,
    WIDEST,
    StoppingRule,
    parse_fraction,
    parse_seconds,
)


@given(blocks=st.integers(1, 60), more=st.integers(0, 200))
def test_looks_are_few_and_lie_apart(blocks, more):
    looks = StoppingRule(blocks, blocks + more, ci_width=0.01).looks
    assert all(max(blocks, FIRST_LOOK) <= look < blocks + more for look in looks)
    assert all(b >= LOOK_STEP * a for a, b in pairwise(looks))


def test_without_a_width_or_a_clock_all_blocks_run():
    rule = StoppingRule(7, 7)
    assert rule.looks == ()
    assert [rule.stop(done, [0.0], 1e9, 0.0) for done in range(1, 8)] == [None] * 7


def test_it_stops_when_every_interval_is_narrow_and_only_at_a_look():
    rule = StoppingRule(5, 100, ci_width=0.005)
    assert rule.stop(9, [0.001], 1.0, 0.0) is None
    assert rule.stop(11, [0.001], 1.0, 0.0) is None
    for look in rule.looks:
        assert rule.stop(look, [0.001, 0.0051], 1.0, 0.0) is None
        assert rule.stop(look, [0.001, None], 1.0, 0.0) is None
        assert rule.stop(look, [], 1.0, 0.0) is None
        assert "0.48 %" in rule.stop(look, [0.001, 0.0048], 1.0, 0.0)


def test_the_clock_starts_no_block_that_it_could_not_end():
    rule = StoppingRule(5, 100, time_budget_s=60)
    assert rule.stop(5, [], 49.9, 10.0) is None
    assert "--time-budget 60s" in rule.stop(5, [], 50.1, 10.0)
    assert "55.0 s were spent" in rule.stop(0, [], 55.0, 10.0)  # before the first, too


@pytest.mark.slow  # many simulated runs
def test_stopping_on_width_keeps_the_coverage_and_on_the_verdict_would_not():
    """400 heavy-tailed runs of up to 100 blocks, half-width sought: 0.4 of a block's spread.

    The interval at the stop must hold the truth in 93 to 97 % (plus three binomial standard
    errors); the same looks, stopped as soon as an interval excludes 1, are wrong in over 10 %.
    """
    runs, most = 400, 100
    logs = heavy(np.random.default_rng(2), (runs, most)) * 0.01
    rule = StoppingRule(5, most, ci_width=0.004)
    covered = seen_something = 0
    for row in np.exp(logs).tolist():
        found = {n: paired_ratio(row[:n], [1.0] * n) for n in (*rule.looks, most)}
        ended = next((n for n in rule.looks if rule.stop(n, [found[n].half_width], 0, 0)), most)
        covered += found[ended].low <= 1 <= found[ended].high
        seen_something += any(not f.low <= 1 <= f.high for f in found.values())
    beside = 3 * math.sqrt(0.05 * 0.95 / runs)
    assert 0.93 - beside <= covered / runs <= 0.97 + beside
    assert seen_something / runs > 0.10


HUNDREDTHS = st.integers(1, 9999)

SHORT = load_scenario("short")


@given(HUNDREDTHS)
def test_a_percentage_and_its_fraction_are_the_same_everywhere(hundredths: int) -> None:
    value = hundredths / 10_000
    for text in (f"{value:.4f}", f"{hundredths / 100:.2f}%", f" {hundredths / 100:.2f} % "):
        expected = pytest.approx(value)
        assert fraction(text) == expected
        assert parse_fraction("--threshold", text) == expected
        assert parse_acceptance("--acceptance", text) == expected
        assert parse_acceptances("--acceptance", text) == (expected,)
        if value <= WIDEST:
            assert resolve(SHORT, ci_width=text).ci_width == expected
        else:
            with refused("--ci-width", value=text):
                resolve(SHORT, ci_width=text)


@given(st.integers(1, 10**6), st.sampled_from([("", 1), ("s", 1), ("m", 60), ("h", 3600)]))
def test_a_duration_is_the_same_everywhere(number: int, unit: tuple[str, int]) -> None:
    name, factor = unit
    for text in (f"{number}{name}", f" {number}.0 {name} "):
        assert seconds(text) == number * factor
        assert parse_seconds("--time-budget", text) == number * factor
        assert resolve(SHORT, time_budget=text).time_budget_s == number * factor


@pytest.mark.parametrize("text", ["", "%", "-1", "1,5", "5%%", "1..2", "nan", "inf", "x", "5%s"])
def test_what_is_neither(text: str) -> None:
    assert fraction(text) is None
    assert seconds(text) is None
