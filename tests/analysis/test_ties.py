"""A tie is what mode off itself cannot tell apart: gaps in, verdicts out."""

from math import sqrt
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nwor_bench.analysis.parity.ties import (
    ALLOWED_RMS,
    STILL,
    ErrorScale,
    Place,
    PlaceVerdict,
    error_scale,
    gap_between,
    leading_two,
    together_outside,
)

PLACE = Place(request=1, position=3, reference=7, token=9)
SCALE = ErrorScale(rms=0.1, largest=0.25, positions=100, within=4, moved_rms=0.1)


def verdict(*gaps: float | None) -> PlaceVerdict:
    return PlaceVerdict(PLACE, gaps, SCALE)


@pytest.mark.parametrize(
    ("gaps", "gap", "is_tie"),
    [
        ((0.49, 0.49), 0.49, True),
        ((0.51, 0.51), 0.51, False),
        ((-0.51, -0.51), 0.51, False),
        ((0.65, 0.4), 0.525, False),
        ((0.5, 0.25), 0.375, True),
        ((0.5, -0.5), 0.0, True),
        ((0.6, -0.1), 0.25, True),
        ((3.0, -0.5), 1.25, True),  # mode off itself moves by 3.5 there
        ((3.0, 1.5), 2.25, False),
        ((0.01, None), None, False),
        ((None, None), None, False),
        ((), None, False),
    ],
)
def test_the_mean_gap_is_held_against_the_allowance(
    gaps: tuple[float | None, ...], gap: float | None, is_tie: bool
) -> None:
    found = verdict(*gaps)
    assert found.gap == gap
    assert found.is_tie is is_tie


def test_if_nothing_moves_only_equal_logits_are_a_tie() -> None:
    still = ErrorScale(rms=0.0, largest=0.0, positions=9, within=0, moved_rms=0.0)
    assert PlaceVerdict(PLACE, (0.0, 0.0), still).is_tie
    assert not PlaceVerdict(PLACE, (1e-3, 1e-3), still).is_tie


def test_words_name_gap_and_allowance() -> None:
    assert verdict(0.75, 0.8).describe() == "0.775 nats apart in mode off, a tie is at most 0.5"
    assert "not among mode off's likeliest" in verdict(None, 0.8).describe()


def test_gaps_are_those_of_the_two_candidates() -> None:
    top = {7: -0.5, 9: -0.75, 2: -3.0}
    assert gap_between(top, 7, 9) == 0.25
    assert gap_between(top, 9, 7) == -0.25
    assert gap_between(top, 7, 8) is None
    assert gap_between(top, 8, 7) is None
    assert leading_two(top) == (7, 9)
    assert leading_two({4: -1.0}) is None


def test_the_scale_is_what_decoding_differs_by_from_the_mean_of_the_shapes() -> None:
    decoded = [{1: -0.1, 2: -0.6, 3: -9.0}, {5: -0.2, 4: -2.2}, {6: -0.1, 7: -4.1}]
    first = [{1: -0.1, 2: -0.8}, {5: -0.2, 4: -1.7, 3: -0.1}, {6: -0.1, 7: -4.1}]
    second = [{1: -0.1, 2: -1.0}, {5: -0.2, 4: -1.9}, {6: -0.1}]
    found = error_scale(decoded, first, [first, second])
    assert found.positions == 2  # the third position's second token is not in all
    # Gaps 0.5 against (0.7 + 0.9) / 2, and 2.0 against (1.5 + 1.7) / 2.
    assert found.rms == pytest.approx(sqrt((0.3**2 + 0.4**2) / 2))
    assert found.largest == pytest.approx(0.4)
    assert found.allowance == pytest.approx(ALLOWED_RMS * found.rms)
    assert found.within == 2  # 0.8 and 1.6 nats beside an allowance of 1.77


def test_what_a_rounding_step_of_attention_moves_counts_if_decoding_moves_nothing() -> None:
    """FlashAttention on an H200: decode and prefill agreed bit for bit at 128 of 128 positions."""
    tops = [{1: -0.1, 2: -1.1}] * 16
    step = [{1: -0.1, 2: -1.1 - STEP * (n == 3)} for n in range(16)]
    found = error_scale(tops, step, [tops, tops, tops])
    assert (found.rms, found.largest) == pytest.approx((STEP / 4, STEP))
    assert found.moved_rms == pytest.approx(STEP)
    assert found.allowance == pytest.approx(5 * STEP / 4)
    assert PlaceVerdict(PLACE, (STEP, STEP, STEP), found).is_tie
    assert error_scale(step, tops, [tops, tops, tops]) == found  # the larger of the two


def test_a_scale_of_nothing_has_multiples_too() -> None:
    still = ErrorScale(rms=0.0, largest=0.0, positions=9, within=0, moved_rms=0.0)
    found = PlaceVerdict(PLACE, (0.1875, 0.1875, 0.1875), still)
    assert not found.is_tie
    assert found.multiple == pytest.approx(0.1875 / (STILL / ALLOWED_RMS))
    rounding = PlaceVerdict(PLACE, (STILL / 2, STILL / 2), still)
    assert rounding.is_tie
    assert rounding.multiple < ALLOWED_RMS


def test_a_scale_without_a_position_is_refused() -> None:
    with pytest.raises(ValueError, match="no position"):
        error_scale([{1: -0.1}], [{1: -0.1}], [[{1: -0.1}]])


def test_a_multiple_counts_in_error_scales() -> None:
    assert verdict(0.2, 0.2).multiple == pytest.approx(2.0)
    assert verdict(1.0, -0.5).multiple == pytest.approx(5 * 0.25 / 1.5)  # its own movement counts
    assert verdict(None, 0.1).multiple == 0.0


@pytest.mark.parametrize(
    ("multiples", "passes"),
    [
        ([5.0], True),
        ([4.0, 2.9], True),
        ([4.0, 4.0], False),
        ([3.0] * 5, False),
        ([1.0] * 1000, True),
        ([1.6] * 1000, False),
        ([], True),
    ],
)
def test_ties_that_are_all_far_apart_are_not_sound(multiples: list[float], passes: bool) -> None:
    found = together_outside(len(multiples), sum(m * m for m in multiples))
    assert (found is None) is passes


def flips(random: Random, error: str, positions: int, half: float = 10.0) -> list[float]:
    """Multiples of the scale at which a sound cell's token differs; gaps uniform on +-half."""
    found = []
    for _ in range(positions):
        mean = random.uniform(-half, half)
        if error == "normal":
            moved = random.gauss(0, 1)
        else:
            moved = random.choice((-1, 1)) * random.expovariate(2**0.5)
        if mean * (mean + moved) < 0:
            found.append(abs(mean))
    return found


@pytest.mark.slow  # many simulated runs
@pytest.mark.parametrize("error", ["normal", "laplace"])
def test_sound_cells_pass_at_every_block_of_a_run(error: str) -> None:
    """2,000 runs of 40 blocks; a block has some 4 flips. Gaps beyond 5 s are the single rule's."""
    random = Random(5)
    pool = [m for m in flips(random, error, 300_000) if m <= 5]
    flagged = 0
    for _ in range(2_000):
        squares, number = 0.0, 0
        for _ in range(40):
            block = random.choices(pool, k=random.randrange(9))
            squares, number = squares + sum(m * m for m in block), number + len(block)
            if together_outside(number, squares) is not None:
                flagged += 1
                break
    assert flagged <= 20


def test_a_fault_whose_flips_lie_anywhere_is_seen_by_its_fourteenth() -> None:
    """Each of them within the allowance, gaps uniform up to 5 s."""
    random = Random(6)
    seen = 0
    for _ in range(500):
        multiples = [random.uniform(0, 5) for _ in range(14)]
        seen += together_outside(14, sum(m * m for m in multiples)) is not None
    assert seen / 500 >= 0.97


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=4), st.floats(0, 2))
def test_the_allowance_is_never_below_the_scales(gaps: list[float], rms: float) -> None:
    scale = ErrorScale(rms, rms, 10, 0, rms)
    found = PlaceVerdict(PLACE, tuple(gaps), scale)
    assert found.allowance >= scale.allowance
    assert found.gap is not None
    assert found.is_tie is (found.gap <= found.allowance + STILL)
    assert PlaceVerdict(PLACE, tuple(-gap for gap in gaps), scale).is_tie is found.is_tie


STEP = 0.125
"""Logits of 16 to 32 in bfloat16."""


def stepped(jumps: int, positions: int = 128) -> ErrorScale:
    """A scale where most positions stay and `jumps` of them move by a whole step."""
    decoded = [{1: -0.1, 2: -1.1 - STEP * (n < jumps)} for n in range(positions)]
    still = [{1: -0.1, 2: -1.1}] * positions
    return error_scale(decoded, still, [still, still, still])


def test_a_gap_of_a_step_is_a_tie_if_steps_were_seen() -> None:
    scale = stepped(jumps=4)
    assert scale.rms == pytest.approx(STEP / 32**0.5)
    assert 5 * scale.rms < STEP
    assert PlaceVerdict(PLACE, (STEP, STEP, STEP), scale).is_tie
    rounded = STEP + 1e-6  # log probabilities are float32
    assert PlaceVerdict(PLACE, (rounded, rounded, rounded), scale).is_tie
    assert not PlaceVerdict(PLACE, (2 * STEP, 2 * STEP, 2 * STEP), scale).is_tie


@pytest.mark.parametrize("flips", [1, 4, 20, 100])
def test_sound_flips_of_logits_in_steps_pass_together(flips: int) -> None:
    """Half of them have a gap of a whole step, half of none."""
    verdict = PlaceVerdict(PLACE, (STEP, STEP, STEP), stepped(jumps=4))
    assert verdict.multiple == pytest.approx(1.0)
    assert together_outside(flips, flips / 2 * verdict.multiple**2) is None
