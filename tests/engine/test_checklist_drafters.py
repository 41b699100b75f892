"""The checklist's draft methods that test_engine_parity.py does not have, and LoRA."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from checklist_tools import ask, check_cache, check_same, greedy
from engine_tools import prompts_of, tiny_pair, tiny_spec, worker_of
from tiny_drafters import eagle3_pair, mtp_pair, write_lora

from nwor_bench.engine import VllmEngine
from nwor_bench.pairs import ResolvedPair

pytestmark = pytest.mark.engine

PROMPTS = prompts_of([100, 31, 18, 40, 27, 22, 35, 29])


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(eagle3_pair, marks=pytest.mark.row("eagle3"), id="eagle3"),
        pytest.param(mtp_pair, marks=pytest.mark.row("mtp"), id="mtp"),
    ],
)
def test_a_drafter_in_the_targets_cache_group(
    build: Callable[[Path], ResolvedPair], tmp_path: Path, start_engine: Callable[..., VllmEngine]
) -> None:
    """vLLM names its layer as if it were the target's fourth; it is not staged."""
    engine = start_engine(build(tmp_path), tiny_spec(block_size=32))
    hook = worker_of(engine).nwor_hook
    assert hook.target_layers == [f"model.layers.{i}.self_attn.attn" for i in range(3)]
    assert hook.drafter_layers == ["model.layers.3.self_attn.attn"]
    stock = ask(engine, "off", PROMPTS, greedy())
    assert 0 < stock.counters.accepted_tokens < stock.counters.draft_tokens
    for scv in ("off", "graph"):
        staged = ask(engine, "stage", PROMPTS, greedy(), scv=scv)
        check_same(engine, staged, stock)
    check_cache(engine, PROMPTS, staged)


@pytest.mark.row("LoRA")
def test_an_adapter(tmp_path: Path, start_engine: Callable[..., VllmEngine]) -> None:
    """A batch with the adapter and one without.

    Never both in one batch: there stock vLLM 0.32 gives every request the adapter on a CPU.
    """
    from vllm.lora.request import LoRARequest

    pair = tiny_pair(tmp_path / "pair", "ngram")
    adapter = LoRARequest("adapter", 1, str(write_lora(tmp_path / "lora", Path(pair.target))))
    arguments = json.dumps({"enable_lora": True, "max_lora_rank": 8})
    engine = start_engine(pair, tiny_spec(block_size=32, engine_args=arguments))
    plain = ask(engine, "off", PROMPTS, greedy())
    stock = ask(engine, "off", PROMPTS, greedy(), lora_request=adapter)
    assert all(a != b for a, b in zip(stock.tokens, plain.tokens, strict=True))
    assert 0 < stock.counters.accepted_tokens < stock.counters.draft_tokens
    for scv in ("off", "graph"):
        check_same(engine, ask(engine, "stage", PROMPTS, greedy(), scv=scv), plain)
        staged = ask(engine, "stage", PROMPTS, greedy(), scv=scv, lora_request=adapter)
        check_same(engine, staged, stock)
