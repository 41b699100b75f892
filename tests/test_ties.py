"""A tie is what mode off itself cannot tell apart: gaps in, verdicts out."""

from math import exp, pi, sqrt
from random import Random
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nwor_bench.ties import (
    ALLOWED_RMS,
    ErrorScale,
    Place,
    PlaceVerdict,
    error_scale,
    gap_between,
    leading_two,
)

PLACE = Place(request=1, position=3, reference=7, token=9)
SCALE = ErrorScale(rms=0.1, largest=0.3, positions=100, within=4)


def verdict(*gaps: float | None) -> PlaceVerdict:
    return PlaceVerdict(PLACE, gaps, SCALE)


@pytest.mark.parametrize(
    ("gaps", "gap", "is_tie"),
    [
        ((0.49, 0.49), 0.49, True),
        ((0.51, 0.51), 0.51, False),
        ((-0.51, -0.51), 0.51, False),
        ((0.7, 0.51), 0.51, False),
        ((0.7, 0.51, 0.49), 0.49, True),
        ((0.6, 0.0), 0.0, True),
        ((0.6, -0.01), 0.0, True),
        ((3.0, 1.4), 1.4, True),  # mode off itself moves by 1.6 there
        ((3.0, 1.6), 1.6, False),
        ((0.01, None), None, False),
        ((None, None), None, False),
        ((), None, False),
    ],
)
def test_the_smallest_gap_is_held_against_the_allowance(
    gaps: tuple[float | None, ...], gap: float | None, is_tie: bool
) -> None:
    found = verdict(*gaps)
    assert found.gap == gap
    assert found.is_tie is is_tie


def test_where_nothing_moves_only_equal_logits_are_a_tie() -> None:
    still = ErrorScale(rms=0.0, largest=0.0, positions=9, within=0)
    assert PlaceVerdict(PLACE, (0.0, 0.0), still).is_tie
    assert not PlaceVerdict(PLACE, (1e-9, 1e-9), still).is_tie


def test_words_name_gap_and_allowance() -> None:
    assert verdict(0.75, 0.8).describe() == "0.75 nats apart in mode off, a tie is at most 0.5"
    assert "not among mode off's likeliest" in verdict(None, 0.8).describe()


def test_gaps_are_those_of_the_two_candidates() -> None:
    top = {7: -0.5, 9: -0.75, 2: -3.0}
    assert gap_between(top, 7, 9) == 0.25
    assert gap_between(top, 9, 7) == -0.25
    assert gap_between(top, 7, 8) is None
    assert gap_between(top, 8, 7) is None
    assert leading_two(top) == (7, 9)
    assert leading_two({4: -1.0}) is None


def test_the_scale_is_the_root_mean_square_of_the_leading_twos_movement() -> None:
    first = [{1: -0.1, 2: -0.6, 3: -9.0}, {5: -0.2, 4: -2.2}, {6: -0.1, 7: -4.1}]
    second = [{1: -0.1, 2: -0.9}, {5: -0.2, 4: -1.8, 3: -0.1}, {6: -0.1}]
    found = error_scale(first, second)
    assert found.positions == 2  # the third position's second token is not in both
    assert found.rms == pytest.approx(sqrt((0.3**2 + 0.4**2) / 2))
    assert found.largest == pytest.approx(0.4)
    assert found.allowance == pytest.approx(ALLOWED_RMS * found.rms)
    assert found.within == 1  # 0.5 and 2.0 nats beside an allowance of 1.77


def test_a_scale_without_a_position_is_refused() -> None:
    with pytest.raises(ValueError, match="no position"):
        error_scale([{1: -0.1}], [{1: -0.1}])


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=4), st.floats(0, 2))
def test_a_place_that_is_moved_as_a_whole_never_becomes_less_of_a_tie(
    gaps: list[float], rms: float
) -> None:
    """Nearer to 0 is never worse, and the allowance never lies below the scale's."""
    scale = ErrorScale(rms, rms, 10, 0)
    found = PlaceVerdict(PLACE, tuple(gaps), scale)
    assert found.allowance >= scale.allowance
    nearer = PlaceVerdict(PLACE, tuple(gap / 2 for gap in gaps), scale)
    assert nearer.gap is not None
    assert found.gap is not None
    assert nearer.gap <= found.gap
    assert found.is_tie or found.gap > scale.allowance


def test_sound_flips_beyond_the_allowance_are_as_rare_as_the_module_says() -> None:
    """Simulated at 2 and 3 times the rms, where they can still be counted."""
    random = Random(3)
    half, sigma = 3.0, 0.1  # true gaps uniform on +-3 nats, each shape's own error
    moved = sigma * sqrt(2)
    density, number = 1 / (2 * half), 1_000_000
    gaps = [random.uniform(-half, half) for _ in range(number)]
    measured = [gap + random.gauss(0, sigma) for gap in gaps]
    cell = [gap + random.gauss(0, sigma) for gap in gaps]
    beyond = [abs(m) for m, c in zip(measured, cell, strict=True) if m * c < 0]
    normal = NormalDist()
    for c in (2, 3):
        phi = exp(-c * c / 2) / sqrt(2 * pi)
        expected = number * 2 * density * moved * (phi - c * (1 - normal.cdf(c)))
        seen = sum(gap > c * moved for gap in beyond)
        assert abs(seen - expected) < 4 * sqrt(expected) + 1
