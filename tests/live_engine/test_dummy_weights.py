"""A shape without weights on real vLLM: every value is filled in, and attention matters."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_tools import NGRAM, prompts_of, run_cell, tiny_pair, tiny_spec, worker_of
from tiny_architectures import write_architecture

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import ResolvedPair

pytestmark = [pytest.mark.engine, pytest.mark.long]


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


def test_target_and_drafter_are_filled_and_the_record_says_so(engine: VllmEngine) -> None:
    facts = engine.status().dummy_weights
    assert facts["generator"] == "nwor_dummy"
    for part in ("target", "drafter"):
        assert facts[part] == {
            "matrices": 4 * 4 + 1, "norms": 4 * 2 + 1, "zeros": 0, "scales": 0, "left_alone": 0,
        }  # fmt: skip


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
