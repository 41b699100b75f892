"""vLLM's values of another width than keys (MiMo V2), and composite attention (Gemma 4)."""

from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
import wrapped_layers
from test_attention_fallbacks import WAYS, check_written_directly, stock_after
from test_refusals import (
    NAMES,
    attention_group,
    attention_layer,
    marked,
    reason_of,
    runner_with,
)

from nwor_bench.plugin.refusals import IMAGE_MASK

pytestmark = pytest.mark.slow  # vLLM's attention backends are imported


def unequal_layer(kind: str, value_width: int = 128, **changes: Any) -> Any:
    """MiMo's layer with vLLM's own implementation, made without a GPU."""
    module = import_module(f"vllm.v1.attention.backends.{kind.lower()}_attn_diffkv")
    layer = attention_layer(kind, **{"head_size": 192, **changes})
    impl = object.__new__(getattr(module, f"{kind}AttentionDiffKVImpl"))
    vars(impl).update(vars(layer.impl))
    cache = torch.zeros(3, 2, 16, 192 + value_width)
    backend = getattr(module, f"{kind}AttentionDiffKVBackend")
    return marked(layer, impl=impl, attn_backend=backend, head_size=192, head_size_v=value_width,
                  kv_cache=cache)  # fmt: skip


@pytest.mark.parametrize("kind", ["Flash", "Triton"])
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


def reason_of_composite(causal_builder: type, **changes: Any) -> str | None:
    """Why vLLM's own composite is not staged; `changes` are its causal part's."""
    from vllm.v1.attention.backends.triton_flash_attn import TritonFlashAttentionBackend as Backend

    def layer() -> Any:
        made = attention_layer("Flash", **changes)
        general, impl = attention_layer("Triton").impl, object.__new__(Backend.get_impl_cls())
        shared = ("num_heads", "num_kv_heads", "head_size", "scale", "kv_cache_dtype")
        marked(impl, **{name: getattr(general, name) for name in shared})
        marked(impl, general_impl=general, causal_impl=made.impl)
        return marked(made, impl=impl, attn_backend=Backend)

    builder: Any = object.__new__(Backend.get_builder_cls())
    builder.causal_builder = object.__new__(causal_builder)
    group = attention_group(NAMES, builder=builder)
    return reason_of(runner_with({name: layer() for name in NAMES}, attn_groups=[[group]]))


def test_a_composite_is_judged_by_its_causal_part() -> None:
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder as Builder

    class Derived(Builder):
        pass

    assert reason_of_composite(Builder) is None
    assert reason_of_composite(Builder, sliding_window=(511, 0)) is None
    assert reason_of_composite(Derived) == "attention_metadata:Derived"
    reason = reason_of_composite(Builder, attn_type="encoder_only")
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
        impl = self.causal_impl if metadata._attention_backend_variant else self.general_impl
        return impl.forward(layer, query, key, value, cache, metadata, output)


PLAIN_STEP = wrapped_layers.step_metadata


def step(variant: int) -> Any:
    return marked(PLAIN_STEP(), _attention_backend_variant=variant)


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Wrapped layers with composites, whose steps are the causal part's unless a test says so."""
    stock, causal = wrapped_layers.StockImpl, partial(step, 1)
    monkeypatch.setattr(wrapped_layers, "step_metadata", causal)
    return wrapped_layers.WrappedLayers(True, monkeypatch, lambda: Composite(stock(), stock()))


@pytest.mark.parametrize("way", WAYS)
def test_windows_of_a_composite_are_staged(layers: Any, way: str) -> None:
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
    facts = {"metadata": step(0), "odd_layer": odd}
    layers.begin(way)
    layers.forward(**facts)
    check_written_directly(layers, stock_after(**facts), IMAGE_MASK, list(range(odd)))
    attended = [layer.impl.general_impl.attended for layer in layers.layers]
    assert attended == [int(number == odd) for number in range(3)]
