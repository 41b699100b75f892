"""Two tensor-parallel ranks on two GPUs: parity, counts, and every slot beside a direct write."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checklist_rows import check_drafter_behind_32_layers, check_grammar
from checklist_tools import compare, greedy
from engine_tools import EAGER, FULL, eagle_pair, prompts_of, run_cell, tiny_pair, tiny_spec
from rank_faults import (
    commit_is_refused,
    on_ranks,
    planted,
    staging_fails,
    watch_slots,
    watched_slots,
)
from refusals import refused

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.errors import EngineError
from nwor_bench.models.pairs import resolve_pair

pytestmark = [
    pytest.mark.engine,
    pytest.mark.gpu,
    pytest.mark.row("tensor parallelism"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


ONE_CACHE_GROUP = {**EAGER, "disable_hybrid_kv_cache_manager": True}
"""Layers with and without a sliding window in one group of KV caches, which can be staged."""


def on_two_ranks(**changes: Any) -> Any:
    """A spec of eight requests on two GPUs."""
    return tiny_spec(draft_tokens=4, tensor_parallel_size=2, max_model_len=1024, **changes)


@pytest.mark.parametrize(
    ("name", "dtype", "arguments"),
    [
        ("llama-1b-shape", "float32", EAGER),
        ("llama-1b-shape", "float32", FULL),
        ("qwen-shape", "float32", EAGER),
        ("moe-shape", "float32", EAGER),
        ("gemma-shape", "float32", ONE_CACHE_GROUP),
    ],
)
def test_two_ranks_stage_as_one(
    name: str, dtype: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    pair = resolve_pair(name, cache_dir=tmp_path)
    spec = on_two_ranks(dtype=dtype, engine_args=json.dumps(arguments))
    engine = VllmEngine(pair, spec, tmp_path / "engine.log")
    try:
        prompts = prompts_of([600, 21, 90, 33, 61, 150, 40, 77])
        stock, _ = compare(engine, prompts, greedy(), ("off", "graph", "adaptive"))
        if "enforce_eager" in arguments:
            on_ranks(engine, watch_slots)
            watched = run_cell(engine, "stage", "off", prompts)
            for rank in on_ranks(engine, watched_slots):
                assert rank["windows"] == len(watched.windows) >= 8
                assert rank["accepted"] > 0 < rank["rejected"]
                assert rank["wrong"] == 0
            with planted(engine, staging_fails, rank=1):
                faulty = run_cell(engine, "stage", "off", prompts)
            assert list(faulty.token_ids) == stock.tokens
            assert faulty.rank_disagreement is None
            reasons = {window.fallback_reason for window in faulty.windows}
            assert reasons == {"rank_1:stage:RuntimeError"}
    finally:
        engine.close()


def test_drafter_layers_behind_32_target_layers_are_not_staged(
    tmp_path: Path, start_engine: Callable[..., VllmEngine]
) -> None:
    """The shape of the run that once failed: 32 layers, EAGLE, 16 requests, k = 8, two ranks."""
    spec = tiny_spec(requests=16, draft_tokens=8, tensor_parallel_size=2)
    engine = start_engine(eagle_pair(tmp_path, layers=32), spec)
    check_drafter_behind_32_layers(engine, ("graph",))


def test_ranks_stop_staging_with_the_same_window(
    tmp_path: Path, start_engine: Callable[..., VllmEngine]
) -> None:
    """Only one rank reads that a commit was refused; a staged window's vote tells the other."""
    spec = tiny_spec(draft_tokens=4, tensor_parallel_size=2, engine_args=json.dumps(EAGER))
    engine = start_engine(tiny_pair(tmp_path, "draft_model"), spec)
    prompts = prompts_of([20, 30, 40, 50])
    stock = run_cell(engine, "off", "off", prompts)
    with (
        planted(engine, commit_is_refused, rank=1),
        refused("a commit was refused on the device", EngineError, naming="layer 0: slot_range"),
    ):
        run_cell(engine, "stage", "off", prompts)
    after = run_cell(engine, "stage", "off", prompts)
    assert after.token_ids == stock.token_ids
    assert after.rank_disagreement is None
    assert {window.fallback_reason for window in after.windows} == {"staging_stopped"}


@pytest.mark.row("structured output")
def test_a_grammar_that_invalidates_drafts(
    tmp_path: Path, start_engine: Callable[..., VllmEngine]
) -> None:
    """The scheduler validates drafts late, and in another process than the ranks'."""
    spec = tiny_spec(draft_tokens=4, tensor_parallel_size=2, engine_args=json.dumps(EAGER))
    check_grammar(start_engine(tiny_pair(tmp_path, "draft_model"), spec), ("off", "graph"))
