"""Real vLLM on a GPU: what a mixed step takes of its memory, staged and stock."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tools import EAGER, PIECEWISE, prompts_of, run_cell, tiny_pair, tiny_spec

from nwor_bench.engine.engine import VllmEngine

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

LAYERS = 24
ROWS = 8192
QKV_BYTES = (4 + 2 * 2) * 32 * 4
"""A row's fused QKV in one layer of the tiny target: float32, 4 heads and 2 KV heads of 32."""


def peak_of(engine: VllmEngine, nwor: str) -> int:
    """Bytes above what the engine has between batches, in a batch with steps of 8,192 tokens.

    Eight requests, seven of which decode windows while the long one still prefills.
    """
    prompts = prompts_of([40, 50, 60, 70, 80, 90, 100, 3 * ROWS])
    run_cell(engine, nwor, "off", prompts)  # compiles, and switches staging on
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output = run_cell(engine, nwor, "off", prompts)
    reasons = {window.fallback_reason for window in output.windows}
    assert reasons == {None}
    assert any(window.num_reqs == 7 for window in output.windows)
    assert torch.cuda.memory_allocated() - before < ROWS * QKV_BYTES  # nothing stays alive
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("graphs", [EAGER, PIECEWISE], ids=["eager", "piecewise"])
def test_a_mixed_step_of_8192_tokens_takes_no_more_memory_staged(
    graphs: dict[str, Any], start_alone: Callable[..., VllmEngine], tmp_path: Path
) -> None:
    """By reference it held the fused QKV of every layer: 24 x 8,192 rows, 201 MB here."""
    arguments = {**graphs, "max_num_batched_tokens": ROWS}
    spec = tiny_spec(max_model_len=4 * ROWS, engine_args=json.dumps(arguments))
    engine = start_alone(tiny_pair(tmp_path, "draft_model", layers=LAYERS), spec)
    stock = peak_of(engine, "off")
    staged = peak_of(engine, "stage")
    assert staged - stock < LAYERS * ROWS * QKV_BYTES // 10
