"""Draft counts at several contexts: one table, and which context changes the best count."""

from types import SimpleNamespace
from typing import Any

import pytest
from said import rate, worth

from nwor_bench.records.types import Verdict
from nwor_bench.report.contexts import context_answer, context_table
from nwor_bench.report.text import NOT_MEASURED

pytestmark = pytest.mark.slow  # imports pandas and scipy


def at(best: dict[int, int], tokens: int | None) -> Any:
    """A context at which these draft counts are the best, k = 0 included."""
    rates = [rate(size, k or 1, 1.0 + k / 10, Verdict.FASTER) for size, k in best.items()]
    header = SimpleNamespace(scenario={"prompts": {"tokens": tokens}})
    return SimpleNamespace(worth=worth(rates, best), header=header)


WORTHS = {
    "ctx-256": at({1: 3, 8: 3, 64: 0}, 256),
    "ctx-1k": at({1: 3, 8: 1, 64: 0}, 1024),
    "ctx-8k": at({1: 3, 8: 1}, 8192),
}


def test_a_context_is_a_row_and_a_batch_size_a_column() -> None:
    found = context_table(WORTHS)
    assert [list(row) for row in found.rows] == [
        ["ctx-256", "1.30, k = 3", "1.30, k = 3", "no drafts"],
        ["ctx-1k", "1.30, k = 3", "1.10, k = 1", "no drafts"],
        ["ctx-8k", "1.30, k = 3", "1.10, k = 1", NOT_MEASURED],
    ]


def test_the_context_that_changes_the_best_count_is_named() -> None:
    text, changes = context_answer(WORTHS)
    assert text == "The context changes the best draft count at 8 requests."
    assert changes == [("8 requests", "k = 3 at ctx-256 and k = 1 at ctx-1k and ctx-8k")]
    plain = {"chat": at({1: 2}, None), "code": at({1: 0}, None)}
    assert context_answer(plain)[1] == [("1 request", "k = 2 at chat and no drafts at code")]


def test_what_changes_nothing_or_was_not_measured_is_said() -> None:
    same = {name: at({1: 2}, None) for name in ("chat", "code")}
    assert context_answer(same) == ("The scenario does not change the best draft count.", [])
    for left in ({}, {8: 2}):
        one = {"chat": at({1: 2}, None), "code": at(left, None)}
        assert context_answer(one) == (
            "The scenario has one value at each batch size whose best is known.",
            [],
        )
