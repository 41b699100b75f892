"""Speculative methods and settings on a GPU that no other file has, with random weights.

In float32 tokens are those of mode off. Drafters that vLLM runs only in bfloat16 draw their
acceptance (synthetic), and the K/V gate compares the cache.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checklist_rows import ONE_LONG, PROMPTS, check_sampled
from checklist_tools import ask, check_partial, compare, greedy
from engine_tools import (
    EAGER,
    FULL_FOR_ALL,
    NGRAM,
    SCV,
    check_every_draft_staged,
    tiny_pair,
    tiny_spec,
)
from kv_gate_tools import kv_results
from tiny_drafters import write_lora

from nwor_bench.analysis.parity.kv import KvVerdict
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import ResolvedPair, resolve_pair

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

Start = Callable[..., VllmEngine]


def spec_of(
    arguments: dict[str, Any], speculative: dict[str, Any] | None = None, **more: Any
) -> Any:
    """Eight requests, at most four drafts each."""
    if speculative is not None:
        more["speculative_config"] = json.dumps(speculative)
    return tiny_spec(draft_tokens=4, block_size=32, engine_args=json.dumps(arguments), **more)


def test_block_verification(tmp_path: Path, start_alone: Start) -> None:
    """The drafts of a window are accepted together; what is accepted is still its beginning."""
    spec = spec_of(FULL_FOR_ALL, {"rejection_sample_method": "block"})
    engine = start_alone(tiny_pair(tmp_path, "draft_model"), spec)
    compare(engine, PROMPTS, greedy(), SCV)
    check_sampled(engine, greedy(32, temperature=0.5), SCV)


def test_ngram_gpu(tmp_path: Path, start_alone: Start) -> None:
    pair = replace(tiny_pair(tmp_path, "ngram"), method="ngram_gpu", speculative=NGRAM)
    stock, _ = compare(start_alone(pair, spec_of(FULL_FOR_ALL)), ONE_LONG, greedy(), SCV)
    check_partial(stock)


def test_the_v1_runner_writes_directly_and_says_why(
    tmp_path: Path, start_alone: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Suffix decoding and parallel drafting run on it; here vLLM is told to take it."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    engine = start_alone(tiny_pair(tmp_path, "draft_model"), spec_of(EAGER))
    status = engine.status()
    assert (status.runner, status.staging_unavailable) == ("V1", "v1_runner_on_gpu")
    stock = ask(engine, "off", PROMPTS, greedy())
    staged = ask(engine, "stage", PROMPTS, greedy(), scv="graph")
    assert staged.tokens == stock.tokens
    assert staged.fallbacks == {"v1_runner_on_gpu"}
    assert staged.total("staged_tokens") == 0
    check_partial(stock)


def check_cache_of(engine: VllmEngine) -> None:
    """Every window is staged, and the K/V gate finds what mode off would have left."""
    for result in kv_results(
        engine, ONE_LONG, scv_modes=SCV, before_check=check_every_draft_staged
    ):
        assert (result.reason, result.verdict) == (None, KvVerdict.WITHIN)
        assert result.checked == result.committed > 0


BLOCK_DRAFTERS: dict[str, dict[str, Any]] = {
    "dflash": {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2]},
    },
    "dspark": {
        "architectures": ["Qwen3DSparkModel"],
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2]},
        "block_size": 4,
        "markov_rank": 32,
    },
}
"""What their config.json have besides those of a one-layer Qwen3."""


@pytest.mark.parametrize("method", BLOCK_DRAFTERS)
def test_a_drafter_of_whole_blocks(method: str, tmp_path: Path, start_alone: Start) -> None:
    """Layers of the drafter, which see a block in both directions, are not staged."""
    shape = resolve_pair("qwen-shape", cache_dir=tmp_path / "shape")
    config = json.loads((Path(shape.target) / "config.json").read_text())
    draft = tmp_path / method
    draft.mkdir()
    own = {"num_hidden_layers": 1, **BLOCK_DRAFTERS[method]}
    (draft / "config.json").write_text(json.dumps(config | own))
    synthetic = {k: v for k, v in shape.speculative.items() if not k.startswith("prompt_lookup")}
    pair = replace(shape, method=method, draft=str(draft), speculative=synthetic)
    engine = start_alone(pair, spec_of(FULL_FOR_ALL, max_model_len=1024))
    status = engine.status()
    assert (status.staging_unavailable, status.target_layers) == (None, 4)
    check_cache_of(engine)


@pytest.mark.row("LoRA")
@pytest.mark.parametrize("graphs", [EAGER, FULL_FOR_ALL], ids=["eager", "full"])
def test_an_adapter(
    graphs: dict[str, Any], tmp_path: Path, start_alone: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, since vLLM's LoRA kernels take no float32: two of the weights of K/V are its.

    Full graphs are captured for no adapter and for some; the first batch has none.
    """
    from vllm.lora.request import LoRARequest

    pair: ResolvedPair = tiny_pair(tmp_path / "pair", "ngram")
    folder = write_lora(tmp_path / "lora", Path(pair.target))
    engine = start_alone(pair, spec_of(graphs, dtype="bfloat16", lora=str(folder)))
    del engine._llm.generate  # which gives every request the adapter
    assert engine.status().staging_unavailable is None
    check_cache_of(engine)
    generate = engine._llm.generate
    adapter = LoRARequest("adapter", 1, str(folder))
    monkeypatch.setattr(engine._llm, "generate", partial(generate, lora_request=adapter))
    plain = generate([{"prompt_token_ids": p} for p in ONE_LONG], greedy(8), use_tqdm=False)
    adapted = engine._llm.generate(
        [{"prompt_token_ids": p} for p in ONE_LONG], greedy(8), use_tqdm=False
    )
    tokens = [[list(o.outputs[0].token_ids) for o in outputs] for outputs in (plain, adapted)]
    assert tokens[0] != tokens[1]
    check_cache_of(engine)
