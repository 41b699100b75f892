"""A target layer's attention on a GPU while NWOR stages: stock methods, wrapped on the instance.

In mode `off` nothing here is in place and the layer runs the stock implementation. In mode
`stage` its write leaves out what the window stages, and its attention reads the committed
context from the cache and the window's K/V from where it is staged. In mode `control` its
attention does the same, and its write leaves out nothing. How it attends is the choice of its kind
(`attention_choice`): our kernel, or in steps of equal windows stock and a merge.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nwor_bench.models.support.facts import FP8_CACHES
from nwor_bench.models.support.rules import FLASHINFER
from nwor_bench.plugin import refusals
from nwor_bench.plugin.observe.errors import element_view
from nwor_bench.plugin.observe.layer_checks import trace_patches
from nwor_bench.plugin.patching import Patch
from nwor_bench.plugin.runner_v2.attention_choice import AttentionKind
from nwor_bench.plugin.runner_v2.attention_decision import TILINGS, Contender
from nwor_bench.plugin.runner_v2.attention_layers import (
    positions_seen,
    query_as_flashinfer,
    rules_of,
)
from nwor_bench.plugin.runner_v2.committed import CommittedOnly, attend_committed
from nwor_bench.plugin.runner_v2.plan import GpuWindowBatch
from nwor_bench.plugin.runner_v2.staged_layer import StagedLayer, StepInputs
from nwor_bench.plugin.runner_v2.staging import GpuStaging
from nwor_bench.plugin.window import LayerCall, LayerTrace, Window
from nwor_bench.records.fallback_reasons import NOT_STAGED
from nwor_kernels.attention_step import AttentionStep, Scales, ScoreRules
from nwor_kernels.verify_attention.kernel import VerifyWorkspace, verify_attention_triton
from nwor_kernels.verify_attention.tuning import Tuning, tuning_of
from nwor_kernels.window_merge.kernel import merge_window_triton


class AttentionGroup:
    """What layers of one shape and one block table share.

    Args:
        workspace: partial results of split attention, shared by layers of this shape.
        committed: metadata for stock over the committed tokens; None if stock's output cannot be
            merged.
    """

    def __init__(
        self,
        kind: AttentionKind,
        workspace: VerifyWorkspace,
        device: torch.device,
        committed: CommittedOnly | None = None,
    ):
        self.kind, self.workspace, self.committed = kind, workspace, committed
        shape = kind.shape
        wide = max(shape.head_dim, shape.value_dim)
        self.tunings: dict[Contender, Tuning | None] = {
            contender: tuning_of(tiling, shape.cache_bytes, device, wide)
            for contender, tiling in TILINGS.items()
        }


class StagingAttention(StagedLayer):
    """Wraps the write and the attention of one target layer.

    A layer that shares another's K/V writes nothing: it reads what that layer staged, which is
    held until the commit, behind all of them.

    Args:
        group: how layers of its shape attend.
        writes: the layer has K/V of its own.
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
        *,
        writes: bool = True,
    ):
        super().__init__(number, layer, window, staging, inputs, table)
        self.group = group
        self._writes = writes
        self._quantised = self._causal.kv_cache_dtype in FP8_CACHES
        self._is_flashinfer = type(self._causal).__name__ == FLASHINFER
        self.rules = rules_of(layer, layer.kv_cache.device)

    def patches(self) -> list[Patch]:
        """The patches of its write, if it has one, and of its attention; not yet applied."""
        impl = self._layer.impl
        forward = Patch(impl, "forward", self._wrap_forward)
        if not self._writes:
            return [forward]
        return [Patch(impl, "do_kv_cache_update", self._wrap_write), forward]

    def _wrap_write(self, original: Callable[..., Any]) -> Callable[..., Any]:
        self._stock_write = original

        def do_kv_cache_update(
            layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
        ) -> None:
            slots = self.slots_to_write(key, value, slot_mapping)
            if slots is not None:
                original(layer, key, value, kv_cache, slots)

        return do_kv_cache_update

    def _wrap_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        window = self._window
        self._stock_attention = original

        def forward(
            layer: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            attn_metadata: Any,
            output: Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> Tensor:
            batch = window.batch
            if window.is_staging and attn_metadata is not None:
                reason = refusals.of_call(key, value, args, kwargs, shared=not self._writes)
                reason = reason or self._why_not_staged(attn_metadata)
                if reason is not None:
                    window.abort(reason)  # before the cache is read for this layer
            if not window.is_staging or attn_metadata is None:
                return original(
                    layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
                )
            assert isinstance(batch, GpuWindowBatch)
            if batch.tokens_per_request is None:
                # Requests without a window attend here; the others' rows are overwritten below.
                original(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
            if self._is_flashinfer:
                query = query_as_flashinfer(self._causal, layer, query, attn_metadata)
            attended = self._verify(batch, query, kv_cache, attn_metadata, output)
            if self.trace is not None:
                is_merged = attended is Contender.MERGE
                self.trace.attended(self.name, output, is_merged=is_merged, is_causal=False)
            return output

        return forward

    def _why_not_staged(self, metadata: Any) -> str | None:
        """Why this layer's attention must read the cache in this step; None: it need not."""
        if not self._window.has_staged(self._number):
            return NOT_STAGED
        assert self._window.batch is not None
        requests = len(self._window.batch.num_draft_tokens)
        return refusals.of_step(metadata, None if self.rules.chunk > 0 else requests)

    def _verify(
        self,
        batch: GpuWindowBatch,
        query: Tensor,
        kv_cache: Tensor,
        metadata: Any,
        output: Tensor,
    ) -> Contender:
        """Attend the window; what has attended it."""
        size, step = batch.size, self.step(batch, query, kv_cache, output)
        if batch.tokens_per_request is None:
            contender = self.group.kind.tiling(size)
        else:
            contender = self.group.kind.contender(size)
            if contender is Contender.MERGE:
                assert self.group.committed is not None
                self.merge(self.group.committed.metadata(self._number, batch, metadata), step)
                return contender
        self.verify(contender, step)
        return contender

    def verify(self, contender: Contender, step: AttentionStep) -> None:
        """Attend with our kernel."""
        verify_attention_triton(step, self.group.workspace, self.group.tunings[contender])

    def merge(self, metadata: Any, step: AttentionStep) -> None:
        """Attend with stock over the committed tokens, and merge the window's rows.

        Args:
            metadata: stock's, over the committed tokens.
        """
        sums = attend_committed(self._layer, step.query, step.kv_cache, metadata, step.output)
        merge_window_triton(step, sums)

    def scales(self, query: Tensor) -> Scales:
        """Scales of these queries and of the layer's cache."""
        layer, quantised = self._layer, self._quantised
        return Scales(
            layer._q_scale.view(-1) if query.dtype == torch.float8_e4m3fn else None,
            layer._k_scale.view(-1) if quantised else None,
            layer._v_scale.view(-1) if quantised else None,
        )

    # For the local gate (`CheckedLayer`).

    def trace_patches(self, trace: LayerTrace) -> list[Patch]:
        """The patches that copy what vLLM gives its write and its attention."""
        return trace_patches(self._layer.impl, trace, self.name, writes=self._writes)

    def stock_write(self, call: LayerCall, slots: Tensor) -> None:
        """Write the first rows of a call's K and V as stock does."""
        assert self._stock_write is not None
        assert call.key is not None
        assert call.value is not None
        rows, layer = slots.shape[0], self._layer
        self._stock_write(layer, call.key[:rows], call.value[:rows], layer.kv_cache, slots)

    def stock_attention(self, call: LayerCall, metadata: Any) -> Tensor:
        """Stock's output for a call's queries, [rows, heads, value_dim]."""
        assert call.output is not None
        assert self._stock_attention is not None
        output = torch.full_like(call.output, float("nan"))
        layer = self._layer
        self._stock_attention(
            layer, call.query, call.key, call.value, layer.kv_cache, metadata, output
        )
        return output

    def exact_query(self, call: LayerCall) -> Tensor:
        """[rows, heads, head_dim] float64."""
        assert isinstance(call.query, Tensor)
        query = call.query.double().view(call.query.shape[0], -1, self._causal.head_size)
        if call.query.dtype == torch.float8_e4m3fn:
            query = query * self._layer._q_scale.double()
        return query

    def exact_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of cache rows in float64, with an fp8 cache's scales."""
        head_dim = int(self._causal.head_size)
        exact = element_view(rows, self._causal.kv_cache_dtype).double().nan_to_num()
        key, value = exact[..., :head_dim], exact[..., head_dim:]
        if not self._quantised:
            return key, value
        scales = (self._layer._k_scale, self._layer._v_scale)
        k_scale, v_scale = (scale.double().view(-1, 1) for scale in scales)
        return key * k_scale, value * v_scale

    def attention_facts(self) -> ScoreRules:
        """Stock's, read again: a fault in our kernel's arguments must not be in the reference."""
        impl = self._causal
        return ScoreRules(
            scale=float(impl.scale),
            softcap=float(impl.logits_soft_cap or 0.0),
            sliding_window=positions_seen(impl.sliding_window),
            chunk=refusals.chunk_of(self._layer),
            sinks=getattr(impl, "sinks", None),
        )
