"""The checklist's architectures: staged, or written directly with the reason and stock tokens."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checklist_tools import ask, check_cache, check_no_open_window, check_same, greedy
from engine_tools import NGRAM, prompts_of, tiny_pair, tiny_spec
from tiny_architectures import write_architecture

from nwor_bench.engine import VllmEngine
from nwor_bench.pairs import ResolvedPair

pytestmark = pytest.mark.engine

PROMPTS = prompts_of([100, 31, 18, 40, 27, 22, 35, 29])
"""The first is longer than the sliding windows of 32 tokens."""

ONE_GROUP = {"disable_hybrid_kv_cache_manager": True}


def case(row: str, name: str, fallback: str | None, **arguments: Any) -> Any:
    return pytest.param(name, fallback, arguments, marks=pytest.mark.row(row), id=row)


@pytest.mark.parametrize(
    ("name", "fallback", "arguments"),
    [
        case("Qwen", "qwen", None),
        case("mixture of experts", "mixture of experts", None),
        case("Gemma, sliding window, one cache group", "gemma", None, **ONE_GROUP),
        case("Gemma, sliding window, several cache groups", "gemma", "several_kv_cache_groups"),
        case("fp8 cache", "Llama", "cache_dtype:fp8", kv_cache_dtype="fp8"),
        case("latent attention (MLA)", "mla", "unsupported_attention:CPUMLAImpl"),
        case("layers that share K/V", "shared K/V", "layers_share_kv", **ONE_GROUP),
    ],
)
def test_an_architecture_is_staged_or_says_why_not(
    name: str,
    fallback: str | None,
    arguments: dict[str, Any],
    tmp_path: Path,
    start_engine: Callable[..., VllmEngine],
    record_property: Callable[[str, str], None],
) -> None:
    if "kv_cache_dtype" in arguments and "AVX512" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("vLLM's CPU build needs AVX-512 for an fp8 cache")
    if name == "Llama":
        pair = tiny_pair(tmp_path / "model", "ngram")
    else:
        model = write_architecture(tmp_path / "model", name)
        pair = ResolvedPair("tiny", "ngram", str(model), None, "float32", NGRAM)
    spec = tiny_spec(kv_cache_gib=0.1, block_size=32, engine_args=json.dumps(arguments))
    engine = start_engine(pair, spec)
    try:
        compare(engine, fallback)
    finally:
        engine.close()  # experts need groups of processes that another open engine would keep out
    if fallback is not None:
        record_property("written_directly", fallback)


def compare(engine: VllmEngine, fallback: str | None) -> None:
    """Both modes on one engine; windows are staged, or all fall back with that reason."""
    stock = ask(engine, "off", PROMPTS, greedy())
    assert 0 < stock.counters.accepted_tokens < stock.counters.draft_tokens
    for scv in ("off", "graph"):
        staged = ask(engine, "stage", PROMPTS, greedy(), scv=scv)
        if fallback is None:
            check_same(engine, staged, stock)
            continue
        assert staged.tokens == stock.tokens
        assert staged.counters == stock.counters
        assert staged.fallbacks == {fallback}
        assert staged.total("staged_tokens") == staged.total("committed_tokens") == 0
        check_no_open_window(engine)
    check_cache(engine, PROMPTS, staged)
