"""A sparse latent layer (DeepSeek V3.2, GLM-5) on a GPU while NWOR stages.

One kernel of the model norms, rotates and writes a token's latent row and its indexer's key. It
skips the row's write if it is given no cache for it, and leaves the row in a tensor all the
same; that is staged, and the indexer's key is written as ever. (Slots of -1 would skip both.) What
a mixed step writes at once goes through the implementation's own write.

The indexer selects positions, those of the window among them. FlashAttention attends the selected
rows of the cache one by one, in any order, so it is given only those of the committed tokens, and
the tail's kernel merges in the window's rows that each query has selected.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from nwor_bench.models.support.rules import SPARSE_MODULE
from nwor_bench.plugin.patching import Patch
from nwor_bench.plugin.runner_v2.mla_attention import LatentLayer
from nwor_bench.plugin.runner_v2.plan import GpuWindowBatch
from nwor_bench.plugin.window import Window
from nwor_kernels.mla_verify_attention.tail import split_selection_triton

BACKEND = "vllm.v1.attention.backends.mla.flashattn_mla_sparse"
"""vLLM's module of sparse attention by FlashAttention 3, which is Hopper's, over bf16 and fp16."""


class SparseMlaAttention(LatentLayer):
    """Stages and attends for one sparse latent layer; arguments as for `StagedLayer`."""

    @property
    def cache(self) -> Tensor:
        """The layer's cache, [blocks, block_size, width]."""
        cache: Tensor = self._layer.kv_cache
        return cache

    def patches(self) -> list[Patch]:
        """The patches of both ways of its attention; `fused_write_patch` has its write's."""
        impl = self._layer.impl
        return [
            Patch(impl, "forward_mha", self._wrap_prefill),
            Patch(impl, "forward_mqa", self._wrap_decode),
        ]

    def write(self, latent: Tensor, key_pe: Tensor, slots: Tensor) -> None:
        """Stage the step's rows, and write the others at once.

        Args:
            latent: [rows, latent].
            key_pe: [rows, rotary part].
            slots: [rows] int64, stock's slots of the layer.
        """
        if self.trace is not None:  # stock's kernel has made both just now
            self.trace.wrote(self.name, latent.unsqueeze(1), key_pe.unsqueeze(1))
        layer, as_head = self._layer, key_pe.unsqueeze(1)
        direct = self.slots_to_write(latent.unsqueeze(1), as_head, slots)
        if direct is not None and not self._window.is_control:
            layer.impl.do_kv_cache_update(
                latent, as_head, layer.kv_cache, direct, layer.kv_cache_dtype, layer._k_scale
            )

    def _wrap_decode(self, original: Callable[..., Any]) -> Callable[..., Any]:
        self._stock_attention = original

        def forward_mqa(
            query: tuple[Tensor, Tensor], kv_cache: Tensor, attn_metadata: Any, layer: Any
        ) -> tuple[Tensor, Tensor | None]:
            batch = self._guard(attn_metadata)
            if batch is None:
                return original(query, kv_cache, attn_metadata, layer)
            output = self._attend(batch, query, kv_cache, attn_metadata)
            if self.trace is not None:
                self.trace.attended(self.name, output, is_merged=True)
            return output, None

        return forward_mqa

    def _attend(
        self, batch: GpuWindowBatch, query: tuple[Tensor, Tensor], kv_cache: Tensor, metadata: Any
    ) -> Tensor:
        impl, tokens = self._layer.impl, query[1].shape[0]
        selected = impl.topk_indices_buffer[:tokens]
        # As stock makes its own: kept until the next layer's, in a graph's pool too.
        rows = torch.empty_like(selected)
        selection = torch.empty(2, tokens, dtype=torch.int32, device=rows.device)
        block_size, width = kv_cache.shape[1:]
        split_selection_triton(
            selected,
            metadata.req_id_per_token[:tokens],
            self._inputs.for_kernel(batch, self._table),
            rows,
            selection,
            block_size=block_size,
            block_rows=kv_cache.stride(0) // width,
        )
        output, sums = self._attend_committed(query, kv_cache, rows, selection[0])
        self._merge_window(self.step(batch, query[0], kv_cache, output, query[1]), sums, selection)
        return output

    def _attend_committed(
        self, query: tuple[Tensor, Tensor], kv_cache: Tensor, rows: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(Output, log-sum-exp [tokens, heads]) over the cache's rows that each query is given.

        As `FlashAttnMLASparseImpl` calls FlashAttention, which does not return the sums there.
        """
        impl, backend = self._layer.impl, sys.modules[BACKEND]
        flat, _ = backend.flat_kv_row_view(kv_cache, kv_cache.shape[1])
        output, sums = backend.flash_attn_varlen_func(
            q=query[1],
            k=flat[:, None, None, impl.kv_lora_rank :],
            v=flat[:, None, None, : impl.kv_lora_rank],
            q_v=query[0],
            max_seqlen_q=1,
            cu_seqlens_q=impl.cu_seqlens_q_buffer[: len(rows) + 1],
            max_seqlen_k=rows.shape[1],
            seqused_k=counts,
            block_table=rows,
            softmax_scale=self.rules.scale,
            causal=True,
            return_softmax_lse=True,
            fa_version=3,
        )
        return output, sums.T


def fused_write_patch(layers: Iterable[SparseMlaAttention], window: Window) -> Patch:
    """The patch of the one kernel in which all these layers write, each to a cache of its own."""
    of_cache = {layer.cache.data_ptr(): layer for layer in layers}

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def fused_norm_rope(*args: Any, **given: Any) -> Any:
            cache, latent = given.get("mla_kv_cache"), given.get("kv_c_out")
            if not window.is_staging or cache is None or latent is None:
                return original(*args, **given)
            layer = of_cache.get(cache.data_ptr())
            if layer is None:
                return original(*args, **given)
            if not window.is_control:
                given["mla_kv_cache"] = None
            queries = original(*args, **given)
            layer.write(latent, given["k_pe_out"], given["slot_mapping"])
            return queries

        return fused_norm_rope

    return Patch(sys.modules[SPARSE_MODULE], "fused_norm_rope", wrap)
