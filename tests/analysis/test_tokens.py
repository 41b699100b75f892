"""Output compared with that of off x off, and differing tokens checked one by one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from fake_engine import FakeEngine, Flip, greedy_token
from hypothesis import example, given
from hypothesis import strategies as st
from refusals import refused
from synthetic_run import make_run

from nwor_bench.analysis.parity.ties import Place
from nwor_bench.analysis.parity.tokens import (
    EXACT,
    EXPLAINED,
    INVALID,
    TokenCheck,
    acceptance_mismatch,
    check_tokens,
    digest,
    first_mismatch,
)
from nwor_bench.errors import EngineError
from nwor_bench.records.types import Cell, NworMode, ScvMode
from nwor_bench.run.gate.ties import MAX_POSITIONS, TieCheck, spread

batches = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), min_size=1, max_size=5)
BATCH = make_run(blocks=1).batches[0]


@given(batches, batches)
def test_a_mismatch_is_found_exactly_where_there_is_one(
    ours: list[list[int]], theirs: list[list[int]]
) -> None:
    assert (first_mismatch(ours, theirs) is None) == (ours == theirs)


@given(batches, st.data())
def test_the_first_difference_is_named(tokens: list[list[int]], data: st.DataObject) -> None:
    request = data.draw(st.integers(0, len(tokens) - 1))
    at = data.draw(st.integers(0, len(tokens[request]) - 1))
    changed = [list(t) for t in tokens]
    changed[request][at] += 100
    text = first_mismatch(changed, tokens)
    wrong, right = changed[request][at], tokens[request][at]
    assert text == (
        f"1 of {len(tokens)} requests differ; first: request {request}, "
        f"output token {at}: {wrong} instead of {right}"
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ([[1, 2]], [[1, 2, 3]], "output token 2: the end instead of 3"),
        ([[1, 2, 3]], [[1, 2]], "output token 2: 3 instead of the end"),
        ([[]], [[7]], "output token 0: the end instead of 7"),
        ([[1]], [[1], [2]], "1 requests answered, 2 expected"),
        ([[9], [1], [9]], [[1], [1], [1]], "2 of 3 requests differ; first: request 0"),
    ],
)
def test_lengths_and_counts(ours: list[list[int]], theirs: list[list[int]], words: str) -> None:
    assert words in (first_mismatch(ours, theirs) or "")


def test_acceptance_must_be_equal_position_by_position() -> None:
    assert acceptance_mismatch(BATCH, BATCH) is None
    first, second, *rest = BATCH.vllm_accepted_per_position or ()
    moved = replace(BATCH, vllm_accepted_per_position=(first - 1, second + 1, *rest))
    text = str(acceptance_mismatch(moved, BATCH))
    assert str(moved.vllm_accepted_per_position) in text
    assert str(BATCH.vllm_accepted_per_position) in text
    fewer = replace(BATCH, vllm_draft_tokens=(BATCH.vllm_draft_tokens or 0) - 1)
    assert acceptance_mismatch(fewer, BATCH) is not None


@given(st.lists(st.integers(-1, 300)), st.lists(st.integers(-1, 300)))
@example([1, 23], [12, 3])
@example([123], [1, 2, 3])
def test_digests_tell_tokens_apart(a: list[int], b: list[int]) -> None:
    assert (digest(a) == digest(b)) == (a == b)
    assert len(digest(a)) == 16


OFF = Cell("toy", NworMode.OFF, ScvMode.OFF)
STAGE = Cell("toy", NworMode.STAGE, ScvMode.GRAPH)
PROMPTS = [[1, 2, 3], [4, 5], [6]]
LENGTH = 12


def own_text(prompt: Sequence[int], length: int) -> tuple[int, ...]:
    ids = tuple(prompt)
    for _ in range(length):
        ids = (*ids, greedy_token(ids))
    return ids[len(prompt) :]


REFERENCE = [own_text(prompt, LENGTH) for prompt in PROMPTS]


def prefix(request: int, at: int) -> tuple[int, ...]:
    return (*PROMPTS[request], *REFERENCE[request][:at])


def flip(request: int, at: int, gap: float) -> dict[tuple[int, ...], Flip]:
    """Stage answers another token there; mode off puts it `gap` nats behind its own."""
    return {prefix(request, at): Flip((REFERENCE[request][at] + 100) % 256, gap)}


def checked(engine: FakeEngine, to_the_end: bool = True) -> TokenCheck:
    """Stage's tokens beside the reference, on an engine whose error is 0.05 nats."""
    ties = TieCheck(engine, OFF, lambda: PROMPTS, LENGTH, ignore_eos=True)
    engine.set_modes(STAGE)
    tokens = [engine._greedy(tuple(prompt), LENGTH) for prompt in PROMPTS]
    return check_tokens(STAGE, PROMPTS, tokens, REFERENCE, ties, to_the_end=to_the_end)


def test_a_tie_is_explained_and_the_rest_behind_it_is_compared() -> None:
    engine = FakeEngine(flips=flip(1, 4, gap=0.05))
    found = checked(engine)
    assert found.comparison.parity == EXPLAINED
    assert "1 of 3 requests differ" in str(found.comparison.difference)
    assert "36 of 36 tokens compared" in str(found.comparison.difference)
    assert (len(found.verdicts), found.rounds, found.tokens_compared) == (1, 1, 36)
    assert (found.largest_gap or 9) <= 0.25
    assert found.diverged == (8,)
    went_on = [call for call in engine.decoded if call[0] == STAGE]
    assert went_on == [(STAGE, (prefix(1, 5),), (LENGTH - 5,))]


@pytest.mark.parametrize(
    ("flips", "to_the_end", "parity", "verdicts", "rounds", "compared"),
    [
        ([], True, EXACT, 0, 0, 36),  # equal tokens ask nothing
        ([(0, LENGTH - 1, 0.05)], True, EXPLAINED, 1, 0, 36),
        ([(0, at, 0.05) for at in range(LENGTH)], True, EXPLAINED, LENGTH, LENGTH - 1, 36),
        ([(0, 3, 0.05)], False, EXPLAINED, 1, 0, 4 + 12 + 12),  # only first differences
        # Were only first differences checked, this cell would pass.
        ([(0, 3, 0.05), (0, 9, 1.5)], False, EXPLAINED, 1, 0, 4 + 12 + 12),
        ([(0, 3, 0.05), (0, 9, 1.5)], True, INVALID, 2, 1, None),
    ],
)
def test_rounds_go_on_behind_each_tie(
    flips: list[tuple[int, int, float]], to_the_end: bool, parity: str, verdicts: int, rounds: int,
    compared: int | None,
) -> None:  # fmt: skip
    made: dict[tuple[int, ...], Flip] = {}
    for each in flips:
        made |= flip(*each)
    engine = FakeEngine(flips=made)
    found = checked(engine, to_the_end)
    assert (found.comparison.parity, len(found.verdicts), found.rounds) == (
        parity, verdicts, rounds
    )  # fmt: skip
    if compared is not None:
        assert (found.tokens_compared, found.tokens) == (compared, 36)
    if not flips:
        assert found.comparison.difference is None
        assert engine.decoded == []
    if not to_the_end:
        assert STAGE not in {cell for cell, _, _ in engine.decoded}
    if parity == INVALID:
        assert "request 0, output token 9" in str(found.comparison.difference)


@pytest.mark.parametrize("gap", [0.8, -0.8])
def test_a_difference_that_mode_off_can_tell_apart_is_invalid(gap: float) -> None:
    found = checked(FakeEngine(flips=flip(2, 0, gap)))
    assert found.comparison.parity == INVALID
    token = (REFERENCE[2][0] + 100) % 256
    assert (
        f"not a tie: 1, first: request 2, output token 0: {token} instead of {REFERENCE[2][0]}"
        in str(found.comparison.difference)
    )
    assert found.largest_gap is None


def test_a_token_beyond_the_likeliest_is_no_tie() -> None:
    engine = FakeEngine(flips=flip(0, 3, 0.01))
    hidden = engine._top
    token = (REFERENCE[0][3] + 100) % 256

    def without(ids: tuple[int, ...], shape: tuple[object, ...]) -> dict[int, float]:
        return {t: p for t, p in hidden(ids, shape).items() if t != token}

    engine._top = without  # type: ignore[method-assign]
    found = checked(engine)
    assert found.comparison.parity == INVALID
    assert "not among mode off's likeliest" in str(found.comparison.difference)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([(1, 2), (3,)], "request 0 ends after 2 output tokens, with off x off after 3"),
        ([(1, 2, 3, 4), (3,)], "request 0 ends after 4 output tokens, with off x off after 3"),
        ([(1, 2, 3), ()], "request 1 ends after 0 output tokens, with off x off after 1"),
        ([(1, 2, 3)], "1 requests answered, 2 expected"),
    ],
)
def test_an_output_that_is_the_others_beginning_is_invalid(
    tokens: list[tuple[int, ...]], words: str
) -> None:
    never_asked: Any = None
    found = check_tokens(STAGE, [[1], [2]], tokens, [(1, 2, 3), (3,)], never_asked, to_the_end=True)
    assert found.comparison.parity == INVALID
    assert words in str(found.comparison.difference)


def test_the_scale_is_measured_once_and_in_mode_off() -> None:
    engine = FakeEngine(flips=flip(1, 4, 0.05), error=0.2)
    ties = TieCheck(engine, OFF, lambda: PROMPTS, LENGTH, ignore_eos=True)
    assert ties.measured is None
    place = Place(1, 4, REFERENCE[1][4], (REFERENCE[1][4] + 100) % 256)
    ties.check(PROMPTS, REFERENCE, [place])
    first = ties.measured
    assert first is not None
    assert first.positions == 36
    assert 0.1 < first.rms / 2**0.5 < 0.4  # each shape moves by 0.2 of its own
    asked = len(engine.decoded)
    ties.check(PROMPTS, REFERENCE, [place, place])
    assert ties.measured is first
    assert len(engine.decoded) == asked + 3  # together, from the cache, and one prefix alone
    assert {cell for cell, _, _ in engine.decoded} == {OFF}
    assert ties.spent_s > 0


def test_an_engine_without_log_probabilities_is_an_error() -> None:
    engine = FakeEngine()
    engine._top = lambda ids, shape: {1: 0.0}  # type: ignore[method-assign]
    ties = TieCheck(engine, OFF, lambda: PROMPTS, LENGTH, ignore_eos=True)
    with refused("the gate cannot measure the error of mode off", EngineError):
        ties.check(PROMPTS, REFERENCE, [Place(0, 0, 1, 2)])


def test_positions_are_spread_over_all_outputs() -> None:
    assert spread([2, 0, 1], 9) == [(0, 0), (0, 1), (2, 0)]
    spots = spread([128] * 8, MAX_POSITIONS)
    assert len(set(spots)) == MAX_POSITIONS
    assert [sum(r == request for r, _ in spots) for request in range(8)] == [16] * 8
