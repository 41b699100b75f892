"""Attention on a CPU: a reference backend of our own that can stage.

The stock CPU backend packs its cache per instruction set, so staged tokens cannot be mixed
in. This one is registered as CPU_ATTN under vLLM's name, does both the write and the read,
and keeps the cache in the GPU's layout, [blocks, kv_heads, block_size, K + V width].
`set_up_staging` makes the buffers, or says why windows are written directly.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from nwor_bench.plugin import refusals
from nwor_bench.plugin.layers import (
    LayerCache,
    SlotRows,
    StagingUnavailable,
    TargetLayers,
    rows_of,
    set_up,
    slot_rows,
)
from nwor_bench.plugin.runner_v1.staging import StagingBuffers, write_kv_cache
from nwor_bench.plugin.window import Window
from nwor_bench.records import fallback_reasons as reasons
from nwor_kernels.verify_attention.reference import (
    AttentionPlan,
    plan_attention,
    verify_attention_reference,
)


@dataclass(frozen=True)
class LayerStaging:
    """A target layer's window, buffers and number.

    A layer that shares another's K/V has that layer's number: it reads them and writes none.
    """

    window: Window
    buffers: StagingBuffers
    layer: int
    shares: bool = False
    chunk: int = -1
    """Positions of a chunk of chunked local attention; -1: none."""
    name: str = ""
    """The layer's own name, also if it shares another's K/V."""


class ReferenceCPUAttentionImpl(CPUAttentionBackendImpl):
    """Writes and reads the paged cache in torch; stages on layers that the runner hook chose."""

    staging: LayerStaging | None = None
    """Set by the runner hook on target layers only; drafter layers keep None."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.why_stock = self._why_stock()

    def _why_stock(self) -> str | None:
        if self.is_fp8_kv_cache:
            return reasons.cache_dtype(self.kv_cache_dtype)
        return None if self.attn_type == AttentionType.DECODER else f"layer_type:{self.attn_type}"

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Write the step's K/V, but stage the window's drafts when a window is open."""
        if self.why_stock is not None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        staging = self.staging
        if staging is not None and staging.window.is_staging:
            batch = staging.window.batch
            staged = staging.window.stage(staging.layer, key, value)
            if staged and staging.buffers.trace is not None:
                staging.buffers.trace.wrote(staging.name, key, value)
            if staged and batch is not None and not staging.window.is_control:
                slot_mapping = batch.direct_slots_of[staging.buffers.layers[staging.layer].slot_row]
        num_tokens = slot_mapping.shape[0]
        write_kv_cache(key[:num_tokens], value[:num_tokens], kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of one layer; see the stock backend for shapes. Writes `output`."""
        if self.why_stock is not None:
            stock = (layer, query, key, value, kv_cache, attn_metadata, output)
            return super().forward(*stock, output_scale, output_block_scale)
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("fused output quantisation is not supported on a CPU")
        if attn_metadata is None:  # a warm-up run
            return output
        staging = self._open_staging(key, value, attn_metadata)
        staged_key, staged_value = (
            staging.buffers.staged(staging.layer) if staging else (None, None)
        )
        verify_attention_reference(
            query,
            kv_cache,
            self._plan(attn_metadata, kv_cache.shape[2], staging),
            output,
            scale=self.scale,
            staged_key=staged_key,
            staged_value=staged_value,
            softcap=self.logits_soft_cap,
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
        )
        if staging is not None and staging.buffers.trace is not None:
            staging.buffers.trace.attended(staging.name, query, output)
        return output

    def _open_staging(self, key: Any, value: Any, metadata: Any) -> LayerStaging | None:
        """This layer's staging if its drafts are staged right now, and the step is as planned."""
        staging = self.staging
        if staging is None or not staging.window.is_staging:
            return None
        window = staging.window
        reason = refusals.of_call(key, value, (), {}, shared=staging.shares)
        if reason is None and not window.has_staged(staging.layer):
            reason = refusals.NOT_STAGED
        if reason is None and window.batch is not None:
            # Virtual requests are planned as requests are: a row's chunk holds all that it sees.
            requests = None if staging.chunk > 0 else len(window.batch.num_draft_tokens)
            reason = refusals.of_step(metadata, requests)
        if reason is None:
            return staging
        window.abort(reason)
        return None

    def _plan(
        self, metadata: CPUAttentionMetadata, block_size: int, staging: LayerStaging | None
    ) -> AttentionPlan:
        """The step's index tensors, made by the first layer and kept for the others.

        The key holds whether the layer is staged: after an abort in mid-forward, and for a
        drafter that shares the metadata, the plan without staged rows is another one.
        """
        rows = staging.window.batch.rows if staging and staging.window.batch else None
        plans: dict[Any, AttentionPlan] = metadata.__dict__.setdefault("nwor_plans", {})
        plan_key = (rows is None, self.sliding_window)
        if plan_key not in plans:
            if metadata.dynamic_causal is not None:
                raise NotImplementedError("per-request causality is not supported on a CPU")
            plans[plan_key] = plan_attention(
                metadata.query_start_loc,
                metadata.seq_lens,
                metadata.block_table,
                block_size,
                causal=metadata.causal,
                sliding_window=self.sliding_window,
                staged_token_rows=rows,
            )
        return plans[plan_key]


class ReferenceCPUAttentionBackend(CPUAttentionBackend):
    """The stock CPU backend with our implementation behind it."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """The implementation that can stage."""
        return ReferenceCPUAttentionImpl


def set_up_staging(
    runner: Any, target: TargetLayers, capacity: int
) -> tuple[StagingBuffers | None, str | None]:
    """Staging buffers for vLLM's V1 runner; see `set_up`."""

    def make() -> StagingBuffers:
        layers, slots = stageable_layers(runner, target)
        return StagingBuffers(layers, capacity, grouped=slots.several)

    return set_up(make)


def stageable_layers(runner: Any, target: TargetLayers) -> tuple[list[LayerCache], SlotRows]:
    """The target's layers with their caches, and where to find their slots.

    Raises StagingUnavailable with the fallback reason if windows must be written directly.
    """
    if runner.device.type != "cpu":
        raise StagingUnavailable(reasons.V1_RUNNER_ON_GPU)
    if runner.parallel_config.pipeline_parallel_size > 1:
        raise StagingUnavailable(reasons.PIPELINE_PARALLEL)  # only the last stage samples
    engine = refusals.of_engine(runner.vllm_config)
    if engine is not None:
        raise StagingUnavailable(engine)
    if target.recurrent and not target.staged:
        raise StagingUnavailable(reasons.RECURRENT_LAYERS)
    context = runner.compilation_config.static_forward_context
    theirs = [context[name] for name in (*target.staged, *target.sharing, *target.indexers)]
    for why in (refusals.of_kind, _why_unsupported):
        reason = next((found for layer in theirs if (found := why(layer)) is not None), None)
        if reason is not None:
            raise StagingUnavailable(reason)
    slots = slot_rows(runner, target.staged)
    layers = [
        LayerCache(name, *rows_of(context[name]), runner.dtype, row)
        for name, row in zip(target.staged, slots.of_layer, strict=True)
    ]
    return layers, slots


def _why_unsupported(layer: Any) -> str | None:
    if not isinstance(layer.impl, ReferenceCPUAttentionImpl):
        return reasons.unsupported_attention(type(layer.impl).__name__)
    return layer.impl.why_stock or refusals.of_layer(layer, (CPUAttentionMetadataBuilder,))
