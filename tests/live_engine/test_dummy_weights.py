"""A shape without weights on real vLLM: every value is filled in, and attention matters."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tools import NGRAM, prompts_of, run_cell, tiny_pair, tiny_spec, worker_of
from tiny_architectures import write_architecture

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import ResolvedPair

pytestmark = [pytest.mark.engine, pytest.mark.long]

BF16_NOISE = 2**-8
"""Largest relative error of one rounding to bfloat16."""


def shape_pair(folder: Path) -> ResolvedPair:
    """The tiny pair without its weights, its embedding and its output head tied.

    Drafts are verified: vLLM's CPU build has no synthetic acceptance.
    """
    pair = tiny_pair(folder, "draft_model", layers=4)
    for model in (pair.target, pair.draft):
        (Path(str(model)) / "model.safetensors").unlink()
        path = Path(str(model)) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    return replace(pair, load_format="dummy")


@pytest.fixture(scope="module")
def engine(
    start_engine: Callable[..., VllmEngine], tmp_path_factory: pytest.TempPathFactory
) -> VllmEngine:
    """An engine with generated values."""
    return start_engine(shape_pair(tmp_path_factory.mktemp("pair")), tiny_spec(block_size=32))


def models(engine: VllmEngine) -> Iterator[torch.nn.Module]:
    runner = worker_of(engine).model_runner
    yield from (runner.model, runner.drafter.model)


def last_keys(engine: VllmEngine, prompt: list[int]) -> torch.Tensor:
    """K of the target's last layer as one prefill computes it: [tokens, kv_heads, head_dim]."""
    runner = worker_of(engine).model_runner
    layer = runner.compilation_config.static_forward_context[
        worker_of(engine).nwor_hook.target_layers[-1]
    ]
    seen: list[torch.Tensor] = []
    write = layer.impl.do_kv_cache_update

    def watched(layer: Any, key: torch.Tensor, *rest: Any) -> None:
        seen.append(key.clone())
        write(layer, key, *rest)

    layer.impl.do_kv_cache_update = watched
    try:
        run_cell(engine, "off", "off", [prompt], 1)
    finally:
        del layer.impl.do_kv_cache_update
    return seen[0][: len(prompt)]


def test_target_and_drafter_are_filled_and_the_record_says_so(engine: VllmEngine) -> None:
    facts = engine.status().dummy_weights
    assert facts["generator"] == "nwor_dummy"
    for part in ("target", "drafter"):
        assert facts[part] == {
            "matrices": 4 * 4 + 1, "norms": 4 * 2 + 1, "zeros": 0, "scales": 0, "left_alone": 0,
        }  # fmt: skip


def test_logits_are_finite_and_differ(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    target = next(models(engine))
    compute = target.compute_logits

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(compute(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(target, "compute_logits", watched)
    output = run_cell(engine, "off", "off", prompts_of([40, 25]))
    logits = torch.cat(seen)
    assert torch.isfinite(logits).all()
    assert logits.std(dim=-1).min() > 0.3
    assert (logits[1:] - logits[:-1]).abs().amax(dim=-1).median() > 0.3
    assert all(len(set(tokens)) > 10 for tokens in output.token_ids)


def test_a_masked_row_shows_in_the_last_layer(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its own row a token's K in the last layer is another one."""
    from nwor_bench.plugin.runner_v1 import cpu_attention as attention

    prompt = prompts_of([256])[0]
    whole = last_keys(engine, prompt)
    assert whole.abs().max() < 20  # an fp8 cache holds 448
    attend = attention.verify_attention_reference

    def without_own_row(query: Any, cache: Any, plan: Any, *rest: Any, **named: Any) -> None:
        for group in plan:
            group.visible.scatter_(3, group.positions[:, None, :, None], False)
            group.visible[..., 0] = True  # the first token has no other row
        attend(query, cache, plan, *rest, **named)

    monkeypatch.setattr(attention, "verify_attention_reference", without_own_row)
    masked = last_keys(engine, prompt)
    changed = (masked - whole)[1:].norm(dim=-1) / whole[1:].norm(dim=-1)
    assert changed.median() > 20 * BF16_NOISE


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
