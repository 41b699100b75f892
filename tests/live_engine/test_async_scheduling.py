"""Async scheduling on the CPU, on one rank and on two: counts are vLLM's whatever comes late.

vLLM switches it off on a CPU; switched on again, its scheduler and its V1 runner do what they do
on a GPU. Drafts are then validated after their step was sent to the workers, results reach the host
of one rank alone, and windows run of requests that have finished.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from checklist_rows import PROMPTS, check_everything_in_one_batch, check_grammar
from checklist_tools import Answers, ask, check_cache, check_same, greedy
from engine_tools import tiny_pair, tiny_spec

from nwor_bench.engine.engine import VllmEngine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.row("async scheduling"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors"),
]

LENGTHS = list(range(12, 44, 4))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(2, id="two ranks", marks=pytest.mark.long),
        pytest.param(1, id="one rank"),
    ],
)
def engine(
    request: pytest.FixtureRequest,
    start_engine: Callable[..., VllmEngine],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[VllmEngine]:
    """A draft model with partial acceptance; one engine at a time, as their counters have names."""
    from vllm.platforms.cpu import CpuPlatform

    pair = tiny_pair(tmp_path_factory.mktemp("pair"), "draft_model")
    spec = tiny_spec(tensor_parallel_size=request.param, block_size=32, kv_cache_gib=0.1)
    stock = CpuPlatform.check_and_update_config.__func__

    def switched_on(cls: type, config: Any) -> None:
        stock(cls, config)
        config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(switched_on))
        engine = start_engine(pair, spec)
        yield engine
        engine.close()


@pytest.fixture(scope="module")
def answers_so_far() -> list[Answers]:
    """What engines of this module said to the same question."""
    return []


def check_vllms_counts(answers: Answers) -> None:
    """Drafts, accepted tokens and accepted tokens at each place, less what vLLM leaves out."""
    assert answers.counted("draft") == answers.counters.draft_tokens > 0
    assert answers.counted("accepted") == answers.counters.accepted_tokens > 0
    assert _by_place(answers, "accepted_per_position") == answers.counters.accepted_per_position
    assert sum(_by_place(answers, "drafts_per_position")) == answers.counters.draft_tokens


def _by_place(answers: Answers, name: str) -> tuple[int, ...]:
    rows = [tuple(getattr(window, name)) + (0,) * 4 for window in answers.windows]
    return tuple(sum(row[place] for row in rows) for place in range(4))


@pytest.mark.parametrize("scv", [pytest.param("off", marks=pytest.mark.long), "graph"])
def test_windows_of_finished_requests_are_counted_apart(engine: VllmEngine, scv: str) -> None:
    """Each request ends at another length; every rank of an engine says the same (see `ask`)."""
    assert engine._llm.llm_engine.vllm_config.scheduler_config.async_scheduling is True
    params = [greedy(length) for length in LENGTHS]
    stock = ask(engine, "off", PROMPTS, params)
    check_vllms_counts(stock)
    assert stock.total("uncounted_draft_tokens") > 0
    staged = ask(engine, "stage", PROMPTS, params, scv=scv)
    check_same(engine, staged, stock)
    check_vllms_counts(staged)
    check_cache(engine, PROMPTS, staged)


@pytest.mark.long  # compares the two
@pytest.mark.row("structured output")
def test_a_grammar_that_invalidates_drafts(
    engine: VllmEngine, answers_so_far: list[Answers]
) -> None:
    """One rank and two give equal answers and equal counts."""
    stock = check_grammar(engine, ["off", "graph"])
    check_vllms_counts(stock)
    answers_so_far.append(stock)
    assert stock.tokens == answers_so_far[0].tokens
    assert stock.counters == answers_so_far[0].counters


@pytest.mark.long
@pytest.mark.row("structured output")
def test_every_request_of_a_batch_asks_for_something_else(engine: VllmEngine) -> None:
    """Forbidden drafts are found late: they are verified, staged and never committed."""
    staged = check_everything_in_one_batch(engine, ["graph"])
    check_vllms_counts(staged)
    assert staged.total("uncounted_draft_tokens") > 0
