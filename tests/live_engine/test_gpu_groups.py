"""Real vLLM on a GPU with target layers of several KV-cache groups, shapes and kinds: all staged.

Sliding windows beside full attention, attention sinks, layers that share K/V, chunked local
attention, head dims that differ by layer, attention beside recurrent layers, and models that draft
with a layer of their own (sparse latent attention is in test_gpu_sparse_mla.py). One engine a model
and way of running; each must stage every window, commit what it hands in, and stay within the
errors of mode off. In float32 tokens are compared too.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_tools import (
    GRAPHS,
    NGRAM,
    SCV,
    mtp_of,
    pair_with,
    prompts_of,
    run_cell,
    tiny_spec,
    total,
)
from kv_gate_tools import kv_results
from rank_faults import on_ranks, watch_slots, watched_slots
from tiny_architectures import V3, write_architecture
from tiny_hybrids import OWN_ARGUMENTS, hybrid_pair

from nwor_bench.analysis.parity.kv import KvVerdict
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import ResolvedPair

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

PROMPTS = prompts_of([200, 21, 90, 33, 61, 150, 40, 77])
"""Several are longer than the tiny models' windows of 32 tokens and chunks of 64."""

SYNTHETIC = {**NGRAM, "synthetic_acceptance_length": 2.6}
"""Random weights predict nothing: vLLM accepts drafts at a set rate, alike in every mode."""

DUMMY = {"load_format": "dummy", "enable_prefix_caching": False}


def of_row(row: str, *values: str) -> Any:
    """A case that stands for a row of the support table."""
    return pytest.param(*values, marks=pytest.mark.row(row))


GEMMA = "Gemma, sliding window, several cache groups"
ARCHITECTURES = [
    of_row(GEMMA, "gemma", "float32", "eager"),
    of_row(GEMMA, "gemma", "bfloat16", "full"),
    ("sinks", "bfloat16", "eager"),
    ("sinks", "bfloat16", "full"),
    of_row("layers that share K/V", "shared K/V", "float32", "eager"),
    of_row("layers that share K/V", "shared K/V", "bfloat16", "full"),
    ("head dims", "bfloat16", "eager"),
    ("head dims", "bfloat16", "full"),
]
HYBRIDS = [
    ("Llama 4", "eager"),  # vLLM captures no full graph of chunked local attention
    ("Qwen3-Next", "eager"),
    ("Qwen3-Next", "full"),
    ("Nemotron-H", "eager"),
    ("Nemotron-H", "full"),
    ("Granite hybrid", "eager"),
    ("Falcon-H1", "eager"),
]
OWN_DRAFTERS = [("DeepSeek-V3", 4), ("GLM-4.5", 4), ("Qwen3-Next", 1)]
"""Families that draft with a layer of their own (MTP), and their target layers without it.

It lies in the target's cache groups and is attended alike, and stays stock's.
"""


def check_staged(engine: VllmEngine, prompts: list[list[int]], *, exact: bool) -> None:
    """Every window is staged in every SCV mode, counted right, and answers as mode off does."""
    status = engine.status()
    assert status.staging_unavailable is None
    stock = run_cell(engine, "off", "off", prompts)
    for scv in SCV:
        staged = run_cell(engine, "stage", scv, prompts)
        reasons = {window["fallback_reason"] for window in staged.windows}
        drafts, accepted = total(staged, "draft_tokens"), total(staged, "accepted_tokens")
        assert reasons == {None}, (scv, reasons, status)
        assert total(staged, "staged_tokens") == drafts > accepted > 0, scv
        assert total(staged, "committed_tokens") == accepted, scv
        assert total(staged, "stage_operations") == drafts * (status.target_layers or 0), scv
        assert [len(t) for t in staged.token_ids] == [len(t) for t in stock.token_ids], scv
        if exact:
            assert staged.token_ids == stock.token_ids, scv


def check_slots(engine: VllmEngine, prompts: list[list[int]]) -> None:
    """Eagerly, slot by slot: accepted ones hold what was handed in, rejected ones what they had."""
    on_ranks(engine, watch_slots)
    staged = run_cell(engine, "stage", "off", prompts)
    (found,) = on_ranks(engine, watched_slots)
    assert found["wrong"] == 0, found
    assert found["windows"] == len(staged.windows) > 0, found
    assert found["accepted"] > 0 < found["rejected"], found


def check_rows(
    engine: VllmEngine,
    record_property: Callable[[str, object], None],
    prompts: list[list[int]] = PROMPTS,
) -> None:
    """The K/V gate: rows of every layer are within the error of mode off itself."""
    for scv, result in zip(SCV, kv_results(engine, prompts, scv_modes=SCV), strict=True):
        record_property(scv, result.to_dict())
        assert result.verdict is KvVerdict.WITHIN, result.to_dict()
        assert result.checked is not None, result.to_dict()
        assert result.checked > 0, result.to_dict()
        assert result.layers == engine.status().target_layers, result.to_dict()


def check_all(
    engine: VllmEngine,
    dtype: str,
    graphs: str,
    record_property: Callable[[str, object], None],
    prompts: list[list[int]] = PROMPTS,
) -> None:
    check_staged(engine, prompts, exact=dtype == "float32")
    if graphs == "eager":
        check_slots(engine, prompts)
    if dtype != "float32":
        check_rows(engine, record_property, prompts)
    if graphs == "full":
        facts = engine.status().cuda_graphs
        assert facts is not None
        assert facts.stock_window_sizes, facts
        assert facts.stage_window_sizes == facts.stock_window_sizes, facts


@pytest.mark.parametrize(("name", "dtype", "graphs"), ARCHITECTURES)
def test_an_architecture_of_several_groups_or_shapes_is_staged(
    name: str,
    dtype: str,
    graphs: str,
    tmp_path: Path,
    start_alone: Callable[..., VllmEngine],
    record_property: Callable[[str, object], None],
) -> None:
    if name == "head dims":
        pytest.importorskip("cutlass", reason="vLLM attends with FlashAttention 4 at head dim 512")
    model = write_architecture(tmp_path / "model", name)
    pair = ResolvedPair("groups", "ngram", str(model), None, dtype, SYNTHETIC)
    spec = tiny_spec(
        draft_tokens=4, dtype=dtype, kv_cache_gib=0.5, engine_args=json.dumps(GRAPHS[graphs])
    )
    check_all(start_alone(pair, spec), dtype, graphs, record_property)


def start_family(family: str, graphs: str, pair: ResolvedPair, start_alone: Any) -> VllmEngine:
    # A state takes a whole page of the cache, which the byte model of K/V does not know.
    arguments = {**DUMMY, **GRAPHS[graphs], **OWN_ARGUMENTS.get(family, {})}
    spec = tiny_spec(draft_tokens=4, kv_cache_gib=0.5, engine_args=json.dumps(arguments))
    engine: VllmEngine = start_alone(pair, spec)
    return engine


@pytest.mark.parametrize(("family", "graphs"), HYBRIDS)
def test_attention_beside_other_layers_is_staged(
    family: str,
    graphs: str,
    tmp_path: Path,
    start_alone: Callable[..., VllmEngine],
    record_property: Callable[[str, object], None],
) -> None:
    pair = hybrid_pair(tmp_path / "model", family, "bfloat16")
    pair = ResolvedPair("groups", "ngram", pair.target, None, "bfloat16", SYNTHETIC)
    engine = start_family(family, graphs, pair, start_alone)
    check_all(engine, "bfloat16", graphs, record_property)


@pytest.mark.row("mtp")
@pytest.mark.parametrize("graphs", ["full", "eager"])
@pytest.mark.parametrize(("family", "target_layers"), OWN_DRAFTERS)
def test_a_model_that_drafts_for_itself_is_staged(
    family: str,
    target_layers: int,
    graphs: str,
    tmp_path: Path,
    start_alone: Callable[..., VllmEngine],
    record_property: Callable[[str, object], None],
) -> None:
    if family == "DeepSeek-V3":
        pair = pair_with("mla-shape", {**V3, "num_nextn_predict_layers": 1}, tmp_path)
    else:
        pair = hybrid_pair(tmp_path / "model", family, "bfloat16")
    engine = start_family(family, graphs, mtp_of(pair), start_alone)
    assert engine.status().target_layers == target_layers, engine.status()
    check_all(engine, "bfloat16", graphs, record_property)
