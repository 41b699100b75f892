"""The checklist's architectures: staged, or written directly with the reason and stock tokens."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checklist_rows import ONE_LONG
from checklist_tools import check_cache, check_partial, check_support, compare, greedy
from engine_tools import NGRAM, tiny_pair, tiny_spec
from tiny_architectures import write_architecture

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import ResolvedPair

pytestmark = pytest.mark.engine

CPU_MLA = "unsupported_attention:CPUMLAImpl"
ONE_GROUP = {"disable_hybrid_kv_cache_manager": True}


IN_MAKE_TEST = {"Gemma, sliding window, several cache groups"}
"""Llama, whose layers are all of one KV-cache group, has its tests in test_engine_parity.py."""


def case(row: str, name: str, fallback: str | None, **arguments: Any) -> Any:
    marks = [pytest.mark.row(row)] + [pytest.mark.long] * (row not in IN_MAKE_TEST)
    return pytest.param(name, fallback, arguments, marks=marks, id=row)


@pytest.mark.parametrize(
    ("name", "fallback", "arguments"),
    [
        case("Qwen", "qwen", None),
        case("mixture of experts", "mixture of experts", None),
        case("Gemma, sliding window, one cache group", "gemma", None, **ONE_GROUP),
        case("Gemma, sliding window, several cache groups", "gemma", None),
        case("fp8 cache", "Llama", "cache_dtype:fp8", kv_cache_dtype="fp8"),
        # Without the choice vLLM takes another implementation on a CPU with AMX, bfloat16 alone.
        case("latent attention (MLA)", "mla", CPU_MLA, attention_backend="CPU_MLA"),
        case("layers that share K/V", "shared K/V", None),
        pytest.param("sinks", None, {}, marks=pytest.mark.long, id="attention sinks"),
        pytest.param("head dims", None, {}, marks=pytest.mark.long, id="head dims that differ"),
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
        check_support(Path(pair.target), engine.status(), spec)
        stock, staged = compare(engine, ONE_LONG, greedy(), ["off", "graph"], fallback)
        check_partial(stock)
        check_cache(engine, ONE_LONG, staged)
    finally:
        engine.close()  # experts need groups of processes that another open engine would keep out
    if fallback is not None:
        record_property("written_directly", fallback)
