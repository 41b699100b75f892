"""What every latent (MLA) layer does on a GPU while NWOR stages, whatever attends.

A cached row is a latent and a rotary part, without heads: they are staged as K and V of one head.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nwor_bench.plugin.observe.attention_errors import AttentionFacts
from nwor_bench.plugin.observe.kv_errors import element_view
from nwor_bench.plugin.observe.layer_trace import LayerCall
from nwor_bench.plugin.runner_v2.attention import FP8, element_of_cache
from nwor_bench.plugin.runner_v2.batch import GpuWindowBatch
from nwor_bench.plugin.runner_v2.staged_layer import StagedLayer
from nwor_bench.plugin.staging import refusals
from nwor_bench.records import fallback_reasons as reasons
from nwor_kernels.mla_verify_attention.shape import unsupported_reason
from nwor_kernels.mla_verify_attention.tail import mla_tail_triton


def why_rows_unsupported(impl: Any, max_query_len: int, dtype: torch.dtype) -> str | None:
    """The fallback reason of a latent row that our kernels do not read; None if they do.

    Args:
        impl: the layer's implementation.
        max_query_len: most rows of a request in a window.
        dtype: of the activations.
    """
    cache_dtype = element_of_cache(impl, dtype)
    if cache_dtype is None:
        return reasons.cache_dtype(impl.kv_cache_dtype)
    return unsupported_reason(
        impl.kv_lora_rank, impl.qk_rope_head_dim, max_query_len, dtype, cache_dtype
    )


class LatentLayer(StagedLayer):
    """One latent target layer."""

    # What the local gate asks of it (`CheckedLayer`).

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
        if call.selected is not None:
            layer.impl.topk_indices_buffer[: call.selected.shape[0]].copy_(call.selected)
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
        if impl.kv_cache_dtype in FP8:
            exact = exact * self._layer._k_scale.double()
        return exact, exact[..., : impl.kv_lora_rank]

    def attention_facts(self) -> AttentionFacts:
        """The scale alone: latent layers that are staged have nothing else."""
        return AttentionFacts(scale=float(self._causal.scale))

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
        reason = None if window.has_staged(self._number) else refusals.NOT_STAGED
        reason = reason or refusals.of_latent_step(metadata, batch.num_draft_tokens)
        if reason is None:
            return batch
        window.abort(reason)  # before the cache is read for this layer
        return None

    def _merge_window(
        self,
        batch: GpuWindowBatch,
        query: tuple[Tensor, Tensor],
        kv_cache: Tensor,
        output: Tensor,
        sums: Tensor,
        selection: Tensor | None = None,
    ) -> None:
        """Add to stock's output over the committed tokens what its rows still lack.

        Args:
            batch: the window.
            query: absorbed part [rows, heads, latent] and rotary part [rows, heads, rotary part].
            kv_cache: [blocks, block_size, width].
            output: [rows, heads, latent], stock's; overwritten.
            sums: [rows, heads] float32, stock's log-sum-exp.
            selection: [2, rows] int32 of a sparse layer, see `mla_tail_triton`.
        """
        mla_tail_triton(
            *query,
            self._set.keys[self._place],
            self._set.values[self._place],
            kv_cache,
            *self._inputs.for_kernel(batch, self._table),
            output,
            sums,
            scale=self._scale,
            max_query_len=batch.max_query_len,
            selection=selection,
        )
