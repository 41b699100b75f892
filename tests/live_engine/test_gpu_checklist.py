"""The checklist on one engine with a GPU: full CUDA graphs for windows of 1, 2, 4 and 8 requests.

Float32, so that vLLM takes its Triton attention and tokens can be compared exactly. Sampled tokens
too, which the CPU's tests cannot: there two stock runs of one seed differ.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from checklist_rows import (
    PENALTIES,
    PROMPTS,
    check_everything_in_one_batch,
    check_grammar,
    check_logit_bias_is_refused,
    check_max_tokens,
    check_model_length,
    check_penalties,
    check_sampled,
    check_shared_prefixes,
    check_stops,
)
from checklist_tools import check_cache, check_partial, compare, greedy
from engine_tools import FULL_FOR_ALL, SCV, tiny_pair, tiny_spec

from nwor_bench.engine.engine import VllmEngine

pytestmark = [pytest.mark.engine, pytest.mark.gpu, pytest.mark.row("CUDA graphs")]


@pytest.fixture(scope="module")
def engine(
    start_engine: Callable[..., VllmEngine], tmp_path_factory: pytest.TempPathFactory
) -> VllmEngine:
    """A draft model with partial acceptance, and vLLM's default scheduling, which is async."""
    pair = tiny_pair(tmp_path_factory.mktemp("pair"), "draft_model")
    arguments = json.dumps({**FULL_FOR_ALL, "enable_prefix_caching": True})
    return start_engine(pair, tiny_spec(draft_tokens=4, block_size=32, engine_args=arguments))


@pytest.mark.row("Llama")
@pytest.mark.row("draft_model")
@pytest.mark.row("partial acceptance")
@pytest.mark.parametrize(
    "requests",
    [
        pytest.param(1, marks=pytest.mark.row("one request")),
        pytest.param(3, marks=pytest.mark.row("several requests")),
        pytest.param(8, marks=pytest.mark.row("several requests")),
    ],
)
def test_any_number_of_requests(engine: VllmEngine, requests: int) -> None:
    """Three are padded to the graph of four."""
    stock, staged = compare(engine, PROMPTS[:requests], greedy(), SCV)
    check_partial(stock)
    check_cache(engine, PROMPTS[:requests], staged)


@pytest.mark.row("requests that finish inside a window")
@pytest.mark.row("max tokens inside a window")
def test_max_tokens_inside_a_window(engine: VllmEngine) -> None:
    check_max_tokens(engine, SCV)


@pytest.mark.row("requests that finish inside a window")
@pytest.mark.row("stop strings inside a window")
@pytest.mark.parametrize("kind", ["stop", "stop_token_ids"])
def test_stop_inside_a_window(engine: VllmEngine, kind: str) -> None:
    check_stops(engine, kind, SCV)


@pytest.mark.row("temperature and top-p")
@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.3}, {"temperature": 0.7}, {"temperature": 0.5, "top_p": 0.5}],
    ids=["0.3", "0.7", "top-p"],
)
def test_sampled_tokens(engine: VllmEngine, settings: dict[str, float]) -> None:
    """Requests that bring no seed: the V2 runner draws theirs from a stream that a batch seeds."""
    check_sampled(engine, greedy(32, **settings), SCV)


@pytest.mark.row("seeds")
def test_seeds_of_requests(engine: VllmEngine) -> None:
    """Every fourth request is greedy beside sampled ones."""
    params = [greedy(32, temperature=0.3 * (n % 4), seed=n) for n in range(len(PROMPTS))]
    check_sampled(engine, params, SCV)


@pytest.mark.row("penalties")
@pytest.mark.parametrize("settings", PENALTIES.values(), ids=PENALTIES)
def test_penalties(engine: VllmEngine, settings: dict[str, Any]) -> None:
    check_penalties(engine, settings, SCV)


@pytest.mark.row("penalties")
@pytest.mark.row("structured output")
def test_every_request_of_a_batch_asks_for_something_else(engine: VllmEngine) -> None:
    check_everything_in_one_batch(engine, SCV)


def test_drafts_are_cut_at_the_longest_context(engine: VllmEngine) -> None:
    """Windows of different draft counts run in no captured graph, beside others that do."""
    check_model_length(engine, SCV)


def test_logit_bias_and_min_p_are_vllms_to_refuse(engine: VllmEngine) -> None:
    check_logit_bias_is_refused(engine)


@pytest.mark.row("structured output")
def test_a_grammar_that_invalidates_drafts(engine: VllmEngine) -> None:
    """With async scheduling the scheduler validates drafts while the forward already runs."""
    check_grammar(engine, SCV)


@pytest.mark.row("shared prefixes")
def test_requests_share_blocks(engine: VllmEngine) -> None:
    check_shared_prefixes(engine, SCV)
