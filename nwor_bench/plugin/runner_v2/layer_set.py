"""Target layers that one launch commits: caches of one shape, strides and dtype."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nwor_bench.plugin.layers import LayerCache, StagingUnavailable
from nwor_bench.plugin.runner_v2.plan import GpuWindowBatch
from nwor_bench.plugin.window import HeldValuesLost
from nwor_kernels.commit.plan import CommitPlan, CommitRows, StagedSources
from nwor_kernels.commit.with_update import RequestStates, Update

logger = logging.getLogger("vllm.nwor_bench")

ALIGNMENT = 256
"""Bytes that each set's part of the memory is a multiple of, for wide loads and stores."""


@dataclass(frozen=True)
class CopyBuffers:
    """Rows for the most drafts that a window can have, in every layer of one set."""

    keys: Tensor
    """[layers, capacity, kv_heads, head_dim]"""
    values: Tensor
    """[layers, capacity, kv_heads, value_head_dim]"""
    metadata: Tensor
    """[layers, 2] int32, written by `stage_kv_cache`."""
    sources: StagedSources
    """Where a commit finds the rows."""

    @classmethod
    def num_bytes(cls, layers: Sequence[LayerCache], capacity: int) -> int:
        """Bytes of memory that these layers need, a multiple of ALIGNMENT."""
        _, kv_heads, _, width = layers[0].kv_cache.shape
        needed = len(layers) * capacity * kv_heads * width * layers[0].dtype.itemsize
        return -(-needed // ALIGNMENT) * ALIGNMENT

    @classmethod
    def create(cls, layers: Sequence[LayerCache], capacity: int, memory: Tensor) -> "CopyBuffers":
        """Buffers of the layers' dtype (not their caches', which may be quantised).

        Args:
            memory: [`num_bytes`] uint8, which holds all keys and then all values.
        """
        first = layers[0]
        _, kv_heads, _, width = first.kv_cache.shape
        rows = (len(layers), capacity, kv_heads)
        per_width = len(layers) * capacity * kv_heads
        elements = memory.view(first.dtype)
        cut = per_width * first.head_dim
        keys = elements[:cut].view(*rows, first.head_dim)
        values = elements[cut : per_width * width].view(*rows, width - first.head_dim)
        metadata = torch.zeros(len(layers), 2, dtype=torch.int32, device=memory.device)
        return cls(keys, values, metadata, StagedSources(list(keys), list(values)))


class HeldValues:
    """Holds each layer's K/V of a window, and detects two layers with the same address."""

    def __init__(self, num_layers: int):
        self._num_layers = num_layers
        self._proven: set[int] = set()
        self._owners: dict[int, int] = {}
        self._layers: set[int] = set()
        self._originals: list[Tensor] = []
        self._repeats = False

    def clear(self) -> None:
        """Forget the window and release its tensors."""
        self._owners.clear()
        self._layers.clear()
        self._originals.clear()
        self._repeats = False

    def take(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """The tensors to hold: K and V themselves, or copies in a first window.

        Args:
            layer: its number; a layer that comes again begins another run of a capture's forward.
            key, value: [rows, kv_heads, head_dim], strided.

        Returns:
            None if an earlier layer has the same address; that one's copy is still right.

        Raises:
            HeldValuesLost: an earlier layer has the same address, and no copy was made.
        """
        if layer in self._layers:
            self.clear()
            self._repeats = True  # padding: nothing can be lost, and a graph keeps addresses
        self._layers.add(layer)
        by_reference = self._repeats or key.shape[0] in self._proven
        for address in {key.data_ptr(), value.data_ptr()}:
            owner = self._owners.setdefault(address, layer)
            if owner == layer:
                continue
            if by_reference and not self._repeats:
                raise HeldValuesLost(
                    f"the K/V of target layer {owner} were overwritten by layer {layer} before "
                    f"the commit, in a window of {key.shape[0]} rows; unset VLLM_NWOR_MODE, or "
                    "set VLLM_NWOR_STAGE_BY=copy"
                )
            return None
        if by_reference:
            return key, value
        if len(self._layers) == self._num_layers:
            self._proven.add(key.shape[0])
        # Held as well: memory that is free may be given to the next layer without any fault.
        self._originals += [key, value]
        return key.clone(), value.clone()


CommitLaunch = Callable[[Tensor], None]
"""Launches a commit for these counts, [requests] int32 on the device."""


class LayerSet:
    """K/V of a window in the layers of one set, and the launch that commits them.

    A cache is viewed as [blocks, heads, block_size, width]: of a row the first `head_dim` elements
    come from what is staged as K, the rest from what is staged as V. Latents fit too.

    Args:
        number: the set's place among the sets.
        first: number of its first layer among all target layers.
        errors: [layers] int32 on the device, this set's part of all layers' flags.
        written: [2, layers] int32 likewise: rows stored by commits, and by direct writes.
        grouped: slots are [groups, N], and each layer has a row of them.

    Raises:
        StagingUnavailable: caches that a commit cannot write.
    """

    def __init__(
        self,
        number: int,
        first: int,
        layers: list[LayerCache],
        errors: Tensor,
        written: Tensor,
        grouped: bool,
    ):
        self.layers = layers
        self.numbers = range(first, first + len(layers))
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._number = number
        self._errors = errors
        self._written, self._written_directly = written
        self._grouped = grouped
        self._plan = self._plan_of(layers, [layer.slot_row for layer in layers])
        self._bound: dict[tuple[StagedSources, int], CommitLaunch] = {}
        self._updating: dict[tuple[StagedSources, int], tuple[RequestStates, Update]] = {}
        self._collected: StagedSources | None = None
        self.buffers: CopyBuffers | None = None
        """Where copies go; None until their memory is there."""
        self.release()

    def _plan_of(self, layers: Sequence[LayerCache], rows: Sequence[int]) -> CommitPlan:
        scales = [layer.scales for layer in layers if layer.scales is not None]
        k_scales, v_scales = zip(*scales, strict=True) if scales else (None, None)
        more = {"slot_rows": rows} if self._grouped else {}
        try:
            return CommitPlan([layer.kv_cache for layer in layers], k_scales, v_scales, **more)
        except ValueError as refusal:
            logger.warning("nwor: windows are written directly: %s", refusal)
            # The reason is a label of a metric, so it holds none of the message's numbers.
            raise StagingUnavailable("commit:caches_do_not_fit") from refusal

    def release(self) -> None:
        """Let go of the last window's K/V."""
        nothing = self.layers[0].kv_cache
        self.keys = [nothing] * len(self.layers)
        self.values = [nothing] * len(self.layers)
        self.begin_forward()

    def begin_forward(self) -> None:
        """The next layer's layout counts, whatever that of an earlier run of the forward was."""
        self._strides: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def laid_out(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The next layer's K/V as those of the forward's first layer lie.

        One launch reads all layers by the same strides. If a layer's differ (Llama 4 rotates K in
        three of four layers, and in the fourth it is a view of the fused QKV), these are copies.
        """
        if self._strides is None:
            self._strides = key.stride(), value.stride()
        of_keys, of_values = self._strides
        return _laid_out(key, of_keys), _laid_out(value, of_values)

    def hold(self, place: int, key: Tensor, value: Tensor) -> None:
        """Remember where the K/V of the layer at this place are, laid out alike."""
        self.keys[place], self.values[place] = key, value

    def captured_sources(self) -> StagedSources:
        """Addresses of the K/V held now, which a captured graph fills with every replay."""
        return StagedSources(self.keys, self.values)

    def launch(self, batch: GpuWindowBatch, slots: Tensor, certain: int) -> CommitLaunch:
        """The launch that commits this window, given its counts."""
        if batch.sources is None or batch.tokens_per_request is None:
            return partial(self.commit, batch, slots, certain=certain)
        sources = batch.sources[self._number]
        key = (sources, certain)  # a capture's slots keep their place and number
        bound = self._bound.get(key)
        if bound is None:
            rows = CommitRows(slots, batch.tokens_per_request, certain=certain)
            bound = self._plan.bind(sources, rows, self._errors, self._written)
            self._bound[key] = bound
        return bound

    def launch_with_update(
        self, batch: GpuWindowBatch, slots: Tensor, certain: int, kernel: Any, states: RequestStates
    ) -> Update:
        """The launch that commits a captured window and runs vLLM's update of its requests.

        Args:
            kernel: the update's.
            states: what it changes; one object for as long as they are the same tensors.
        """
        assert batch.sources is not None
        assert batch.tokens_per_request is not None
        sources = batch.sources[self._number]
        kept = self._updating.get((sources, certain))
        if kept is not None and kept[0] is states:
            return kept[1]
        bound = self._plan.bind_with_update(
            sources,
            CommitRows(slots, batch.tokens_per_request, certain=certain),
            self._errors,
            written=self._written,
            update=kernel,
            states=states,
        )
        self._updating[sources, certain] = states, bound
        return bound

    def forget_launches(self) -> None:
        """Drop the bound launches of a warm-up, whose windows never come."""
        self._bound.clear()
        self._updating.clear()

    def commit(
        self,
        batch: GpuWindowBatch,
        slots: Tensor,
        counts: Tensor,
        *,
        certain: int = 0,
        direct: bool = False,
    ) -> None:
        """Write each request's first `counts + certain` rows; count `direct` ones separately."""
        metadata = None
        if batch.copied and batch.sources is None:
            # A captured graph stages its padding too, which has no slots to count against.
            assert self.buffers is not None
            metadata = self.buffers.metadata
        self._plan.commit_windows(
            self._sources(batch),
            _rows_of(batch, slots, certain),
            counts,
            self._errors,
            layer_metadata=metadata,
            written=self._written_directly if direct else self._written,
        )

    def _sources(self, batch: GpuWindowBatch) -> StagedSources:
        if batch.sources is not None:
            return batch.sources[self._number]
        if batch.copied:
            assert self.buffers is not None
            return self.buffers.sources
        if self._collected is None:
            self._collected = StagedSources(self.keys, self.values)
        else:
            self._collected.refill(self.keys, self.values)
        return self._collected

    def write_layer(self, batch: GpuWindowBatch, place: int, slots: Tensor, counts: Tensor) -> None:
        """Write one layer of a window that fell back before all layers were staged."""
        layer = self.layers[place]
        self._plan_of([layer], [layer.slot_row]).commit_windows(
            StagedSources([self.keys[place]], [self.values[place]]),
            _rows_of(batch, slots),
            counts,
            self._errors[place : place + 1],
        )


def _rows_of(batch: GpuWindowBatch, slots: Tensor, certain: int = 0) -> CommitRows:
    of_rows = (batch.row_request, batch.row_index, batch.source_rows)
    return CommitRows(slots, batch.tokens_per_request, *of_rows, certain)


def _laid_out(rows: Tensor, strides: tuple[int, ...]) -> Tensor:
    if rows.stride() == strides:
        return rows
    laid_out = torch.empty_strided(rows.shape, strides, dtype=rows.dtype, device=rows.device)
    return laid_out.copy_(rows)
