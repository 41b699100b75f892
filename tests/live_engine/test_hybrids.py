"""Real vLLM with models whose layers keep a state: their attention layers are staged; what cannot
be staged starts, says why, and answers as without us.

Mamba is on a GPU: vLLM's CPU build lacks its selective scan. Only there are tokens compared: with
drafts the CPU build gives other tokens from batch to batch, with our hooks taken off as well, since
its kernels do not take a state back. Random weights from a configuration; "without us" is the same
engine with the hooks taken off, all of its methods being vLLM's own again.
"""

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from checklist_tools import check_support, compare, greedy
from engine_tools import prompts_of, run_cell, tiny_pair, tiny_spec, total, worker_of
from tiny_hybrids import EAGER_DUMMY, hybrid_pair

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.config_json import read_shape
from nwor_bench.plugin.layers import is_recurrent

pytestmark = pytest.mark.engine

MODES = [("off", "off"), ("stage", "off"), ("stage", "graph")]

PREDICTED = ("Nemotron-H", "Qwen3-Next")
"""Families whose states the byte model predicts."""


def check_states(config: dict[str, Any], engine: VllmEngine, drafts: int) -> None:
    """vLLM's layers have the states that the byte model reads from their config.json.

    Its CPU platform keeps states in float32 where the processor has AVX-512 for bfloat16, else in
    the model's dtype.
    """
    kept = "float32" if torch.cpu._is_avx512_bf16_supported() else config["torch_dtype"]
    expected = read_shape({**config, "mamba_ssm_dtype": kept}, "--config", "tiny").recurrent
    assert expected is not None
    context = worker_of(engine).model_runner.compilation_config.static_forward_context
    layers = [layer for layer in context.values() if is_recurrent(layer)]
    assert len(layers) == expected.count
    columns = expected.state.conv_kernel - 1 + drafts
    for layer in layers:
        parts = zip(layer.get_state_shape(), layer.get_state_dtype(), strict=True)
        conv, state = (prod(shape) * dtype.itemsize for shape, dtype in parts)
        assert state == expected.state.state_bytes()
        assert conv == columns * expected.state.conv_column_bytes()


def rest(*case: str | None) -> Any:
    """A case that only `make test-all` has."""
    return pytest.param(*case, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("family", "dtype", "backend"),
    [
        rest("Mamba 2", "float32", None),
        ("Granite hybrid", "float32", "ReferenceCPUAttentionImpl"),
        rest("Falcon-H1", "float32", "ReferenceCPUAttentionImpl"),
        rest("Nemotron-H", "float32", "ReferenceCPUAttentionImpl"),
        rest("Zamba 2", "float32", "ReferenceCPUAttentionImpl"),
        rest("LFM2", "float32", "ReferenceCPUAttentionImpl"),
        # vLLM's gated delta net on a CPU needs bfloat16.
        rest("Qwen3-Next", "bfloat16", "ReferenceCPUAttentionImpl"),
    ],
)
def test_a_hybrids_attention_layers_are_staged(
    family: str,
    dtype: str,
    backend: str | None,
    tmp_path: Path,
    start_engine: Callable[..., VllmEngine],
) -> None:
    pair = hybrid_pair(tmp_path / "model", family, dtype)
    spec = tiny_spec(kv_cache_gib=0.2, requests=2, engine_args=json.dumps(EAGER_DUMMY))
    engine = start_engine(pair, spec)
    try:
        status = engine.status()
        reason = None if backend else "recurrent_layers"
        assert status.staging_unavailable == reason
        assert status.attention_backend == backend
        assert (status.target_layers > 0) == (backend is not None)
        check_support(tmp_path / "model", status, spec)
        if family in PREDICTED:
            config = json.loads((tmp_path / "model/config.json").read_text())
            check_states(config, engine, spec.scenario.draft_tokens)
        prompts = prompts_of([20, 30])
        for nwor, scv in MODES:
            output = run_cell(engine, nwor, scv, prompts, 16)
            assert [len(tokens) for tokens in output.token_ids] == [16, 16]
            expected = reason if nwor == "stage" else None
            assert {window.fallback_reason for window in output.windows} == {expected}
            drafts = total(output, "draft_tokens") if nwor == "stage" and backend else 0
            assert total(output, "staged_tokens") == drafts
            operations = drafts * (status.target_layers or 0)
            assert total(output, "stage_operations") == operations
            if drafts:
                assert total(output, "committed_tokens") == total(output, "accepted_tokens")
            assert total(output, "draft_tokens") == output.counters.draft_tokens > 0
            assert total(output, "accepted_tokens") == output.counters.accepted_tokens
        hook = worker_of(engine).nwor_hook
        assert hook.attached
    finally:
        engine.close()
    assert not hook.attached


@pytest.mark.long
@pytest.mark.parametrize("one_group", [True, False])
def test_chunked_local_attention_is_staged(
    one_group: bool, tmp_path: Path, start_engine: Callable[..., VllmEngine]
) -> None:
    """With an EAGLE head vLLM puts all layers of Llama 4 into one group of KV caches."""
    pair = hybrid_pair(tmp_path / "model", "Llama 4", "float32")
    arguments = {**EAGER_DUMMY, "disable_hybrid_kv_cache_manager": one_group}
    spec = tiny_spec(kv_cache_gib=0.2, requests=2, block_size=32, engine_args=json.dumps(arguments))
    engine = start_engine(pair, spec)
    try:
        assert engine.status().staging_unavailable is None
        check_support(tmp_path / "model", engine.status(), spec)
        prompts = prompts_of([100, 30])  # one beyond a chunk
        compare(engine, prompts, greedy(24), ["off"])
    finally:
        engine.close()


def check_refused(engine: VllmEngine, reason: str, prompts: list[list[int]]) -> None:
    """In every mode the tokens are those of vLLM alone, and each window has its reason."""
    status = engine.status()
    assert status.staging_unavailable == reason
    engine.set_hooks(False)
    alone = run_cell(engine, "off", "off", prompts, 24)
    assert alone.windows == []
    engine.set_hooks(True)
    for nwor, scv in (("off", "off"), ("stage", "off"), ("stage", "graph")):
        output = run_cell(engine, nwor, scv, prompts, 24)
        assert output.token_ids == alone.token_ids
        expected = reason if nwor == "stage" else None
        assert {window.fallback_reason for window in output.windows} == {expected}
        assert total(output, "staged_tokens") == 0
        assert total(output, "draft_tokens") > 0


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["Mamba", "Mamba 2"])
def test_a_model_without_attention_runs_as_without_us_and_says_why(
    family: str, tmp_path: Path, start_alone: Callable[..., VllmEngine]
) -> None:
    pair = hybrid_pair(tmp_path / "model", family, "bfloat16")
    # A state takes a whole page of the cache, which the byte model of K/V does not know.
    spec = tiny_spec(requests=2, kv_cache_gib=0.5, engine_args=json.dumps(EAGER_DUMMY))
    check_refused(start_alone(pair, spec), "recurrent_layers", prompts_of([20, 30]))


SIZES = {"cudagraph_capture_sizes": [5, 10]}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("compilation", "reason"),
    [
        ({"mode": 3, "use_inductor_graph_partition": True}, "inductor_graph_partition"),
        (
            {"mode": 3, "splitting_ops": [], "cudagraph_mode": "FULL_DECODE_ONLY"},
            "whole_graph_compilation",
        ),
        ({"mode": 2, "cudagraph_mode": "NONE"}, "whole_graph_compilation"),
        ({"mode": 1, "cudagraph_mode": "NONE"}, "whole_graph_compilation"),
    ],
)
def test_code_that_hides_the_write_runs_as_without_us_and_says_why(
    compilation: dict[str, Any],
    reason: str,
    tmp_path: Path,
    start_alone: Callable[..., VllmEngine],
) -> None:
    arguments = {"compilation_config": {**SIZES, **compilation}}
    spec = tiny_spec(requests=2, draft_tokens=4, engine_args=json.dumps(arguments))
    engine = start_alone(tiny_pair(tmp_path / "model", "ngram"), spec)
    check_refused(engine, reason, prompts_of([20, 30]))
