"""Real vLLM on a GPU with other models than Llama: every window is staged.

Random weights, and drafts accepted by a draw that is the same in every mode: equal tokens then
say that windows accepted alike and that the target computed the same on what was committed. In
bfloat16 FlashAttention and the kernel that stages round differently, so a near-tie may go either
way: there the K/V gate compares values.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from engine_tools import (
    EAGER,
    FULL,
    SCV,
    check_every_draft_staged,
    prompts_of,
    run_cell,
    tiny_spec,
    total,
)
from kv_gate_tools import kv_results

from nwor_bench.analysis.parity.kv import KvVerdict
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import resolve_pair

pytestmark = [pytest.mark.engine, pytest.mark.gpu]


def case(row: str, *values: Any) -> Any:
    """A parameter set that stands for a row of the checklist."""
    return pytest.param(*values, marks=pytest.mark.row(row))


@pytest.mark.parametrize(
    ("name", "dtype", "arguments"),
    [
        case("Llama", "llama-1b-shape", "float32", EAGER),
        case("Qwen", "qwen-shape", "float32", EAGER),
        case("Qwen", "qwen-shape", "bfloat16", FULL),
        case("mixture of experts", "moe-shape", "float32", EAGER),
        # Layers with and without a sliding window are two groups of KV caches.
        case("Gemma, sliding window, several cache groups", "gemma-shape", "float32", EAGER),
        # In one group, the sliding window is the kernel's business.
        case(
            "Gemma, sliding window, one cache group",
            "gemma-shape",
            "float32",
            {**EAGER, "disable_hybrid_kv_cache_manager": True},
        ),
        case("latent attention (MLA)", "mla-shape", "bfloat16", EAGER),
    ],
)
def test_an_architecture_is_staged(
    name: str, dtype: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    pair = resolve_pair(name, cache_dir=tmp_path)
    spec = tiny_spec(
        draft_tokens=4, dtype=dtype, max_model_len=1024, engine_args=json.dumps(arguments)
    )
    engine = VllmEngine(pair, spec, tmp_path / "engine.log")
    try:
        prompts = prompts_of([600, 21, 90, 33, 61, 150, 40, 77])  # one beyond Gemma's window
        stock = run_cell(engine, "off", "off", prompts)
        for scv in SCV:
            staged = run_cell(engine, "stage", scv, prompts)
            if dtype == "float32":
                assert staged.token_ids == stock.token_ids
            assert [len(t) for t in staged.token_ids] == [len(t) for t in stock.token_ids]
            assert total(staged, "accepted_tokens") == total(stock, "accepted_tokens") > 0
            check_every_draft_staged(staged)
        if dtype != "float32":
            for result in kv_results(engine, prompts, scv_modes=SCV):
                assert result.reason is None
                assert result.verdict is KvVerdict.WITHIN
                assert result.checked == result.committed
    finally:
        engine.close()
