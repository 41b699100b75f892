"""A latent (MLA) layer's attention on a GPU while NWOR stages: stock methods, wrapped in place.

A cached row is a latent and a rotary part, without heads: they are staged as K and V of one head.
vLLM runs requests with few query rows absorbed (`forward_mqa`), as queries over cached rows; there
our kernels read the window from where it is staged. Other requests' own K/V come from the step's
activations (`forward_mha`), their context from the cache.

In steps of equal windows stock attends the committed tokens, and our kernel adds the rest. vLLM's
FlashAttention takes 24 us a layer at 8 requests of 1,250 tokens on an H200 and 51 at 64, our
program for all of the attention 35 and 132. So stock is called with the lengths of what the cache
holds, and its log-sum-exp lets `mla_tail_triton` merge the window in. Which of the two attends a
captured window, or stock all of it, is timed as for other layers if stock is FlashAttention.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nwor_bench.models.support.facts import FP8_CACHES
from nwor_bench.plugin import refusals
from nwor_bench.plugin.observe.errors import element_view
from nwor_bench.plugin.patching import Patch, noting
from nwor_bench.plugin.runner_v2.attention import AttentionGroup
from nwor_bench.plugin.runner_v2.attention_choice import AttentionShape
from nwor_bench.plugin.runner_v2.attention_decision import Contender
from nwor_bench.plugin.runner_v2.attention_layers import element_of_cache
from nwor_bench.plugin.runner_v2.plan import GpuWindowBatch
from nwor_bench.plugin.runner_v2.staged_layer import StagedLayer, StepInputs
from nwor_bench.plugin.runner_v2.staging import GpuStaging
from nwor_bench.plugin.window import LayerCall, LayerTrace, Window
from nwor_bench.records.fallback_reasons import NOT_STAGED
from nwor_kernels.attention_step import AttentionStep, Scales, ScoreRules
from nwor_kernels.mla_verify_attention.kernel import mla_verify_attention_triton, unsupported_reason
from nwor_kernels.mla_verify_attention.tail import mla_tail_triton


def why_no_kernel(layer: Any, max_query_len: int, dtype: torch.dtype) -> str | None:
    """The fallback reason of latent rows that our kernels do not read; None if they do.

    Args:
        max_query_len: most rows of a request in a window.
    """
    impl, cache_dtype = layer.impl, element_of_cache(layer.impl, dtype)
    return unsupported_reason(
        impl.kv_lora_rank, impl.qk_rope_head_dim, max_query_len, dtype, cache_dtype
    )


class LatentLayer(StagedLayer):
    """One latent target layer."""

    def scales(self, query: Tensor) -> Scales:
        """Scales of these queries and of the layer's cache."""
        layer = self._layer
        return Scales(
            layer._q_scale.view(-1) if query.dtype == torch.float8_e4m3fn else None,
            layer._k_scale.view(-1) if layer.impl.kv_cache_dtype in FP8_CACHES else None,
        )

    # For the local gate (`CheckedLayer`).

    def trace_patches(self, trace: LayerTrace) -> list[Patch]:
        """The patches that copy what vLLM gives its write and its attention."""
        impl = self._layer.impl

        def wrote(latent: Tensor, key_pe: Tensor, *_: Any) -> None:
            trace.wrote(self.name, latent.unsqueeze(1), key_pe)

        def asked(query: Tensor | tuple[Tensor, ...], *_: Any) -> None:
            trace.asked(self.name, query)

        return [noting(impl, "do_kv_cache_update", wrote), noting(impl, "forward_mqa", asked)]

    def stock_write(self, call: LayerCall, slots: Tensor) -> None:
        """Write the first rows of a call's latents as stock does."""
        assert call.key is not None
        assert call.value is not None
        rows, layer = slots.shape[0], self._layer
        write = self._stock_write or layer.impl.do_kv_cache_update
        latent, key_pe = call.key[:rows].squeeze(1), call.value[:rows]
        write(latent, key_pe, layer.kv_cache, slots, layer.kv_cache_dtype, layer._k_scale)

    def stock_attention(self, call: LayerCall, metadata: Any) -> Tensor:
        """Stock's output for a call's absorbed queries, [rows, heads, latent]."""
        assert call.output is not None
        assert self._stock_attention is not None
        layer = self._layer
        output: Tensor
        output, _ = self._stock_attention(call.query, layer.kv_cache, metadata, layer)
        return output

    def exact_query(self, call: LayerCall) -> Tensor:
        """[rows, heads, latent + rotary part] float64."""
        parts = call.query if isinstance(call.query, tuple) else (call.query,)
        query = torch.cat([part.double() for part in parts if part is not None], dim=-1)
        first = parts[0]
        if first is not None and first.dtype == torch.float8_e4m3fn:
            query = query * self._layer._q_scale.double()
        return query

    def exact_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Whole rows as K, their latents as V, in float64 with an fp8 cache's scale."""
        impl = self._layer.impl
        exact = element_view(rows, impl.kv_cache_dtype).double().nan_to_num()
        if impl.kv_cache_dtype in FP8_CACHES:
            exact = exact * self._layer._k_scale.double()
        return exact, exact[..., : impl.kv_lora_rank]

    def attention_facts(self) -> ScoreRules:
        """The scale: staged latent layers have nothing else."""
        return ScoreRules(scale=float(self._causal.scale))

    def _wrap_prefill(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Prefills read the cache too, of requests without a window: `_guard` sees to that."""

        def forward_mha(
            query: Tensor,
            latent: Tensor,
            key_pe: Tensor,
            kv_cache: Tensor,
            attn_metadata: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            self._guard(attn_metadata)
            return original(query, latent, key_pe, kv_cache, attn_metadata, *args, **kwargs)

        return forward_mha

    def _guard(self, metadata: Any) -> GpuWindowBatch | None:
        """The window if this layer's attention is to read it; aborted if the step does not fit."""
        window = self._window
        if not window.is_staging:
            return None
        batch = window.batch
        assert isinstance(batch, GpuWindowBatch)
        reason = None if window.has_staged(self._number) else NOT_STAGED
        reason = reason or refusals.of_latent_step(metadata, batch.num_draft_tokens)
        if reason is None:
            return batch
        window.abort(reason)  # before the cache is read for this layer
        return None


def merges(layer: Any) -> bool:
    """True if stock returns its log-sum-exp in this layer, over a cache that is not fp8."""
    impl = layer.impl
    return (
        type(impl).__name__ == "FlashAttnMLAImpl"
        and not impl.kv_cache_dtype.startswith("fp8")
        and impl.dcp_world_size == 1
    )


@contextmanager
def returning_sums(impl: Any) -> Iterator[None]:
    """While open, `forward_mqa` of this implementation returns its log-sum-exp too."""
    asked = impl.need_to_return_lse_for_decode
    impl.need_to_return_lse_for_decode = True
    try:
        yield
    finally:
        impl.need_to_return_lse_for_decode = asked


def shape_of(layer: Any, dtype: torch.dtype) -> AttentionShape:
    """What latent layers that attend alike have in common."""
    impl = layer.impl
    return AttentionShape(
        implementation=type(impl).__name__,
        heads=impl.num_heads,
        kv_heads=1,
        head_dim=impl.kv_lora_rank + impl.qk_rope_head_dim,
        value_dim=impl.kv_lora_rank,
        dtype=str(dtype).removeprefix("torch."),
        cache_dtype=impl.kv_cache_dtype,
        block_size=layer.kv_cache.shape[1],
        latent=True,
    )


class MlaStagingAttention(LatentLayer):
    """Wraps the write and the attention of one latent target layer.

    Args:
        group: how layers of its shape attend.
    """

    def __init__(
        self,
        number: int,
        layer: Any,
        window: Window,
        staging: GpuStaging,
        inputs: StepInputs,
        table: int,
        group: AttentionGroup,
    ):
        super().__init__(number, layer, window, staging, inputs, table)
        self.group = group
        self._latent_dim = int(layer.impl.kv_lora_rank)

    def patches(self) -> list[Patch]:
        """The patches of its write and of both ways of its attention; not yet applied."""
        impl = self._layer.impl
        return [
            Patch(impl, "do_kv_cache_update", self._wrap_write),
            Patch(impl, "forward_mha", self._wrap_prefill),
            Patch(impl, "forward_mqa", self._wrap_decode),
        ]

    def _wrap_write(self, original: Callable[..., Any]) -> Callable[..., Any]:
        self._stock_write = original

        def do_kv_cache_update(
            latent: Tensor, key_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *args: Any
        ) -> None:
            slots = self.slots_to_write(latent.unsqueeze(1), key_pe, slot_mapping)
            if slots is not None:
                original(latent, key_pe, kv_cache, slots, *args)

        return do_kv_cache_update

    def _wrap_decode(self, original: Callable[..., Any]) -> Callable[..., Any]:
        self._stock_attention = original

        def forward_mqa(
            query: Tensor | tuple[Tensor, Tensor],
            kv_cache: Tensor,
            attn_metadata: Any,
            layer: Any,
        ) -> tuple[Tensor, Tensor | None]:
            batch = self._guard(attn_metadata)
            if batch is None:
                return original(query, kv_cache, attn_metadata, layer)
            absorbed, query_pe = self._parts_of(query)
            equal, group = batch.tokens_per_request is not None, self.group
            if equal and group.kind.contender(batch.size) is Contender.MERGE:
                assert group.committed is not None
                over = group.committed.metadata(self._number, batch, attn_metadata)
                step = self.step(batch, absorbed, kv_cache, absorbed, query_pe)
                merged = self.merge(original, over, query, step)
                self._record(merged, is_merged=True)
                return merged, None
            output: Tensor
            sums: Tensor | None = None
            if equal:
                output = self.held[0].new_empty(absorbed.shape)
            else:
                # Requests without a window attend here; the others' rows are overwritten below.
                output, sums = original(query, kv_cache, attn_metadata, layer)
            self.verify(self.step(batch, absorbed, kv_cache, output, query_pe))
            self._record(output)
            return output, sums

        return forward_mqa

    def _record(self, output: Tensor, *, is_merged: bool = False) -> None:
        if self.trace is not None:
            self.trace.attended(self.name, output, is_merged=is_merged)

    def _parts_of(self, query: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(Absorbed part, rotary part) of queries; vLLM joins them when it quantises them."""
        if isinstance(query, tuple):
            return query
        return query[..., : self._latent_dim], query[..., self._latent_dim :]

    def merge(
        self,
        attend: Callable[..., Any],
        metadata: Any,
        query: Tensor | tuple[Tensor, Tensor],
        step: AttentionStep,
    ) -> Tensor:
        """Attend with stock over the committed tokens, and merge the window's rows.

        Args:
            attend: stock's.
            metadata: stock's, over the committed tokens.
            query: as stock takes it.
            step: its output is not used: stock makes one.
        """
        output: Tensor
        with returning_sums(self._layer.impl):
            output, sums = attend(query, step.kv_cache, metadata, self._layer)
        mla_tail_triton(step._replace(output=output), sums)
        return output

    def verify(self, step: AttentionStep) -> None:
        """Attend with our kernel."""
        mla_verify_attention_triton(step, self.group.workspace)
