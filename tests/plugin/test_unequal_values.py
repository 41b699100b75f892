"""vLLM's values of another width than keys (MiMo V2), and composite attention (Gemma 4)."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_attention_fallbacks import WAYS, check_written_directly, stock_after
from test_refusals import NAMES, attention_group, attention_layer, reason_of, runner_with

from nwor_bench.plugin.refusals import IMAGE_MASK

pytestmark = pytest.mark.slow  # vLLM's attention backends are imported

KINDS = ("Flash", "Triton")


def module_of(kind: str) -> Any:
    from vllm.v1.attention.backends import flash_attn_diffkv, triton_attn_diffkv

    return {"Flash": flash_attn_diffkv, "Triton": triton_attn_diffkv}[kind]


def unequal_layer(kind: str, value_width: int = 128, **changes: Any) -> Any:
    """MiMo's layer with vLLM's own implementation, made without a GPU."""
    plain = attention_layer(kind, **{"head_size": 192, **changes})
    impl = object.__new__(getattr(module_of(kind), f"{kind}AttentionDiffKVImpl"))
    vars(impl).update(vars(plain.impl))
    return SimpleNamespace(
        impl=impl,
        attn_backend=getattr(module_of(kind), f"{kind}AttentionDiffKVBackend"),
        head_size=192,
        head_size_v=value_width,
        kv_cache=torch.zeros(3, 2, 16, 192 + value_width),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"sliding_window": (127, 0), "sinks": torch.zeros(4)}, None),
        ({"kv_cache_dtype": "int8_per_token_head"}, "cache_dtype:int8_per_token_head"),
        ({"value_width": 1024}, "head_dim_1024"),
        ({"attn_type": "encoder_only"}, "attention_type:encoder_only"),
        ({"alibi_slopes": torch.ones(4)}, "alibi"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_of_them_is_staged(kind: str, changes: dict[str, Any], reason: str | None) -> None:
    layers = {name: unequal_layer(kind, **changes) for name in NAMES}
    builder = object.__new__(layers[NAMES[0]].attn_backend.get_builder_cls())
    group = attention_group(NAMES, builder=builder)
    assert reason_of(runner_with(layers, attn_groups=[[group]])) == reason


def test_a_workspace_has_the_values_width() -> None:
    from nwor_bench.plugin.runner_v2.setup import _workspace

    runner = runner_with({})
    made: dict[Any, Any] = {}
    wide, narrow = unequal_layer("Flash", 256), unequal_layer("Flash")
    of_wide, of_narrow = (_workspace(made, layer, runner, 5) for layer in (wide, narrow))
    assert of_wide.accumulators.numel() == 2 * of_narrow.accumulators.numel()
    assert _workspace(made, unequal_layer("Triton"), runner, 5) is of_narrow


def composite_layer(**changes: Any) -> Any:
    """A layer with vLLM's own composite, made without a GPU; `changes` are its causal part's."""
    from vllm.v1.attention.backends.triton_flash_attn import TritonFlashAttentionBackend

    layer = attention_layer("Flash", **changes)
    impl: Any = object.__new__(TritonFlashAttentionBackend.get_impl_cls())
    impl.general_impl, impl.causal_impl = attention_layer("Triton").impl, layer.impl
    shared = ("num_heads", "num_kv_heads", "head_size", "scale", "kv_cache_dtype")
    vars(impl).update({name: getattr(impl.general_impl, name) for name in shared})
    return SimpleNamespace(
        impl=impl,
        attn_backend=TritonFlashAttentionBackend,
        head_size=layer.head_size,
        head_size_v=layer.head_size_v,
        kv_cache=layer.kv_cache,
    )


def composite_builder(causal: type) -> Any:
    from vllm.v1.attention.backends.triton_flash_attn import TritonFlashAttentionBackend

    builder: Any = object.__new__(TritonFlashAttentionBackend.get_builder_cls())
    builder.causal_builder = object.__new__(causal)
    return builder


def reason_with(causal_builder: type, **changes: Any) -> str | None:
    group = attention_group(NAMES, builder=composite_builder(causal_builder))
    layers = {name: composite_layer(**changes) for name in NAMES}
    return reason_of(runner_with(layers, attn_groups=[[group]]))


def test_a_composite_is_judged_by_its_causal_part() -> None:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    class Derived(FlashAttentionMetadataBuilder):
        pass

    assert reason_with(FlashAttentionMetadataBuilder) is None
    assert reason_with(FlashAttentionMetadataBuilder, sliding_window=(511, 0)) is None
    assert reason_with(Derived) == "attention_metadata:Derived"
    reason = reason_with(FlashAttentionMetadataBuilder, attn_type="encoder_only")
    assert reason == "attention_type:encoder_only"


class Composite:
    """A composite like vLLM's: two parts over one cache, of which a step's metadata choose one."""

    kv_cache_dtype = "auto"

    def __init__(self, general: Any, causal: Any):
        self.general_impl, self.causal_impl = general, causal

    def do_kv_cache_update(self, *args: Any) -> None:
        self.general_impl.do_kv_cache_update(*args)

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, output: Any
    ) -> Any:
        variant = getattr(metadata, "_attention_backend_variant", 0)
        impl = self.causal_impl if variant else self.general_impl
        return impl.forward(layer, query, key, value, cache, metadata, output)


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Wrapped layers with composites, whose steps are the causal part's unless a test says so."""
    import wrapped_layers

    stock, plain = wrapped_layers.StockImpl, wrapped_layers.step_metadata

    def causal_step() -> Any:
        step = plain()
        step._attention_backend_variant = 1
        return step

    def composite() -> Composite:
        return Composite(stock(), stock())

    monkeypatch.setattr(wrapped_layers, "step_metadata", causal_step)
    return wrapped_layers.WrappedLayers(True, monkeypatch, composite)


@pytest.mark.parametrize("way", WAYS)
def test_windows_of_a_composite_are_staged(layers: Any, way: str) -> None:
    import torch

    layers.begin(way)
    layers.forward()
    assert layers.window.fallback_reason is None
    assert layers.window.staged_every_layer
    assert layers.verified == [0, 1, 2]
    for ours, theirs in zip(layers.outputs, stock_after().outputs, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_step_with_an_image_mask_is_left_to_stock_attention(
    layers: Any, way: str, odd: int
) -> None:
    import wrapped_layers

    masked = wrapped_layers.step_metadata()
    masked._attention_backend_variant = 0
    layers.begin(way)
    layers.forward(metadata=masked, odd_layer=odd)
    stock = stock_after(metadata=masked, odd_layer=odd)
    check_written_directly(layers, stock, IMAGE_MASK, list(range(odd)))
    assert [layer.impl.general_impl.attended for layer in layers.layers] == [
        int(number == odd) for number in range(3)
    ]
