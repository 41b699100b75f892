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


@pytest.mark.parametrize("heads_first", [True, False], ids=["HND", "NHD"])
def test_both_layouts_of_its_cache_are_staged(backend: Any, heads_first: bool) -> None:
    layers = {name: layer_of(backend, heads_first) for name in NAMES}
    assert reason_of(runner_with(layers)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_cache_dtype": "nvfp4"}, "cache_dtype:nvfp4"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "cache_dtype:fp8_e5m2"),
        ({"alibi_slopes": torch.ones(4)}, "alibi"),
        ({"kv_cache_update_bypass": True}, "kv_cache_update_bypass"),
    ],
)
def test_what_of_it_is_refused(backend: Any, changes: dict[str, Any], reason: str) -> None:
    layers = {name: layer_of(backend, **changes) for name in NAMES}
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


def step(backend: Any, **changes: Any) -> Any:
    """FlashInfer's metadata of two windows of four rows, by default as decodes."""
    counts = {"num_decodes": 2, "num_decode_tokens": 8, "num_prefills": 0, "num_prefill_tokens": 0}
    return backend.FlashInferMetadata(
        **{
            "kv_cache_layout": None,
            "num_actual_tokens": 8,
            "slot_mapping": None,
            "q_data_type_prefill": torch.float8_e4m3fn,
            "q_data_type_decode": torch.bfloat16,
            "causal": True,
            "prefill": None,
            "decode": None,
            **counts,
            **changes,
        }
    )


PREFILLS = {"num_decodes": 0, "num_decode_tokens": 0, "num_prefills": 2, "num_prefill_tokens": 8}
BESIDE_A_DECODE = {**PREFILLS, "num_decodes": 1, "num_decode_tokens": 1}


@pytest.mark.parametrize(
    ("changes", "requests", "reason"),
    [
        ({}, 2, None),
        (PREFILLS, 2, None),
        (BESIDE_A_DECODE, 3, None),
        (BESIDE_A_DECODE, 2, "attention:other_requests"),
        ({"causal": False}, 2, "attention:not_causal"),
    ],
)
def test_each_step_is_checked(
    backend: Any, changes: dict[str, Any], requests: int, reason: str | None
) -> None:
    from nwor_bench.plugin import refusals

    assert refusals.of_step(step(backend, **changes), requests) == reason


ONE_DECODE = {"num_decodes": 1, "num_decode_tokens": 1, "num_prefills": 1, "num_prefill_tokens": 7}


@pytest.mark.parametrize(
    ("changes", "quantised"), [({}, False), (PREFILLS, True), (ONE_DECODE, True)]
)
def test_a_window_attends_with_queries_of_the_type_that_stock_attention_uses(
    backend: Any, changes: dict[str, Any], quantised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a Hopper GPU with an fp8 cache: XQA takes windows as decodes, in bfloat16."""
    import wrapped_layers

    from nwor_bench.plugin.runner_v2 import attention

    implementation = wrapped_layers.StockImpl
    eight_bits = lambda _, query, dtype, __: query.to(dtype)  # noqa: E731
    monkeypatch.setattr(implementation, "maybe_quant_query", eight_bits, raising=False)
    monkeypatch.setattr(attention, "FLASHINFER", implementation.__name__)
    layers = wrapped_layers.WrappedLayers(staged=True, monkeypatch=monkeypatch)
    monkeypatch.setattr(wrapped_layers, "step_metadata", lambda: step(backend, **changes))
    seen = []

    def verify(step: Any, *_: Any) -> None:
        seen.append((step.query.dtype, step.scales.query is not None))

    monkeypatch.setattr("nwor_bench.plugin.runner_v2.attention.verify_attention_triton", verify)
    layers.begin("whole step")
    layers.query = layers.query.bfloat16()
    layers.forward()
    expected = torch.float8_e4m3fn if quantised else torch.bfloat16
    assert seen == [(expected, quantised)] * wrapped_layers.LAYERS
