"""The K/V gate on engines of many kinds: sound ones pass."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checklist_rows import SMALL_CACHE
from checklist_tools import metric
from engine_tools import prompts_of, tiny_pair, tiny_spec
from kv_gate_tools import check_whole, kv_results

from nwor_bench.analysis.parity.kv import KvVerdict
from nwor_bench.engine.engine import VllmEngine

pytestmark = [pytest.mark.engine, pytest.mark.long]

PROMPTS = prompts_of([24, 31, 18, 40, 27, 22, 35, 29])
SHARED = [[*range(40, 140), *prompt] for prompt in PROMPTS]
COMMITTED = sum(map(len, PROMPTS)) + 8 * 39


def test_prefix_hits_and_chunks(start_engine: Callable[..., VllmEngine], tmp_path: Path) -> None:
    arguments = {"max_num_batched_tokens": 64}
    pair = tiny_pair(tmp_path, "draft_model")
    engine = start_engine(pair, tiny_spec(block_size=32, engine_args=json.dumps(arguments)))
    hits = metric(engine, "vllm:prefix_cache_hits")
    for one_attention in (True, False):
        (result,) = kv_results(engine, SHARED, one_attention=one_attention)
        check_whole(result, COMMITTED + 8 * 100)
    assert metric(engine, "vllm:prefix_cache_hits") > hits


def test_preempted_requests(start_engine: Callable[..., VllmEngine], tmp_path: Path) -> None:
    """A request that was preempted is computed again in other blocks, and these are compared."""
    pair = tiny_pair(tmp_path, "draft_model")
    engine = start_engine(pair, tiny_spec(block_size=32, engine_args=json.dumps(SMALL_CACHE)))
    before = metric(engine, "vllm:num_preemptions")
    for one_attention in (True, False):
        (result,) = kv_results(engine, PROMPTS, one_attention=one_attention, max_new_tokens=100)
        check_whole(result, COMMITTED + 8 * 60)
    assert metric(engine, "vllm:num_preemptions") > before


def test_without_prefix_caching(start_engine: Callable[..., VllmEngine], tmp_path: Path) -> None:
    """vLLM then gives the blocks that were freed last to the next request at once."""
    arguments: dict[str, Any] = {"enable_prefix_caching": False, "max_num_seqs": 3}
    pair = tiny_pair(tmp_path, "ngram")
    engine = start_engine(pair, tiny_spec(block_size=32, engine_args=json.dumps(arguments)))
    (result,) = kv_results(engine, PROMPTS)
    check_whole(result, COMMITTED)
    assert result.verdict is KvVerdict.EXACT
