"""The checklist's rows that need an engine of their own, on a GPU: scheduling, drafters, caches.

Float32 unless a row forbids it; synthetic acceptance draws alike in every mode.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checklist_rows import (
    LONG,
    ONE_LONG,
    PROMPTS,
    SMALL_CACHE,
    check_drafter,
    check_preemption,
)
from checklist_tools import (
    ask,
    check_cache,
    check_partial,
    compare,
    greedy,
)
from engine_tools import (
    FULL_FOR_ALL,
    SCV,
    eagle_pair,
    tiny_pair,
    tiny_spec,
    worker_of,
)
from tiny_drafters import eagle3_pair, mtp_pair

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import ResolvedPair

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

Start = Callable[..., VllmEngine]


def spec_of(arguments: dict[str, Any], **changes: Any) -> Any:
    """Eight requests, four drafts each."""
    given = json.dumps(arguments)
    return tiny_spec(draft_tokens=4, block_size=32, engine_args=given, **changes)


@pytest.mark.row("preemption under a small cache")
@pytest.mark.row("async scheduling")
@pytest.mark.parametrize("late", [True, False], ids=["async", "in step"])
def test_preemption_with_results_that_come_late_or_not(
    late: bool, tmp_path: Path, start_alone: Start, record_property: Callable[[str, str], None]
) -> None:
    """Async scheduling also runs windows of requests that a token has already ended."""
    arguments = {**FULL_FOR_ALL, **SMALL_CACHE, "async_scheduling": late}
    engine = start_alone(tiny_pair(tmp_path, "draft_model"), spec_of(arguments))
    assert worker_of(engine).vllm_config.scheduler_config.async_scheduling is late
    for scv in SCV:
        check_preemption(engine, scv)
    free = ask(engine, "off", LONG[:4], greedy())
    params = [greedy(stop_token_ids=[tokens[20]]) for tokens in free.tokens]
    stock, staged = compare(engine, LONG[:4], params, SCV)
    for answers in (stock, staged):
        assert (answers.total("uncounted_draft_tokens") > 0) is late
    record_property("note", "vLLM's V2 runner computes again and swaps nothing out")


@pytest.mark.parametrize(
    ("length", "accepted"),
    [
        pytest.param(1.0, 0, marks=pytest.mark.row("no acceptance"), id="none"),
        pytest.param(5.0, 1, marks=pytest.mark.row("full acceptance"), id="all"),
    ],
)
def test_every_draft_ends_alike(
    length: float, accepted: int, tmp_path: Path, start_alone: Start
) -> None:
    """`length`: tokens that a request gains a window; a request's last window may be cut."""
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}
    spec = spec_of(FULL_FOR_ALL, speculative_config=json.dumps(synthetic))
    engine = start_alone(tiny_pair(tmp_path, "draft_model"), spec)
    for number in (1, 8):
        stock, staged = compare(engine, PROMPTS[:number], greedy(), SCV)
        for answers in (stock, staged):
            assert answers.counters.accepted_tokens == accepted * answers.counters.draft_tokens
        assert staged.total("rejected_tokens") == (1 - accepted) * staged.total("staged_tokens")


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(eagle_pair, marks=pytest.mark.row("eagle"), id="eagle"),
        pytest.param(eagle3_pair, marks=pytest.mark.row("eagle3"), id="eagle3"),
        pytest.param(mtp_pair, marks=pytest.mark.row("mtp"), id="mtp"),
    ],
)
def test_a_drafter_in_the_targets_cache_group(
    build: Callable[[Path], ResolvedPair], tmp_path: Path, start_alone: Start
) -> None:
    check_drafter(start_alone(build(tmp_path), spec_of(FULL_FOR_ALL)), SCV)


@pytest.mark.row("ngram")
def test_prompt_lookup(tmp_path: Path, start_alone: Start) -> None:
    engine = start_alone(tiny_pair(tmp_path, "ngram"), spec_of(FULL_FOR_ALL))
    for prompts in (ONE_LONG[:1], ONE_LONG):
        stock, staged = compare(engine, prompts, greedy(), SCV)
        check_partial(stock)
        check_cache(engine, prompts, staged)
