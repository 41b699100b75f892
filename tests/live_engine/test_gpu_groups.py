"""Real vLLM on a GPU with layers of every kind: staged, counted, and within mode off's own errors.

Plain models; sliding windows beside full attention, attention sinks, layers that share K/V, chunked
local attention, head dims that differ by layer; latent attention in each backend (on Hopper vLLM
takes FlashAttention's MLA, for fp8 caches FlashMLA); values of another width than keys (MiMo V2);
attention beside recurrent layers; models that draft with a layer of their own (MTP), which lies in
the target's cache groups, is attended alike and stays stock's. One engine a case. In float32 tokens
are compared too.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_tools import (
    GRAPHS,
    NGRAM,
    PIECEWISE,
    SCV,
    implementations_of,
    mtp_of,
    pair_with,
    prompts_of,
    run_cell,
    tiny_spec,
    total,
    worker_of,
)
from kv_gate_tools import kv_results
from rank_faults import on_ranks, watch_slots, watched_slots
from tiny_architectures import V3, unequal_pair, write_architecture
from tiny_hybrids import OWN_ARGUMENTS, hybrid_pair

from nwor_bench.analysis.parity.kv import KvVerdict
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import ResolvedPair, resolve_pair

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

Build = Callable[[Path, str], ResolvedPair]
"""A pair in a folder, in a dtype."""

PROMPTS = prompts_of([600, 21, 90, 33, 61, 150, 40, 77])
"""Several are longer than windows of 32 tokens and chunks of 64, one than gemma-shape's window."""

SYNTHETIC = {**NGRAM, "synthetic_acceptance_length": 2.6}
"""Random weights predict nothing: vLLM accepts drafts at a set rate, alike in every mode."""

ALL_GRAPHS = {**GRAPHS, "piecewise": PIECEWISE}
DUMMY = {"load_format": "dummy", "enable_prefix_caching": False}
ONE_GROUP = {"disable_hybrid_kv_cache_manager": True}
TRITON = {"attention_backend": "TRITON_ATTN_DIFFKV"}
TRITON_MLA = {"attention_backend": "TRITON_MLA"}
FLASH_ATTN, FLASHMLA = "FlashAttnMLAImpl", "FlashMLAImpl"
FLASH_DIFF, TRITON_DIFF = "FlashAttentionDiffKVImpl", "TritonAttentionDiffKVImpl"
KIMI = {**V3, "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64}


def shipped(name: str) -> Build:
    """Builder of pair `name`, with its weights drawn at random."""
    return lambda folder, dtype: resolve_pair(name, cache_dir=folder)


def architecture(name: str) -> Build:
    def build(folder: Path, dtype: str) -> ResolvedPair:
        if name == "head dims":
            pytest.importorskip("cutlass", reason="at head dim 512 it is FlashAttention 4")
        model = write_architecture(folder / "model", name)
        return ResolvedPair("groups", "ngram", str(model), None, dtype, SYNTHETIC)

    return build


def latent(**settings: Any) -> Build:
    """The pair `mla-shape`, a small DeepSeek-V2, with other settings."""
    return lambda folder, dtype: pair_with("mla-shape", settings, folder)


def unequal(sinks: bool, folder: Path, dtype: str) -> ResolvedPair:
    return unequal_pair(folder / "model", dtype, SYNTHETIC, sinks=sinks)


def with_cutlass(folder: Path, dtype: str) -> ResolvedPair:
    pytest.importorskip("cutlass", reason="vLLM attends to sinks with FlashAttention 4")
    return unequal(True, folder, dtype)


def hybrid(family: str) -> Build:
    def build(folder: Path, dtype: str) -> ResolvedPair:
        pair = hybrid_pair(folder / "model", family, dtype)
        return ResolvedPair("groups", "ngram", pair.target, None, dtype, SYNTHETIC)

    return build


def own_drafts(build: Build) -> Build:
    """Drafted for by the target's own layer."""
    return lambda folder, dtype: mtp_of(build(folder, dtype))


def case(
    name: str,
    build: Build,
    graphs: str,
    *rows: str,
    dtype: str = "bfloat16",
    impl: str | None = None,
    layers: int | None = None,
    marks: tuple[Any, ...] = (),
    stage_by: str = "reference",
    **arguments: Any,
) -> Any:
    """A case of the test, for rows of the support table.

    Args:
        name: of the model, in the test's id.
        build: its pair.
        graphs: a key of ALL_GRAPHS.
        rows: of the support table.
        dtype: of the model.
        impl: class name of all layers' attention; not looked at if None.
        layers: target layers that the status must say, without the drafter's.
        marks: more of them.
        stage_by: how drafts are held.
        arguments: vLLM's.
    """
    values = (build, dtype, graphs, {**ALL_GRAPHS[graphs], **arguments}, stage_by, impl, layers)
    differing = [str(value) for value in arguments.values() if isinstance(value, str)]
    name = "-".join([name, dtype, graphs, stage_by, *differing])
    return pytest.param(*values, marks=[*map(pytest.mark.row, rows), *marks], id=name)


GEMMA = "Gemma, sliding window, several cache groups"
ONE_GEMMA = "Gemma, sliding window, one cache group"
SHARED, MLA = "layers that share K/V", "latent attention (MLA)"
QWEN_NEXT = OWN_ARGUMENTS["Qwen3-Next"]
FP8 = {"kv_cache_dtype": "fp8"}

CASES = [
    case("llama", shipped("llama-1b-shape"), "eager", "Llama", dtype="float32"),
    case("qwen", shipped("qwen-shape"), "eager", "Qwen", dtype="float32"),
    case("experts", shipped("moe-shape"), "eager", "mixture of experts", dtype="float32"),
    # In one group of KV caches, the sliding window is the kernel's business.
    case("gemma", shipped("gemma-shape"), "eager", ONE_GEMMA, dtype="float32", **ONE_GROUP),
    case("groups", architecture("gemma"), "eager", GEMMA, dtype="float32"),
    case("groups", architecture("gemma"), "full", GEMMA),
    *(case("sinks", architecture("sinks"), graphs) for graphs in GRAPHS),
    case("shared", architecture("shared K/V"), "eager", SHARED, dtype="float32"),
    case("shared", architecture("shared K/V"), "eager", SHARED, dtype="float32", **ONE_GROUP),
    case("shared", architecture("shared K/V"), "full", SHARED),
    *(case("head dims", architecture("head dims"), graphs) for graphs in GRAPHS),
    case("v2", latent(), "eager", MLA, impl=FLASH_ATTN),
    case("v2", latent(), "full", MLA, impl=FLASHMLA, **FP8),
    case("v2-lite", latent(q_lora_rank=None), "piecewise", MLA, impl=FLASH_ATTN),
    case("v3", latent(**V3), "full", MLA, impl=FLASH_ATTN),
    case("v3", latent(**V3), "full", MLA, impl=FLASH_ATTN, stage_by="copy"),
    case("kimi", latent(**KIMI), "eager", MLA, impl=FLASHMLA, **FP8),
    case("kimi", latent(**KIMI), "full", MLA, impl="TritonMLAImpl", **TRITON_MLA),
    case("kimi", latent(**KIMI), "eager", MLA, impl="TritonMLAImpl", **TRITON_MLA, **FP8),
    # vLLM captures no full graph of chunked local attention.
    case("Llama 4", hybrid("Llama 4"), "eager", **DUMMY),
    *(case("Next", hybrid("Qwen3-Next"), g, **DUMMY, **QWEN_NEXT) for g in GRAPHS),
    *(case("Nemotron-H", hybrid("Nemotron-H"), graphs, **DUMMY) for graphs in GRAPHS),
    *(case(family, hybrid(family), "eager", **DUMMY) for family in ("Granite hybrid", "Falcon-H1")),
    *(
        case(f"{name} drafts", own_drafts(build), graphs, "mtp", layers=layers, **more, **DUMMY)
        for graphs in GRAPHS
        for name, build, layers, more in (
            ("v3", latent(**V3, num_nextn_predict_layers=1), 4, {}),
            ("GLM-4.5", hybrid("GLM-4.5"), 4, {}),
            ("Next", hybrid("Qwen3-Next"), 1, QWEN_NEXT),
        )
    ),
    *(
        case("MiMo", partial(unequal, sinks), graphs, impl=impl, layers=4, **more,
             enable_prefix_caching=False)
        for sinks, impl, more in ((False, FLASH_DIFF, {}), (True, TRITON_DIFF, TRITON))
        for graphs in GRAPHS
    ),
    case("MiMo drafts", own_drafts(partial(unequal, True)), "full", impl=TRITON_DIFF, layers=4,
         **TRITON, enable_prefix_caching=False),
    # Stock vLLM starts with it only beside CUTLASS' Python package.
    case("MiMo sinks", with_cutlass, "full", impl=FLASH_DIFF, layers=4,
         marks=(pytest.mark.own_process,), enable_prefix_caching=False),
]  # fmt: skip
"""On Hopper MiMo V2 chooses FlashAttention: version 3, and for layers with sinks version 4."""


def check_staged(engine: VllmEngine, prompts: list[list[int]], *, exact: bool) -> None:
    """Every window is staged in every SCV mode, counted right, and answers as mode off does."""
    status = engine.status()
    assert status.staging_unavailable is None
    stock = run_cell(engine, "off", "off", prompts)
    for scv in SCV:
        staged = run_cell(engine, "stage", scv, prompts)
        reasons = {window.fallback_reason for window in staged.windows}
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
    """The K/V gate: rows are within the error of mode off itself. A layer whose limit is too blunt
    to see a fault does not count."""
    for scv, result in zip(SCV, kv_results(engine, prompts, scv_modes=SCV), strict=True):
        record_property(scv, result.to_dict())
        assert result.verdict is KvVerdict.WITHIN, result.to_dict()
        assert result.checked is not None, result.to_dict()
        assert result.checked > 0, result.to_dict()
        assert result.of_layers == engine.status().target_layers, result.to_dict()
        assert 0 < result.layers <= result.of_layers, result.to_dict()


def check_all(
    engine: VllmEngine,
    dtype: str,
    graphs: str,
    record_property: Callable[[str, object], None],
    prompts: list[list[int]] = PROMPTS,
) -> None:
    assert not engine.status().launch_refusals  # also in a process that had an engine before
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


@pytest.mark.parametrize(
    ("build", "dtype", "graphs", "arguments", "stage_by", "implementation", "layers"), CASES
)
def test_every_window_is_staged(
    build: Build,
    dtype: str,
    graphs: str,
    arguments: dict[str, Any],
    stage_by: str,
    implementation: str | None,
    layers: int | None,
    tmp_path: Path,
    start_alone: Callable[..., VllmEngine],
    record_property: Callable[[str, object], None],
) -> None:
    given = json.dumps(arguments)
    # A recurrent state takes a whole page of the cache.
    spec = tiny_spec(
        draft_tokens=4,
        dtype=dtype,
        kv_cache_gib=0.5,
        max_model_len=1024,
        engine_args=given,
        stage_by=stage_by,
        attention="merge" if "MLA" in (implementation or "") else "ours",
    )
    engine = start_alone(build(tmp_path, dtype), spec)
    status = engine.status()
    assert layers in (None, status.target_layers), status
    if implementation is not None:
        assert implementations_of(engine) == {implementation}, status
    check_all(engine, dtype, graphs, record_property)
    if implementation is not None and "MLA" in implementation:
        check_way(worker_of(engine).nwor_hook, implementation, graphs)


def check_way(hook: Any, implementation: str, graphs: str) -> None:
    """FlashAttention attends equal windows in part, but copied ones (piecewise graphs) never."""
    (group,) = hook._parts._groups.values()
    merged = group.committed is not None and group.committed._metadata is not None
    assert merged == (implementation == FLASH_ATTN and graphs != "piecewise")
