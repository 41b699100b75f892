"""What every latent (MLA) layer does on a GPU while NWOR stages, whatever attends.

A cached row is a latent and a rotary part, without heads: they are staged as K and V of one head.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nwor_bench.plugin.runner_v2.attention import element_of_cache
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
