"""The K/V gate on engines of many kinds: sound ones pass, and one changed value is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checklist_rows import SMALL_CACHE
from checklist_tools import metric
from engine_tools import eagle_pair, prompts_of, tiny_pair, tiny_spec
from kv_gate_tools import change_a_value, kv_results
from rank_faults import on_ranks

from nwor_bench.analysis.parity.kv_result import KvResult
from nwor_bench.analysis.parity.kv_verdict import KvVerdict
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.protocol import BatchOutput

pytestmark = pytest.mark.engine

PROMPTS = prompts_of([24, 31, 18, 40, 27, 22, 35, 29])
SHARED = [[*range(40, 140), *prompt] for prompt in PROMPTS]
COMMITTED = sum(map(len, PROMPTS)) + 8 * 39


def check_whole(result: KvResult, committed: int, ranks: int = 1) -> None:
    """Every position was compared, in three layers."""
    assert result.reason is None
    assert (result.committed, result.checked, result.unknown) == (committed, committed, 0)
    assert (result.layers, result.ranks, result.beyond_budget) == (3, ranks, 0)


@pytest.mark.parametrize("one_attention", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_draft_model(engine: VllmEngine, one_attention: bool) -> None:
    """Bit for bit, and with the tolerances of a GPU: of mode off against itself."""
    scv_modes = ("off", "graph", "adaptive")
    for result in kv_results(engine, PROMPTS, one_attention=one_attention, scv_modes=scv_modes):
        check_whole(result, COMMITTED)
        assert result.verdict is (KvVerdict.EXACT if one_attention else KvVerdict.WITHIN)


@pytest.mark.parametrize("one_attention", [True, False])
@pytest.mark.parametrize(
    ("layer", "request_number", "position", "column", "head"),
    [
        (0, 0, 3, 0, 0),
        pytest.param(1, 3, 60, 20, 1, marks=pytest.mark.long),
        pytest.param(2, 7, 67, 40, 1, marks=pytest.mark.long),
    ],
)
def test_one_changed_value_is_named(
    engine: VllmEngine,
    one_attention: bool,
    layer: int,
    request_number: int,
    position: int,
    column: int,
    head: int,
) -> None:
    def plant(output: BatchOutput) -> None:
        place = (layer, request_number, position, column, head, 0)
        on_ranks(engine, change_a_value, *place)

    (result,) = kv_results(engine, PROMPTS, one_attention=one_attention, before_check=plant)
    assert result.verdict is KvVerdict.BROKEN
    assert result.reason is not None
    part = "output" if position >= len(PROMPTS[request_number]) else "prompt"
    assert result.reason.startswith(
        f"K/V: layer {layer} (model.layers.{layer}.self_attn.attn), request {request_number}, "
        f"position {position} (of its {part}), {'K' if column < 32 else 'V'}, head {head}"
    )


@pytest.mark.long
def test_prefix_hits_and_chunks(start_engine: Callable[..., VllmEngine], tmp_path: Path) -> None:
    arguments = {"max_num_batched_tokens": 64}
    pair = tiny_pair(tmp_path, "draft_model")
    engine = start_engine(pair, tiny_spec(block_size=32, engine_args=json.dumps(arguments)))
    hits = metric(engine, "vllm:prefix_cache_hits")
    for one_attention in (True, False):
        (result,) = kv_results(engine, SHARED, one_attention=one_attention)
        check_whole(result, COMMITTED + 8 * 100)
    assert metric(engine, "vllm:prefix_cache_hits") > hits


@pytest.mark.long
def test_an_eagle_head(start_engine: Callable[..., VllmEngine], tmp_path: Path) -> None:
    engine = start_engine(eagle_pair(tmp_path), tiny_spec(block_size=32))
    for one_attention in (True, False):
        (result,) = kv_results(engine, PROMPTS, one_attention=one_attention)
        check_whole(result, COMMITTED)


@pytest.mark.long
def test_preempted_requests(start_engine: Callable[..., VllmEngine], tmp_path: Path) -> None:
    """A request that was preempted is computed again in other blocks, and these are compared."""
    pair = tiny_pair(tmp_path, "draft_model")
    engine = start_engine(pair, tiny_spec(block_size=32, engine_args=json.dumps(SMALL_CACHE)))
    before = metric(engine, "vllm:num_preemptions")
    for one_attention in (True, False):
        (result,) = kv_results(engine, PROMPTS, one_attention=one_attention, max_new_tokens=100)
        check_whole(result, COMMITTED + 8 * 60)
    assert metric(engine, "vllm:num_preemptions") > before


@pytest.mark.long
def test_without_prefix_caching(start_engine: Callable[..., VllmEngine], tmp_path: Path) -> None:
    """vLLM then gives the blocks that were freed last to the next request at once."""
    arguments: dict[str, Any] = {"enable_prefix_caching": False, "max_num_seqs": 3}
    pair = tiny_pair(tmp_path, "ngram")
    engine = start_engine(pair, tiny_spec(block_size=32, engine_args=json.dumps(arguments)))
    (result,) = kv_results(engine, PROMPTS)
    check_whole(result, COMMITTED)
    assert result.verdict is KvVerdict.EXACT
