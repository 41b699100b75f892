"""Real vLLM with models whose layers keep a state: it starts, and says why nothing is staged.

Mamba and Jamba are not here: vLLM's CPU build lacks their selective scan.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_tools import prompts_of, run_cell, tiny_spec, total
from tiny_hybrids import EAGER_DUMMY, hybrid_pair

from nwor_bench.engine import VllmEngine

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("family", "dtype", "backend"),
    [
        ("Mamba 2", "float32", None),
        ("Granite hybrid", "float32", "ReferenceCPUAttentionImpl"),
        ("Falcon-H1", "float32", "ReferenceCPUAttentionImpl"),
        ("Nemotron-H", "float32", "ReferenceCPUAttentionImpl"),
        ("Zamba 2", "float32", "ReferenceCPUAttentionImpl"),
        ("LFM2", "float32", "ReferenceCPUAttentionImpl"),
        # vLLM's gated delta net on a CPU needs bfloat16.
        ("Qwen3-Next", "bfloat16", "ReferenceCPUAttentionImpl"),
    ],
)
def test_a_hybrid_runs_as_without_us_and_says_why(
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
        assert status["staging_unavailable"] == "recurrent_layers"
        assert status["attention_backend"] == backend
        prompts = prompts_of([20, 30])
        stock = run_cell(engine, "off", "off", prompts, 16)
        assert {window["fallback_reason"] for window in stock.windows} == {None}
        for scv in ("off", "graph"):
            staged = run_cell(engine, "stage", scv, prompts, 16)
            assert staged.token_ids == stock.token_ids
            reasons = {window["fallback_reason"] for window in staged.windows}
            assert reasons == {"recurrent_layers"}
            assert total(staged, "staged_tokens") == 0
        engine.set_hooks(False)
        assert run_cell(engine, "off", "off", prompts, 16).token_ids == stock.token_ids
    finally:
        engine.close()
