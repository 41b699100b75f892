"""Attention on a CPU: a reference backend of our own that can stage.

The stock CPU backend packs its cache per instruction set, so staged tokens cannot be mixed
in. This one is registered as CPU_ATTN under vLLM's name, does both the write and the read,
and keeps the cache in the GPU's layout, [blocks, kv_heads, block_size, K + V width].
`set_up_staging` makes the buffers, or says why windows are written directly; `CpuWindowChecks`
chooses the windows that the local gate checks.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
)

from nwor_bench.plugin import refusals
from nwor_bench.plugin.layers import (
    LayerCache,
    SlotRows,
    StagingUnavailable,
    TargetLayers,
    layers_alone_in_their_memory,
    rows_of,
    set_up,
    slot_rows,
)
from nwor_bench.plugin.observe.layer_checks import (
    LayerChecks,
    StepRows,
    StepTables,
    WindowTrace,
    trace_patches,
)
from nwor_bench.plugin.patching import Patch
from nwor_bench.plugin.refusals import chunk_of
from nwor_bench.plugin.runner_v1.staging import StagingBuffers, write_kv_cache
from nwor_bench.plugin.settings import CPU_ATTENTION
from nwor_bench.plugin.states import WindowStates
from nwor_bench.plugin.window import LayerCall, LayerTrace, Window
from nwor_bench.records import fallback_reasons as reasons
from nwor_kernels.attention_step import ScoreRules
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
        if self.alibi_slopes is not None:
            return reasons.ALIBI
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
        staged = None
        if staging is not None:
            buffers, number = staging.buffers, staging.layer
            staged = buffers.key[number], buffers.value[number]
        verify_attention_reference(
            query,
            kv_cache,
            self._plan(attn_metadata, kv_cache.shape[2], staging),
            output,
            ScoreRules(self.scale, softcap=self.logits_soft_cap, sinks=self.sinks),
            staged,
        )
        if staging is not None and staging.buffers.trace is not None:
            staging.buffers.trace.attended(staging.name, output)
        return output

    def _open_staging(self, key: Any, value: Any, metadata: Any) -> LayerStaging | None:
        """Staging of the layer if its drafts are staged right now, and the step is as planned."""
        staging = self.staging
        if staging is None or not staging.window.is_staging:
            return None
        window = staging.window
        reason = refusals.of_call(key, value, (), {}, shared=staging.shares)
        if reason is None and not window.has_staged(staging.layer):
            reason = reasons.NOT_STAGED
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
        """The implementation that can stage, unless stock's is asked for."""
        if os.environ.get(CPU_ATTENTION) == "stock":
            return CPUAttentionBackend.get_impl_cls()
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
    """The target's layers and their slots; raises StagingUnavailable with a fallback reason."""
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
    for why in (refusals.of_kind, refusals.of_layer):
        reason = next((refused for layer in theirs if (refused := why(layer)) is not None), None)
        if reason is not None:
            raise StagingUnavailable(reason)
    slots = slot_rows(runner, target.staged)
    layers = [
        LayerCache(name, *rows_of(context[name]), runner.dtype, row)
        for name, row in zip(target.staged, slots.of_layer, strict=True)
    ]
    return layers, slots


WHOLE_BYTES = 1 << 30
"""Caches up to this size in all are read whole; of larger ones, the blocks of the step."""


@dataclass(frozen=True)
class CpuCheckedLayer:
    """One target layer on a CPU, as the local gate checks it (`CheckedLayer`).

    Both modes run our reference backend, so stock means that backend without staging.
    """

    name: str
    owner: str
    layer: Any
    cache: LayerCache

    def cache_rows(self) -> Tensor:
        """[blocks, kv_heads, block_size, K + V width]."""
        return self.cache.kv_cache

    def trace_patches(self, trace: LayerTrace) -> list[Patch]:
        """The patches that copy what vLLM gives its write and its attention."""
        return trace_patches(self.layer.impl, trace, self.name, writes=self.name == self.owner)

    def stock_write(self, call: LayerCall, slots: Tensor) -> None:
        """Write with staging off."""
        assert call.key is not None
        assert call.value is not None
        rows, layer = slots.shape[0], self.layer
        key, value = call.key[:rows], call.value[:rows]
        with _unstaged(layer.impl):
            layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)

    def stock_attention(self, call: LayerCall, metadata: Any) -> Tensor:
        """Attend with staging off."""
        assert call.output is not None
        output = torch.full_like(call.output, float("nan"))
        with _unstaged(self.layer.impl):
            self.layer.impl.forward(
                self.layer, call.query, call.key, call.value, self.layer.kv_cache, metadata, output
            )
        return output

    def exact_query(self, call: LayerCall) -> Tensor:
        """[rows, heads, head_dim] float64."""
        assert isinstance(call.query, Tensor)
        return call.query.double().view(call.query.shape[0], -1, self.layer.impl.head_size)

    def exact_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of cache rows in float64."""
        exact = rows.double().nan_to_num()
        return exact[..., : self.cache.head_dim], exact[..., self.cache.head_dim :]

    def attention_facts(self) -> ScoreRules:
        """The backend's own, with staging or without."""
        impl = self.layer.impl
        window = impl.sliding_window
        seen = window[0] + 1 if isinstance(window, tuple) and window[0] >= 0 else -1
        return ScoreRules(
            scale=float(impl.scale),
            softcap=float(impl.logits_soft_cap or 0.0),
            sliding_window=window if isinstance(window, int) else seen,
            chunk=chunk_of(self.layer),
            sinks=impl.sinks,
        )


@contextmanager
def _unstaged(impl: Any) -> Iterator[None]:
    """While open, an implementation runs as in mode off."""
    staging, impl.staging = impl.staging, None
    try:
        yield
    finally:
        impl.staging = staging


class CpuWindowChecks:
    """The windows of one worker that the local gate checks, from its start to its end."""

    def __init__(
        self,
        runner: Any,
        target: TargetLayers,
        buffers: StagingBuffers,
        states: WindowStates | None,
    ):
        context = runner.compilation_config.static_forward_context
        caches = {layer.name: layer for layer in buffers.layers}
        names = {name: target.sharing.get(name, name) for name in (*caches, *target.sharing)}
        self._layers = [
            CpuCheckedLayer(name, owner, context[name], caches[owner])
            for name, owner in names.items()
        ]
        size = sum(
            cache.kv_cache.numel() * cache.kv_cache.element_size() for cache in buffers.layers
        )
        alone = layers_alone_in_their_memory(runner, list(names))
        whole = alone if size <= WHOLE_BYTES else ()
        self._checks = LayerChecks(self._layers, buffers, states, whole)
        groups = runner.kv_cache_config.kv_cache_groups
        self._group_of = {name: n for n, group in enumerate(groups) for name in group.layer_names}
        self._runner = runner
        self._buffers = buffers
        self._metadata: Mapping[str, Any] = {}
        self._drafts: Sequence[int] = ()

    def take(self) -> list[dict[str, Any]]:
        """Measurements of the windows that were checked since the last call."""
        return self._checks.take()

    def begin(self, drafts: Sequence[int], slot_mapping: Mapping[str, Tensor]) -> None:
        """The window is open and its forward comes next; the forward context is set."""
        starts = self._runner.query_start_loc.np[: len(drafts) + 1].tolist()
        alone = starts[-1] == sum(drafts) + len(drafts)
        path = "eager" if alone else "eager, beside prefill"
        if not self._checks.wants(path):
            return
        self._checks.trace = WindowTrace()
        self._checks.follow(self._checks.trace)
        self._metadata, self._drafts = get_forward_context().attn_metadata, drafts
        owners = [layer.name for layer in self._layers if layer.owner == layer.name]
        slots = {name: slot_mapping[name].clone() for name in owners}
        self._checks.begin(StepRows(starts, drafts, slots, path))

    def end(self, window: Window, num_sampled: Sequence[int]) -> None:
        """The window is committed, or fell back; its rows are still held."""
        if self._buffers.trace is None:
            return
        self._checks.follow(None)
        self._checks.ended(
            window, num_sampled, lambda: {layer.name: self._tables(layer) for layer in self._layers}
        )

    def _tables(self, layer: CpuCheckedLayer) -> StepTables:
        runner, requests = self._runner, len(self._drafts)
        table = runner.input_batch.block_table[self._group_of[layer.name]]
        return StepTables(
            runner.seq_lens[:requests],
            table.get_device_tensor(requests),
            self._metadata[layer.name],
        )
