"""Fractions and durations mean the same in every command."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from nwor_bench.cli.commands.plan import parse_acceptance
from nwor_bench.microbench.cases import parse_acceptances
from nwor_bench.workload.config import load_scenario, resolve
from nwor_bench.workload.options import fraction, seconds
from nwor_bench.workload.stopping import WIDEST, parse_fraction, parse_seconds

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
