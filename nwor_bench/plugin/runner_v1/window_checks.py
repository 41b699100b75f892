"""Which windows of a V1 runner the local gate checks, and their inputs.

On a CPU both modes run our reference attention backend, so stock means that backend without
staging.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context

from nwor_bench.plugin.layers import (
    LayerCache,
    TargetLayers,
    layers_alone_in_their_memory,
)
from nwor_bench.plugin.observe.errors import AttentionFacts
from nwor_bench.plugin.observe.layer_checks import LayerChecks, StepRows, StepTables
from nwor_bench.plugin.refusals import chunk_of
from nwor_bench.plugin.runner_v1.staging import StagingBuffers
from nwor_bench.plugin.window import LayerCall, LayerTrace, Window

WHOLE_BYTES = 1 << 30
"""Caches up to this size in all are read whole; of larger ones, the blocks of the step."""


@dataclass(frozen=True)
class CpuCheckedLayer:
    """One target layer on a CPU; see `CheckedLayer`."""

    name: str
    owner: str
    layer: Any
    cache: LayerCache

    def cache_rows(self) -> Tensor:
        """See `CheckedLayer`."""
        return self.cache.kv_cache

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

    def attention_facts(self) -> AttentionFacts:
        """The backend's own, with staging or without."""
        impl = self.layer.impl
        window = impl.sliding_window
        seen = window[0] + 1 if isinstance(window, tuple) and window[0] >= 0 else -1
        return AttentionFacts(
            scale=float(impl.scale),
            softcap=float(impl.logits_soft_cap or 0.0),
            sliding_window=window if isinstance(window, int) else seen,
            chunk=chunk_of(self.layer),
            sinks=impl.sinks,
            alibi_slopes=impl.alibi_slopes,
        )


@contextmanager
def _unstaged(impl: Any) -> Iterator[None]:
    """While open, an implementation runs as in mode off."""
    staging, impl.staging = impl.staging, None
    try:
        yield
    finally:
        impl.staging = staging


class WindowChecks:
    """The local gate's hand in one worker, from its start to its end."""

    def __init__(self, runner: Any, target: TargetLayers, buffers: StagingBuffers):
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
        self._checks = LayerChecks(self._layers, alone if size <= WHOLE_BYTES else ())
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
        self._checks.trace = self._buffers.trace = LayerTrace()
        self._metadata, self._drafts = get_forward_context().attn_metadata, drafts
        slots = {name: slot_mapping[name].clone() for name in self._owners()}
        self._checks.begin(StepRows(starts, drafts, slots, path))

    def end(self, window: Window, num_sampled: Sequence[int]) -> None:
        """The window is committed, or fell back; its rows are still held."""
        if self._buffers.trace is None:
            return
        self._buffers.trace = None
        self._checks.ended(
            window, num_sampled, lambda: {each.name: self._tables(each) for each in self._layers}
        )

    def _owners(self) -> list[str]:
        return [layer.name for layer in self._layers if layer.owner == layer.name]

    def _tables(self, layer: CpuCheckedLayer) -> StepTables:
        runner, requests = self._runner, len(self._drafts)
        table = runner.input_batch.block_table[self._group_of[layer.name]]
        return StepTables(
            runner.seq_lens[:requests],
            table.get_device_tensor(requests),
            self._metadata[layer.name],
        )
