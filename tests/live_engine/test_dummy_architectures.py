"""Shapes without weights of other architectures than Llama, on real vLLM: finite and not constant.

Latent attention and experts split and pack their weights right after loading.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_tools import NGRAM, prompts_of, run_cell, tiny_spec, worker_of
from tiny_architectures import write_architecture

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import ResolvedPair

pytestmark = [pytest.mark.engine, pytest.mark.long]

PROMPTS = prompts_of([40, 25])


@pytest.mark.parametrize("name", ["qwen", "gemma", "mla", "mixture of experts"])
def test_answers_are_finite_and_differ(
    name: str, tmp_path: Path, start_alone: Callable[..., VllmEngine]
) -> None:
    target = write_architecture(tmp_path / "model", name)
    for weights in target.glob("*.safetensors"):
        weights.unlink()
    dtype = "bfloat16" if name == "mla" else "float32"
    pair = ResolvedPair("other", "ngram", str(target), None, dtype, NGRAM, load_format="dummy")
    engine = start_alone(pair, tiny_spec(block_size=32, kv_cache_gib=0.1))
    facts = engine.status().dummy_weights
    assert facts["drafter"] is None  # prompt lookup
    assert facts["target"]["matrices"] > 0 < facts["target"]["norms"]
    seen: list[torch.Tensor] = []
    target_model = worker_of(engine).model_runner.model
    compute = target_model.compute_logits
    target_model.compute_logits = lambda *args: seen.append(compute(*args)) or seen[-1]
    stock = run_cell(engine, "off", "off", PROMPTS)
    del target_model.compute_logits
    logits = torch.cat(seen)
    assert torch.isfinite(logits).all()
    assert 0.3 < logits.std(dim=-1).mean() < 3
    assert all(len(set(tokens)) > 5 for tokens in stock.token_ids)
    assert run_cell(engine, "stage", "off", PROMPTS).token_ids == stock.token_ids
