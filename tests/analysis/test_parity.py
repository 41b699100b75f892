"""The comparisons behind the gate: nothing equal is refused, nothing different passes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import make_run

from nwor_bench.analysis.parity.tokens import acceptance_mismatch, digest, first_mismatch

batches = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), min_size=1, max_size=5)
BATCH = make_run(blocks=1).batches[0]


@given(batches)
def test_equal_tokens_have_no_mismatch(tokens: list[list[int]]) -> None:
    assert first_mismatch(tokens, [list(t) for t in tokens]) is None


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
    assert BATCH.vllm_accepted_per_position is not None
    first, second, *rest = BATCH.vllm_accepted_per_position
    moved = replace(BATCH, vllm_accepted_per_position=(first - 1, second + 1, *rest))
    text = acceptance_mismatch(moved, BATCH)
    assert text is not None
    assert str(moved.vllm_accepted_per_position) in text
    assert str(BATCH.vllm_accepted_per_position) in text


def test_drafts_must_be_equal_too() -> None:
    assert BATCH.vllm_draft_tokens is not None
    fewer = replace(BATCH, vllm_draft_tokens=BATCH.vllm_draft_tokens - 1)
    assert acceptance_mismatch(fewer, BATCH) is not None


@given(st.lists(st.integers(-1, 300)), st.lists(st.integers(-1, 300)))
def test_digests_tell_tokens_apart(a: list[int], b: list[int]) -> None:
    assert (digest(a) == digest(b)) == (a == b)


def test_a_digest_keeps_the_borders_between_tokens() -> None:
    assert len({digest(ids) for ids in ([1, 23], [12, 3], [123], [1, 2, 3])}) == 4
    assert len(digest([])) == 16
