"""The checklist on one engine: how requests end, sample, and are constrained inside a window."""

from collections.abc import Callable
from typing import Any

import pytest
from checklist_rows import (
    PENALTIES,
    PROMPTS,
    check_grammar,
    check_max_tokens,
    check_penalties,
    check_stops,
)
from checklist_tools import ask, check_cache, check_counts, greedy

from nwor_bench.engine.engine import VllmEngine

pytestmark = pytest.mark.engine

ATTEMPTS = 20
"""Batches a sampled case may take: stock vLLM's CPU sampler accepts from 0 to 30 drafts in one."""

SCV = pytest.mark.parametrize("scv", ["off", pytest.param("graph", marks=pytest.mark.long)])


@pytest.mark.row("requests that finish inside a window")
@pytest.mark.row("max tokens inside a window")
@SCV
def test_max_tokens_inside_a_window(engine: VllmEngine, scv: str) -> None:
    check_max_tokens(engine, [scv])


@pytest.mark.row("requests that finish inside a window")
@pytest.mark.row("stop strings inside a window")
@pytest.mark.parametrize("kind", ["stop", pytest.param("stop_token_ids", marks=pytest.mark.long)])
def test_stop_inside_a_window(engine: VllmEngine, kind: str) -> None:
    check_stops(engine, kind, ["off"])


@pytest.mark.long
@pytest.mark.row("temperature and top-p")
@pytest.mark.parametrize(
    "settings", [{"temperature": 0.3}, {"temperature": 0.5, "top_p": 0.5}], ids=["0.3", "top-p"]
)
@SCV
def test_sampling_leaves_a_sound_cache(
    engine: VllmEngine,
    scv: str,
    settings: dict[str, float],
    record_property: Callable[[str, str], None],
) -> None:
    """Sampled tokens cannot be compared, but what goes on from them can.

    Without top-k, with which stock vLLM 0.32 reads memory out of bounds on a CPU as soon as it
    speculates.
    """
    params = greedy(32, **settings)
    staged = ask(engine, "stage", PROMPTS, params, scv=scv)
    check_counts(engine, staged)
    assert staged.tokens != ask(engine, "off", PROMPTS, greedy(32)).tokens
    committed = 0
    for _ in range(ATTEMPTS):
        staged = ask(engine, "stage", PROMPTS, params, scv=scv)
        check_cache(engine, PROMPTS, staged)
        committed += staged.total("committed_tokens")
        if committed >= len(PROMPTS):
            break
    assert committed > 0  # else no cache held a commit, and nothing was compared
    record_property("note", "sampled tokens differ between two stock runs of one seed on a CPU; "
                            "counts and the cache that is left behind are compared")  # fmt: skip


@pytest.mark.long
@pytest.mark.row("seeds")
def test_seeds_of_requests(engine: VllmEngine, record_property: Callable[[str, str], None]) -> None:
    """Stock vLLM's rejection sampler gives other tokens each time on a CPU, seeds or not."""
    params = [greedy(32, temperature=0.3, seed=n) for n in range(len(PROMPTS))]
    first, again = (ask(engine, "off", PROMPTS, params) for _ in range(2))
    staged = ask(engine, "stage", PROMPTS, params)
    check_counts(engine, staged)
    check_cache(engine, PROMPTS, staged)
    if first.tokens == again.tokens:
        assert staged.tokens == first.tokens
    else:
        record_property("note", "stock vLLM's CPU sampler is not reproducible from a request's "
                                "seed; counts and the cache are compared")  # fmt: skip


@pytest.mark.long
@pytest.mark.row("penalties")
@pytest.mark.parametrize("settings", PENALTIES.values(), ids=PENALTIES)
def test_penalties(engine: VllmEngine, settings: dict[str, Any]) -> None:
    check_penalties(engine, settings, ["off", "graph"])


@pytest.mark.row("structured output")
def test_a_grammar_that_invalidates_drafts(engine: VllmEngine) -> None:
    check_grammar(engine, ["off", "graph"])
