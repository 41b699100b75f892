"""Real vLLM on a GPU with latent attention (MLA): staged in each backend, graph mode and cache.

Shapes of DeepSeek-V2, DeepSeek-V3 and Kimi-K2 with few layers and experts, random weights and
synthetic acceptance. On Hopper vLLM takes FlashAttention's MLA, for fp8 caches FlashMLA. One engine
a case; each must stage every window, commit what it hands in, and stay within the errors of mode
off.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_tools import (
    GRAPHS,
    PIECEWISE,
    implementations_of,
    pair_with,
    tiny_spec,
    worker_of,
)
from test_gpu_groups import check_all
from tiny_architectures import V3

from nwor_bench.engine.engine import VllmEngine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.gpu,
    pytest.mark.row("latent attention (MLA)"),
]

MODELS: dict[str, dict[str, Any]] = {
    "deepseek-v2": {},
    "deepseek-v2-lite": {"q_lora_rank": None},
    "deepseek-v3": V3,
    "kimi-k2": {
        **V3, "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64,
    },
}  # fmt: skip
"""Settings on top of the pair `mla-shape`, which is a small DeepSeek-V2."""

WITH_PIECEWISE = {**GRAPHS, "piecewise": PIECEWISE}
FLASH_ATTN, FLASHMLA, TRITON = "FlashAttnMLAImpl", "FlashMLAImpl", "TritonMLAImpl"

CASES = [
    ("deepseek-v2", "eager", "auto", FLASH_ATTN, {}),
    ("deepseek-v2", "full", "fp8", FLASHMLA, {}),
    ("deepseek-v2-lite", "piecewise", "auto", FLASH_ATTN, {}),
    ("deepseek-v3", "full", "auto", FLASH_ATTN, {}),
    ("deepseek-v3", "full", "auto", FLASH_ATTN, {"stage_by": "copy"}),
    ("kimi-k2", "eager", "fp8", FLASHMLA, {}),
    ("kimi-k2", "full", "auto", TRITON, {}),
    ("kimi-k2", "eager", "fp8", TRITON, {}),
]


@pytest.mark.parametrize(
    ("model", "graphs", "cache", "implementation", "staging"),
    CASES,
    ids=["-".join((*case[:4], *case[4].values())) for case in CASES],
)
def test_a_latent_model_is_staged(
    model: str,
    graphs: str,
    cache: str,
    implementation: str,
    staging: dict[str, str],
    tmp_path: Path,
    start_alone: Callable[..., VllmEngine],
    record_property: Callable[[str, object], None],
) -> None:
    arguments = {**WITH_PIECEWISE[graphs], "kv_cache_dtype": cache}
    if implementation == TRITON:
        arguments["attention_backend"] = "TRITON_MLA"
    spec = tiny_spec(draft_tokens=4, kv_cache_gib=0.5, engine_args=json.dumps(arguments), **staging)
    engine = start_alone(pair_with("mla-shape", MODELS[model], tmp_path), spec)
    assert implementations_of(engine) == {implementation}
    check_all(engine, "bfloat16", graphs, record_property)
    check_way(worker_of(engine).nwor_hook, implementation, graphs)


def check_way(hook: Any, implementation: str, graphs: str) -> None:
    """FlashAttention attends equal windows in part, but copied ones (piecewise graphs) never."""
    merged = hook._parts.mla_tail._metadata is not None
    assert merged == (implementation == FLASH_ATTN and graphs != "piecewise")
