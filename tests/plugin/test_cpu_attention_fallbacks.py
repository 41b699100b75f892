"""The CPU's reference attention, called otherwise than planned: it reads a cache that is right."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow  # vLLM's attention backends are imported


class CpuLayers:
    """Layers of the reference backend over one cache each, and a window of all their drafts."""

    def __init__(self, staged: bool):
        from wrapped_layers import LAYERS, REQUESTS, WIDTH, WrappedLayers, step_slots

        from nwor_bench.plugin.layers import LayerCache
        from nwor_bench.plugin.runner_v1.cpu_attention import (
            LayerStaging,
            ReferenceCPUAttentionImpl,
        )
        from nwor_bench.plugin.runner_v1.staging import StagingBuffers
        from nwor_bench.plugin.window import Window, WindowBatch

        self.step = WrappedLayers(staged=False)
        self.caches, self.outputs = self.step.caches, []
        caches = [LayerCache(str(n), c, WIDTH, torch.float32) for n, c in enumerate(self.caches)]
        buffers = StagingBuffers(caches, 6)
        self.window = Window(buffers)
        self.impls = []
        for number in range(LAYERS):
            impl = object.__new__(ReferenceCPUAttentionImpl)
            settings = {"why_stock": None, "scale": 0.3, "logits_soft_cap": 0.0, "sinks": None}
            vars(impl).update({**settings, "sliding_window": -1})
            impl.staging = LayerStaging(self.window, buffers, number) if staged else None
            self.impls.append(impl)
        slots = step_slots()
        rows = torch.tensor([1, 2, 3, 5, 6, 7])
        direct = slots.clone()
        direct[rows] = -1
        if staged:
            self.window.begin(WindowBatch((3,) * REQUESTS, rows, slots[rows], direct))

    def forward(
        self, odd_layer: int | None = None, metadata: Any = None, captured: bool = False
    ) -> None:
        from wrapped_layers import step_metadata, step_slots

        from nwor_bench.plugin.runner_v1.staging import write_kv_cache

        for number, impl in enumerate(self.impls):
            odd, cache = number == odd_layer, self.caches[number]
            key, value = self.step.keys[number], self.step.values[number]
            if odd and captured:
                write_kv_cache(key, value, cache, step_slots())
            else:
                impl.do_kv_cache_update(None, key, value, cache, step_slots())
            used = metadata if odd and metadata is not None else step_metadata()
            used = SimpleNamespace(**vars(used), dynamic_causal=None)
            output = torch.full_like(self.step.query, torch.nan)
            given = (None, None) if odd and captured == "no key" else (key, value)
            impl.forward(None, self.step.query, *given, cache, used, output)
            self.outputs.append(output)


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize(
    ("captured", "reason"),
    [
        (True, "attention:kv_not_staged"),
        ("no key", "attention:kv_cache_update_bypass"),
        (False, "attention:other_requests"),
    ],
)
def test_the_window_is_written_before_the_cache_is_read(
    odd: int, captured: Any, reason: str
) -> None:
    from test_attention_fallbacks import chunked

    metadata = None if captured else chunked(12)
    stock, staged = CpuLayers(staged=False), CpuLayers(staged=True)
    stock.forward(odd, metadata)
    staged.forward(odd, metadata, captured)
    assert staged.window.fallback_reason == reason
    assert staged.window.close().staged_tokens == 0
    for ours, theirs in zip(staged.outputs, stock.outputs, strict=True):
        torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(staged.caches, stock.caches, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"is_fp8_kv_cache": True}, "cache_dtype:fp8"),
        ({"alibi_slopes": torch.ones(4)}, "alibi"),
        ({"attn_type": "encoder_only"}, "layer_type:encoder_only"),
    ],
)
def test_what_stock_attends(changes: dict[str, Any], reason: str | None) -> None:
    from nwor_bench.plugin.runner_v1.cpu_attention import ReferenceCPUAttentionImpl

    impl = object.__new__(ReferenceCPUAttentionImpl)
    plain = {"is_fp8_kv_cache": False, "kv_cache_dtype": "fp8", "alibi_slopes": None}
    vars(impl).update({**plain, "attn_type": "decoder", **changes})
    assert impl._why_stock() == reason
