"""A tie is what mode off itself cannot tell apart: gaps in, verdicts out."""

import csv
import sys
from dataclasses import replace
from math import sqrt
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nwor_bench.analysis.parity.acceptance import BatchSums, ParitySums
from nwor_bench.analysis.parity.ties import (
    ALLOWED_RMS,
    MAX_GAP,
    STILL,
    ErrorScale,
    Place,
    PlaceVerdict,
    error_scale,
    gap_between,
    leading_two,
    together_outside,
)
from nwor_bench.records.types import Cell, NworMode, ScvMode

STUDY = Path(__file__).parents[2] / "sweeps" / "studies" / "tie-rule"
sys.path.append(str(STUDY))
from simulate import CASES, Machine, rate  # noqa: E402

PLACE = Place(request=1, position=3, reference=7, token=9)
SCALE = ErrorScale(rms=0.1, largest=0.25, positions=100, flips=())


def verdict(*gaps: float | None) -> PlaceVerdict:
    return PlaceVerdict(PLACE, gaps, SCALE)


@pytest.mark.parametrize(
    ("gaps", "gap", "is_tie"),
    [
        ((0.0, 0.0), 0.0, True),
        ((0.39, 0.39), 0.39, True),
        ((0.41, 0.41), 0.41, False),
        ((-0.41, -0.41), 0.41, False),
        ((0.65, 0.4), 0.525, False),
        ((0.5, 0.25), 0.375, True),
        ((0.5, -0.5), 0.0, True),
        ((0.6, -0.1), 0.25, True),
        ((3.0, -0.5), 1.25, True),  # mode off itself picks either
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
    still = ErrorScale(rms=0.0, largest=0.0, positions=9, flips=())
    if gap is not None and min(gaps) == max(gaps):  # if nothing moves, only equal logits are one
        assert PlaceVerdict(PLACE, gaps, still).is_tie is (gap == 0)


def test_words_name_gap_and_allowance() -> None:
    assert verdict(0.75, 0.8).describe() == "0.775 nats apart in mode off, a tie is at most 0.4"
    assert "not among mode off's likeliest" in verdict(None, 0.8).describe()
    assert "mode off itself picks either" in verdict(3.0, -0.5).describe()
    found = str(together_outside([0.25] * 10, FLIPPING, 500))
    assert "10 have a gap of 0.25 nats or more" in found
    assert "flip 0.5 of 500 tokens" in found


def test_gaps_are_those_of_the_two_candidates() -> None:
    top = {7: -0.5, 9: -0.75, 2: -3.0}
    assert [gap_between(top, a, b) for a, b in ((7, 9), (9, 7), (7, 8), (8, 7))] == [
        0.25, -0.25, None, None
    ]  # fmt: skip
    assert leading_two(top) == (7, 9)
    assert leading_two({4: -1.0}) is None
    with pytest.raises(ValueError, match="no position"):
        error_scale([{1: -0.1}], [{1: -0.1}], [[{1: -0.1}]])


def test_the_scale_is_what_decoding_differs_by_from_the_mean_of_the_shapes() -> None:
    decoded = [{1: -0.1, 2: -0.6, 3: -9.0}, {5: -0.2, 4: -2.2}, {6: -0.1, 7: -4.1}]
    first = [{1: -0.1, 2: -0.8}, {5: -0.2, 4: -1.7, 3: -0.1}, {6: -0.1, 7: -4.1}]
    second = [{1: -0.1, 2: -1.0}, {5: -0.2, 4: -1.9}, {6: -0.1}]
    found = error_scale(decoded, first, [first, second])
    assert found.positions == 2  # the third position's second token is not in all
    # Gaps 0.5 against (0.7 + 0.9) / 2, and 2.0 against (1.5 + 1.7) / 2.
    assert found.rms == pytest.approx(sqrt((0.3**2 + 0.4**2) / 2))
    assert found.largest == pytest.approx(0.4)
    assert found.allowance == MAX_GAP < ALLOWED_RMS * found.rms


def test_what_a_rounding_step_of_attention_moves_counts_if_decoding_moves_nothing() -> None:
    """FlashAttention on an H200: decode and prefill agreed bit for bit at 128 of 128 positions."""
    tops = [{1: -0.1, 2: -1.1}] * 16
    step = [{1: -0.1, 2: -1.1 - STEP * (n == 3)} for n in range(16)]
    found = error_scale(tops, step, [tops, tops, tops])
    assert (found.rms, found.largest) == pytest.approx((STEP / 4, STEP))
    assert found.allowance == pytest.approx(STEP)
    assert PlaceVerdict(PLACE, (STEP, STEP, STEP), found).is_tie
    assert error_scale(step, tops, [tops, tops, tops]) == found  # the larger of the two


def tops(*gaps: float) -> list[dict[int, float]]:
    return [{1: -0.1, 2: -0.1 - gap} for gap in gaps]


def test_expected_flips_are_gaps_that_measured_errors_reach() -> None:
    """Four positions are sampled of eight; one step's error moves two of them by 0.2 and 0.4."""
    sample = tops(0.1, 0.3, 2.0, 3.0)
    step = tops(0.3, 0.3, 1.6, 3.0)
    every = [*sample, *tops(0.0, 0.2, 0.4, 9.0)]
    found = error_scale(sample, step, [sample, sample], every)
    assert found.allowance == MAX_GAP  # wider gaps are no ties, whatever they do
    # Errors 0, 0, 0.2 and 0.4, each with either sign, and one more of any size. An error of 0.4
    # makes two tokens equal that are 0.4 apart: half of the time they stay in order.
    half = [(1 / 2 + 1) / 10, (1 + 1) / 10, (3 / 2 + 1) / 10, (2 + 1) / 10, (2 + 1) / 10]
    gaps = [0.4, 0.3, 0.2, 0.1, 0.0]
    for at, gap in enumerate(gaps, 1):
        assert found.flips_from(gap) == pytest.approx(sum(half[:at]) / 8)
    assert found.flips_from(0.41) == 0.0


FLIPPING = ErrorScale(0.1, 0.25, 128, flips=((0.0, 0.02), (0.125, 0.005), (0.25, 0.001)))


@pytest.mark.parametrize(
    ("gaps", "passes"),
    [
        ([], True),
        ([0.0] * 20, True),  # 10 are expected of 500
        ([0.0] * 45, False),
        ([0.125] * 12, True),  # 2.5 are
        ([0.125] * 18, False),
        ([0.25] * 7, True),  # 0.5 are
        ([0.25] * 10, False),
        ([*[0.0] * 20, *[0.25] * 10], False),
        ([0.3] * 6, True),
        ([0.3] * 7, False),
    ],
)
def test_more_ties_of_a_gap_than_errors_reach_are_not_sound(
    gaps: list[float], passes: bool
) -> None:
    assert (together_outside(gaps, FLIPPING, 500) is None) is passes


def test_tokens_and_ties_of_equal_prompts_count_once() -> None:
    """45 ties are too many in 500 tokens, and so are they if each of three blocks has these."""
    sums, cell = ParitySums(), Cell("tiny", NworMode.STAGE, ScvMode.OFF)
    ties = tuple(("one", at, 7, 0.0) for at in range(45))
    for few in (ties[:20], ties[:20]):
        assert sums.add(cell, BatchSums(("one", "two"), few, None, 500), FLIPPING) is None
    found = sums.add(cell, BatchSums(("one", "two"), ties, None, 500), FLIPPING)
    assert found is not None
    assert "10.0 of 500 tokens" in found
    other = replace(cell, scv_mode=ScvMode.GRAPH)
    for prompts in (("one",), ("two",), ("three",)):
        assert sums.add(other, BatchSums(prompts, ties, None, 1000), FLIPPING) is None


@pytest.mark.slow  # many simulated cells
@pytest.mark.parametrize("case", CASES)
def test_sound_cells_pass_and_a_near_second_best_token_does_not(case: str) -> None:
    """8 requests of 40 tokens: nearly all sound cells pass, and nearly no fault does."""
    machine, more = CASES[case]
    assert rate(40, machine, 320, **more) <= 0.01
    assert rate(25, machine, 320, 0.3, **more) >= 0.99 - 0.05 * (more.get("positions") == 32)


@pytest.mark.parametrize(("tokens", "refused"), [(320, True), (160, True), (80, False)])
@pytest.mark.parametrize("same_kernel", [False, True])
def test_measured_gaps_refuse_a_near_second_best_token(
    tokens: int, refused: bool, same_kernel: bool
) -> None:
    """SmolLM2 in bf16 on a CPU: with another kernel every such token is a tie by itself."""
    with (STUDY / "smollm2-cpu.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    sample = [row for row in rows if row["shapes"]]
    decoded, shapes, nudged = (
        tops(*(float(row[name]) for row in sample)) for name in ("decoded", "shapes", "nudged")
    )
    gaps = [float(row["decoded"]) for row in rows]
    scale = error_scale(decoded, nudged, [shapes] * 3, tops(*gaps), same_kernel=same_kernel)
    fault = [gap for gap in gaps[:tokens] if gap < 0.3]
    assert (max(fault) <= scale.allowance) is not same_kernel
    assert (together_outside(fault, scale, tokens) is not None) is refused


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=4), st.floats(0, 2))
def test_no_gap_beyond_the_cap_is_a_tie_unless_mode_off_picks_either(
    gaps: list[float], rms: float
) -> None:
    scale = ErrorScale(rms, rms, 10, ())
    found = PlaceVerdict(PLACE, tuple(gaps), scale)
    assert scale.allowance <= MAX_GAP
    assert found.gap is not None
    assert found.is_tie is (found.gap <= scale.allowance + STILL or min(gaps) < 0 < max(gaps))
    assert PlaceVerdict(PLACE, tuple(-gap for gap in gaps), scale).is_tie is found.is_tie


@pytest.mark.slow
def test_no_position_of_a_kernel_that_rarely_moves_needs_to_move() -> None:
    """Mode off's own kernel: 32 positions hold no movement in most cells, which still pass."""
    assert rate(40, Machine(own=0.01), 320, positions=32, same_kernel=True) <= 0.01


STEP = 0.125
"""Logits of 16 to 32 in bfloat16."""


def test_a_gap_of_a_step_is_a_tie_if_steps_were_seen() -> None:
    """Most positions stay, and four of 128 move by a whole step."""
    decoded = [{1: -0.1, 2: -1.1 - STEP * (n < 4)} for n in range(128)]
    still = [{1: -0.1, 2: -1.1}] * 128
    scale = error_scale(decoded, still, [still, still, still])
    assert scale.rms == pytest.approx(STEP / 32**0.5)
    assert ALLOWED_RMS * scale.rms < STEP
    rounded = STEP + 1e-6  # log probabilities are float32
    for gap, is_tie in ((STEP, True), (rounded, True), (2 * STEP, False)):
        assert PlaceVerdict(PLACE, (gap,) * 3, scale).is_tie is is_tie


def test_own_kernel_is_not_given_what_another_kernel_moves() -> None:
    """SmolLM2 in bf16 on a CPU: decoding moved 0 of 32 positions, attention's step 18 of them."""
    decoded = tops(*(STEP * (1 + n % 16) for n in range(32)))
    step = [{1: -0.1, 2: top[2] - 2 * STEP * (n % 2)} for n, top in enumerate(decoded)]
    other = error_scale(decoded, step, [decoded] * 3)
    own = error_scale(decoded, step, [decoded] * 3, same_kernel=True)
    assert other.allowance == MAX_GAP
    assert own.allowance == pytest.approx(2 * STEP)
    exact = error_scale(decoded, decoded, [decoded] * 3, same_kernel=True)
    assert exact.allowance == 0.0  # float32: no step is a rounding
