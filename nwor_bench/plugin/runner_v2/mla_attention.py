"""A latent (MLA) layer's attention on a GPU while NWOR stages: stock methods, wrapped in place.

vLLM runs requests with few query rows absorbed (`forward_mqa`), as queries over cached rows; there
our kernels read the window from where it is staged: all of the attention, or its tail behind
stock's (`mla_tail.py`). Other requests' own K/V come from the step's activations (`forward_mha`),
their context from the cache.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nwor_bench.plugin.patching import Patch
from nwor_bench.plugin.runner_v2.attention import FP8
from nwor_bench.plugin.runner_v2.batch import GpuWindowBatch
from nwor_bench.plugin.runner_v2.latent_layer import LatentLayer, why_rows_unsupported
from nwor_bench.plugin.runner_v2.mla_tail import MlaTail, returning_sums
from nwor_bench.plugin.runner_v2.staging import GpuStaging
from nwor_bench.plugin.runner_v2.step_inputs import StepInputs
from nwor_bench.plugin.staging import refusals
from nwor_bench.plugin.staging.window import Window
from nwor_bench.records import fallback_reasons as reasons
from nwor_kernels.mla_verify_attention.kernel import mla_verify_attention_triton
from nwor_kernels.verify_attention.workspace import VerifyWorkspace

BACKENDS = {
    "flashattn_mla": ("FlashAttnMLAImpl", "FlashAttnMLAMetadataBuilder"),
    "flashmla": ("FlashMLAImpl", "FlashMLAMetadataBuilder"),
    "triton_mla": ("TritonMLAImpl", "TritonMLAMetadataBuilder"),
}
"""Implementation and metadata builder of vLLM's modules that take windows as decodes, over a cache
[blocks, block_size, width]."""


def supported() -> tuple[tuple[type, ...], tuple[type, ...]]:
    """(Implementations, builders) of those modules that vLLM has imported in this process.

    Importing the others may fail, and no layer can have them.
    """
    found = []
    for module, names in BACKENDS.items():
        loaded = sys.modules.get(f"vllm.v1.attention.backends.mla.{module}")
        classes = [getattr(loaded, name, None) for name in names]
        if None not in classes:
            found.append(classes)
    implementations, builders = zip(*found, strict=True) if found else ((), ())
    return implementations, builders


def why_unsupported(layer: Any, max_query_len: int, dtype: torch.dtype) -> str | None:
    """The fallback reason of a latent layer that cannot be staged; None if it can."""
    impl = layer.impl
    implementations, builders = supported()
    if type(impl) not in implementations:
        return reasons.unsupported_attention(type(impl).__name__)
    reason = refusals.of_layer(layer, builders)
    if reason is not None:
        return reason
    if layer.sliding_window is not None:
        return "latent_sliding_window"
    if layer.non_causal_multi_token_decode:
        return refusals.NOT_CAUSAL
    return why_rows_unsupported(impl, max_query_len, dtype)


class MlaStagingAttention(LatentLayer):
    """Wraps the write and the attention of one latent target layer.

    Args:
        number, layer, window, staging, inputs, table: as for `StagedLayer`.
        workspace: partial results of split attention, shared by layers of its shape.
        tail: attends equal windows with stock's help; None where stock cannot.
    """

    def __init__(
        self,
        number: int,
        layer: Any,
        window: Window,
        staging: GpuStaging,
        inputs: StepInputs,
        table: int,
        workspace: VerifyWorkspace,
        tail: MlaTail | None = None,
    ):
        super().__init__(number, layer, window, staging, inputs, table)
        self._workspace = workspace
        self._tail = tail
        self._latent_dim = int(layer.impl.kv_lora_rank)
        self._quantised = layer.impl.kv_cache_dtype in FP8

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
            parts = self._parts_of(query)
            if self._tail is not None and self._tail.takes(batch):
                committed = self._tail.committed_only(self._number, batch, attn_metadata)
                with returning_sums(self._layer.impl):
                    output, sums = original(query, kv_cache, committed, layer)
                self._merge_window(batch, parts, kv_cache, output, sums)
                self._record(query, output)
                return output, None
            if batch.tokens_per_request is None:
                # Requests without a window attend here; the others' rows are overwritten below.
                output, sums = original(query, kv_cache, attn_metadata, layer)
            else:
                latent = self._set.keys[self._place]
                output, sums = latent.new_empty(parts[0].shape), None
            self._verify(batch, parts, kv_cache, output)
            self._record(query, output)
            return output, sums

        return forward_mqa

    def _record(self, query: Tensor | tuple[Tensor, ...], output: Tensor) -> None:
        if self.trace is not None:
            self.trace.attended(self.name, query, output)

    def _parts_of(self, query: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(Absorbed part, rotary part) of queries; vLLM joins them when it quantises them."""
        if isinstance(query, tuple):
            return query
        return query[..., : self._latent_dim], query[..., self._latent_dim :]

    def _verify(
        self,
        batch: GpuWindowBatch,
        query: tuple[Tensor, Tensor],
        kv_cache: Tensor,
        output: Tensor,
    ) -> None:
        layer = self._layer
        quantised_query = query[0].dtype == torch.float8_e4m3fn
        mla_verify_attention_triton(
            *query,
            self._set.keys[self._place],
            self._set.values[self._place],
            kv_cache,
            *self._inputs.for_kernel(batch, self._table),
            output,
            scale=self._scale,
            max_query_len=batch.max_query_len,
            max_seq_len=self._inputs.max_seq_len,
            q_scale=layer._q_scale.view(-1) if quantised_query else None,
            k_scale=layer._k_scale.view(-1) if self._quantised else None,
            workspace=self._workspace,
        )
