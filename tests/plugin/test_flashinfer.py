"""FlashInfer's attention in mode stage: vLLM's own classes over a package that is not installed."""

import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from test_refusals import NAMES, attention_layer, reason_of, runner_with

pytestmark = pytest.mark.slow  # vLLM's attention backends are imported

FLASHINFER = "vllm.v1.attention.backends.flashinfer"
PACKAGE = ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.utils")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module, whose kernels are never called here."""
    from importlib import import_module

    import vllm.v1.attention.backends.flash_attn  # noqa: F401  # looks whether FlashInfer is there

    for name in PACKAGE:
        monkeypatch.setitem(sys.modules, name, MagicMock(__spec__=ModuleSpec(name, None)))
    monkeypatch.delitem(sys.modules, FLASHINFER, raising=False)
    imported = import_module(FLASHINFER)
    monkeypatch.setitem(sys.modules, FLASHINFER, imported)  # so that it is taken out afterwards
    return imported


def layer_of(backend: Any, heads_first: bool = True, **changes: Any) -> Any:
    """A layer with FlashInfer's implementation, which has no `attn_type`."""
    layer = attention_layer()
    settings = {**vars(layer.impl), "fp4_data_dim": 0, **changes}
    del settings["attn_type"]
    layer.impl = object.__new__(backend.FlashInferImpl)
    vars(layer.impl).update(settings)
    layer.attn_backend = backend.FlashInferBackend
    if not heads_first:  # [blocks, block_size, heads, width] in memory
        layer.kv_cache = torch.zeros(3, 16, 2, 128).transpose(1, 2)
    scales = dict.fromkeys(("_q_scale", "_k_scale", "_v_scale"), torch.ones(1))
    return SimpleNamespace(**vars(layer), **scales)


@pytest.mark.parametrize(
    ("heads_first", "changes", "reason"),
    [
        (True, {}, None),
        (False, {}, None),
        (True, {"kv_cache_dtype": "nvfp4"}, "cache_dtype:nvfp4"),
        (True, {"kv_cache_dtype": "fp8_e5m2"}, "cache_dtype:fp8_e5m2"),
        (True, {"alibi_slopes": torch.ones(4)}, "alibi"),
        (True, {"kv_cache_update_bypass": True}, "kv_cache_update_bypass"),
    ],
)
def test_both_layouts_of_its_cache_are_staged_and_other_layers_refused(
    backend: Any, heads_first: bool, changes: dict[str, Any], reason: str | None
) -> None:
    layers = {name: layer_of(backend, heads_first, **changes) for name in NAMES}
    assert reason_of(runner_with(layers)) == reason


def test_its_derived_builders_and_classes_are_refused(backend: Any) -> None:
    from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend

    layer = layer_of(backend)
    layer.attn_backend = create_fast_prefill_custom_backend("Fast", backend.FlashInferBackend)
    found = reason_of(runner_with({NAMES[0]: layer}))
    assert found == "attention_metadata:FastPrefillAttentionBuilder"
    derived = type("DerivedImpl", (backend.FlashInferImpl,), {})
    layer.impl.__class__ = derived
    assert reason_of(runner_with({NAMES[0]: layer})) == "unsupported_attention:DerivedImpl"


Counts = tuple[int, int, int, int]
"""Decodes and their tokens, prefills and their tokens."""
DECODES, PREFILLS, BESIDE_A_DECODE = (2, 8, 0, 0), (0, 0, 2, 8), (1, 1, 2, 8)


def step(backend: Any, counts: Counts, causal: bool = True) -> Any:
    """FlashInfer's metadata."""
    decodes, decode_tokens, prefills, prefill_tokens = counts
    return backend.FlashInferMetadata(
        kv_cache_layout=None, num_actual_tokens=8, slot_mapping=None, causal=causal,
        q_data_type_prefill=torch.float8_e4m3fn, q_data_type_decode=torch.bfloat16,
        prefill=None, decode=None, num_decodes=decodes, num_decode_tokens=decode_tokens,
        num_prefills=prefills, num_prefill_tokens=prefill_tokens,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("counts", "causal", "requests", "reason"),
    [
        (DECODES, True, 2, None),
        (PREFILLS, True, 2, None),
        (BESIDE_A_DECODE, True, 3, None),
        (BESIDE_A_DECODE, True, 2, "attention:other_requests"),
        (DECODES, False, 2, "attention:not_causal"),
    ],
)
def test_each_step_is_checked(
    backend: Any, counts: Counts, causal: bool, requests: int, reason: str | None
) -> None:
    from nwor_bench.plugin import refusals

    assert refusals.of_step(step(backend, counts, causal), requests) == reason


@pytest.mark.parametrize(
    ("counts", "quantised"), [(DECODES, False), (PREFILLS, True), ((1, 1, 1, 7), True)]
)
def test_a_window_attends_with_queries_of_the_type_that_stock_attention_uses(
    backend: Any, counts: Counts, quantised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a Hopper GPU with an fp8 cache: XQA takes windows as decodes, in bfloat16."""
    import wrapped_layers

    from nwor_bench.plugin.runner_v2 import attention

    implementation = wrapped_layers.StockImpl
    eight_bits = lambda _, query, dtype, __: query.to(dtype)  # noqa: E731
    monkeypatch.setattr(implementation, "maybe_quant_query", eight_bits, raising=False)
    monkeypatch.setattr(attention, "FLASHINFER", implementation.__name__)
    layers = wrapped_layers.WrappedLayers(staged=True, monkeypatch=monkeypatch)
    monkeypatch.setattr(wrapped_layers, "step_metadata", lambda: step(backend, counts))
    seen = []

    def verify(step: Any, *_: Any) -> None:
        seen.append((step.query.dtype, step.scales.query is not None))

    monkeypatch.setattr("nwor_bench.plugin.runner_v2.attention.verify_attention_triton", verify)
    layers.begin("whole step")
    layers.query = layers.query.bfloat16()
    layers.forward()
    expected = torch.float8_e4m3fn if quantised else torch.bfloat16
    assert seen == [(expected, quantised)] * wrapped_layers.LAYERS
