"""Staging on a GPU: by reference where the step's K/V stay put, by copy where they do not.

Eagerly, and inside a full CUDA graph that was captured for staging, the K/V activations of a
step live until the commit, so they are only pointed at. Between piecewise CUDA graphs the next
piece overwrites them, so the drafts are copied into buffers; elsewhere too if that is asked for.
Either way one launch commits all layers, and nothing waits for the device: errors of kernels are
read late.
"""

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import nwor_kernels
from nwor_bench.plugin.runner_v2.batch import GpuWindowBatch
from nwor_bench.plugin.runner_v2.copy_buffers import CopyBuffers
from nwor_bench.plugin.runner_v2.held_values import HeldValues
from nwor_bench.plugin.runner_v2.persisting_l2 import PersistingL2
from nwor_bench.plugin.staging.layers import LayerCache, StagingUnavailable
from nwor_kernels.commit.plan import CommitPlan
from nwor_kernels.commit.sources import StagedSources

logger = logging.getLogger("vllm.nwor_bench")

Launch = Callable[[Tensor], None]
"""Launches a commit for these counts, [requests] int32 on the device."""

ACTIVATIONS_REUSED = "activations_reused"
"""Fallback reason where one layer's K/V overwrite another's; it then holds for every window."""

EVERY_ROW = 1 << 20
"""A count above any window's: a commit with it writes every staged row."""


class GpuStaging:
    """The target layers' K/V of the window in flight, and the one launch that commits them.

    Args:
        layers: the target layers, all of one shape and dtype.
        capacity: most draft tokens that a window can have (requests x k).
        scales: K and V scales of each layer, [1] or [kv_heads] float32; None for a cache that
            is not quantised.

    Raises:
        StagingUnavailable: layers of differing shapes or dtypes, which one launch cannot serve.
    """

    def __init__(
        self,
        layers: list[LayerCache],
        capacity: int,
        scales: tuple[list[Tensor], list[Tensor]] | None = None,
    ):
        if not layers:
            raise StagingUnavailable("no_target_layers")
        shapes = {(c.kv_cache.shape[1:], c.kv_cache.stride(), c.head_dim, c.dtype) for c in layers}
        if len(shapes) != 1:
            raise StagingUnavailable("layer_shapes_differ")
        self.layers = layers
        self.num_layers = len(layers)
        self.capacity = capacity
        self._scales = scales
        caches = [layer.kv_cache for layer in layers]
        try:
            self._plan = CommitPlan(caches, *(scales or (None, None)))
        except ValueError as refusal:
            logger.warning("nwor: windows are written directly: %s", refusal)
            # The reason is a label of a metric, so it holds none of the message's numbers.
            raise StagingUnavailable("commit:caches_do_not_fit") from refusal
        self._cache = caches[0]
        device = self._cache.device
        self._counts_of_all = torch.full((capacity,), EVERY_ROW, dtype=torch.int32, device=device)
        self.errors = torch.zeros(self.num_layers, dtype=torch.int32, device=device)
        self._batch: GpuWindowBatch | None = None
        self._through: Callable[[Launch, Tensor], None] | None = None
        self._bound: dict[tuple[StagedSources, int], Launch] = {}
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._held = HeldValues(self.num_layers)
        self._holds_layers = True  # so that this reset makes the lists
        self.reset()
        self._collected: StagedSources | None = None
        self._buffers: CopyBuffers | None = None
        self.l2: PersistingL2 | None = None

    @property
    def buffers(self) -> CopyBuffers:
        """Where copies go; allocated when first asked for."""
        if self._buffers is None:
            self._buffers = CopyBuffers.create(self.layers, self.capacity)
        return self._buffers

    def allocate(self) -> str | None:
        """Allocate what copies go to; the fallback reason where there is no memory for it.

        Called as staging is switched on, which is after vLLM has profiled its memory and taken
        its cache: requests x k rows a layer have to fit into what vLLM left free. Mode off never
        allocates it, and a window, in which vLLM may hold most of that memory, never has to.
        """
        try:
            self._buffers = self.buffers
        except torch.OutOfMemoryError:
            logger.exception(
                "nwor: no memory for the copies of %d draft tokens in %d layers; windows are "
                "written directly. Lower --gpu-memory-utilization or --max-num-seqs",
                self.capacity,
                self.num_layers,
            )
            return "copy_buffers:OutOfMemoryError"
        return None

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes of one token over all target layers."""
        cache = self._cache
        return self.num_layers * cache.shape[1] * cache.shape[3] * cache.element_size()

    def open(self, batch: GpuWindowBatch) -> None:
        """Set the window that the next stage and commit belong to."""
        self._batch = batch
        self._through = None

    def validate_in_commit(self, through: Callable[[Launch, Tensor], None]) -> None:
        """Let this window's commit decide what was accepted.

        It is then given vLLM's `num_sampled`, and `through` launches it (perhaps as a graph).
        """
        self._through = through

    def reset(self) -> None:
        """Release the last window's K/V; a window that a graph replayed holds nothing here.

        The commit may still be running. Its stream is the one that the K/V were allocated on, so
        PyTorch gives their memory only to kernels that run after it.
        """
        self._batch = self._through = None
        if self._holds_layers:
            self.keys = [self._cache] * self.num_layers
            self.values = [self._cache] * self.num_layers
            self._held.clear()
            self._holds_layers = False

    def stage(self, layer: int, key: Tensor, value: Tensor, rows: Tensor) -> str:
        """Point at one layer's K/V, or copy its drafts; returns '', or why that failed."""
        batch = self._batch
        assert batch is not None
        self._holds_layers = True
        if not batch.copied:
            held = self._held.take(layer, key, value)
            if held is None:
                return ACTIVATIONS_REUSED
            self.keys[layer], self.values[layer] = held
            return ""
        buffers = self.buffers
        if layer == 0 and self.l2 is not None:
            self.l2.cover_current_stream()
        to_key, to_value = buffers.keys[layer], buffers.values[layer]
        nwor_kernels.stage_kv_cache(key, value, rows, to_key, to_value, buffers.metadata[layer])
        self.keys[layer], self.values[layer] = to_key, to_value
        return ""

    def commit(self, slots: Tensor, accepted: Tensor) -> str:
        """Write the accepted rows of all layers.

        `accepted` is [requests] int32, accepted drafts of each request; vLLM's `num_sampled`,
        which counts the certain first token too, where the commit decides.
        """
        assert self._batch is not None
        certain = self._batch.certain
        if self._through is None:
            self._launch(slots, certain)(accepted)
        else:
            self._through(self._launch(slots, certain - 1), accepted)
        return ""

    def warm_up(self, batch: GpuWindowBatch) -> None:
        """Compile the commit of windows of this shape, so that no window waits for it.

        `batch` is captured and all padding (slots of -1): nothing is written.
        """
        self.open(batch)
        requests = len(batch.num_draft_tokens)
        for certain in (batch.certain - 1, batch.certain):
            self._launch(batch.slots, certain)(self._counts_of_all[:requests])
        self._bound.clear()

    def _launch(self, slots: Tensor, certain: int) -> Launch:
        """The launch that commits the window in flight, given its counts."""
        batch = self._batch
        assert batch is not None
        if batch.sources is None or batch.tokens_per_request is None:
            return partial(self._commit, slots, certain=certain)
        key = (batch.sources, certain)  # a capture's slots keep their place and number
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bound[key] = self._plan.bind(
                batch.sources,
                slots,
                self.errors,
                certain=certain,
                tokens_per_request=batch.tokens_per_request,
            )
        return bound

    def write_directly(self, layers: list[int], slots: Tensor) -> None:
        """Write every staged row, as stock vLLM would have done at once."""
        if len(layers) == self.num_layers:
            self._commit(slots, self._counts_of_all, certain=0)
            return
        for layer in layers:
            self._write_layer(layer, slots)

    def _commit(self, slots: Tensor, counts: Tensor, certain: int) -> None:
        batch = self._batch
        assert batch is not None
        self._plan.commit_windows(
            self._sources(batch),
            slots,
            counts,
            self.errors,
            certain=certain,
            tokens_per_request=batch.tokens_per_request,
            row_request=batch.row_request,
            row_index=batch.row_index,
            rows=None if batch.copied or batch.tokens_per_request else batch.rows,
            # A captured graph stages its padding too, which has no slots to count against.
            layer_metadata=(
                self.buffers.metadata if batch.copied and batch.sources is None else None
            ),
        )

    def _sources(self, batch: GpuWindowBatch) -> StagedSources:
        if batch.sources is not None:
            return batch.sources
        if batch.copied:
            return self.buffers.sources
        if self._collected is None:
            self._collected = StagedSources(self.keys, self.values)
        else:
            self._collected.refill(self.keys, self.values)
        return self._collected

    def _write_layer(self, layer: int, slots: Tensor) -> None:
        """One layer of a window that fell back before all layers were staged."""
        batch, cache = self._batch, self.layers[layer].kv_cache
        assert batch is not None
        scales = ([column[layer]] for column in self._scales) if self._scales else (None, None)
        plan = CommitPlan([cache], *scales)
        plan.commit_windows(
            StagedSources([self.keys[layer]], [self.values[layer]]),
            slots,
            self._counts_of_all,
            self.errors[layer : layer + 1],
            tokens_per_request=batch.tokens_per_request,
            row_request=batch.row_request,
            row_index=batch.row_index,
            rows=None if batch.copied or batch.tokens_per_request else batch.rows,
        )
