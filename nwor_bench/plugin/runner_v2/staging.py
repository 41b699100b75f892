"""Staging on a GPU: by reference if the step's K/V stay in place, otherwise by copy.

Eagerly, and inside a full CUDA graph that was captured for staging, the K/V activations of a
step live until the commit, so staging only keeps pointers to them. Between piecewise CUDA graphs
the next piece overwrites them, so the drafts are copied into buffers; elsewhere too on request.
Either way one launch commits all layers whose caches have one shape (`LayerSet`), and nothing waits
for the device: errors of kernels are read late.

A launch writes all of its layers or none. With several shapes the launches decide separately: if
one refuses, which only a fault of ours can cause, the others have written. That ends staging, as a
refusal of a single launch does (`DeviceRefusals`).

A reference keeps a tensor's memory from being given to another, but not from being written to:
code compiled as a whole gives one layer's buffers to the next. So the first window of each number
of rows is held by copy while its layers' addresses are compared (`HeldValues`); later windows are
held by reference only if all addresses differed.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nwor_bench.plugin.layers import LayerCache, StagedLayers
from nwor_bench.plugin.runner_v2.layer_set import CommitLaunch, CopyBuffers, HeldValues, LayerSet
from nwor_bench.plugin.runner_v2.plan import GpuWindowBatch
from nwor_bench.plugin.runner_v2.stock_update import UpdateCall
from nwor_bench.records.fallback_reasons import Fault, fault_of
from nwor_kernels.commit.plan import StagedSources
from nwor_kernels.commit.with_update import RequestStates, Update
from nwor_kernels.metadata import error_names
from nwor_kernels.stage.kernel import stage_kv_cache_triton

logger = logging.getLogger("vllm.nwor_bench")


CACHE_LINE = 32
"""int32 of a line in the L2 cache: a counter a line, else the layers' additions queue up."""

EVERY_ROW = 1 << 20
"""A count above any window's: a commit with it writes every staged row."""


class GpuStaging(StagedLayers):
    """The target layers' K/V of the window in flight, and the launches that commit them.

    Args:
        capacity: most draft tokens that a window can have (requests x k).
        grouped: the target layers lie in several KV-cache groups, so slots are [groups, N].

    Raises:
        StagingUnavailable: no layers, or caches that a commit cannot write.
    """

    def __init__(self, layers: list[LayerCache], capacity: int, grouped: bool = False):
        super().__init__(layers, capacity)
        device = layers[0].kv_cache.device
        self._counts_of_all = torch.full((capacity,), EVERY_ROW, dtype=torch.int32, device=device)
        self.errors = torch.zeros(self.num_layers, dtype=torch.int32, device=device)
        shape = (2, self.num_layers, CACHE_LINE)
        written = torch.zeros(shape, dtype=torch.int32, device=device)[..., 0]
        self.written = written[0]
        """[layers] int32: rows that commits stored, modulo 2**32; direct writes are left out."""
        self.sets: list[LayerSet] = []
        first = 0
        for number, alike in enumerate(self.alike):
            part = slice(first, first + len(alike))
            counters = self.errors[part], written[:, part]
            self.sets.append(LayerSet(number, first, alike, *counters, grouped))
            first = part.stop
        self._places = [(s, place) for s in self.sets for place in range(len(s.layers))]
        self._batch: GpuWindowBatch | None = None
        self._through: Callable[[CommitLaunch, Tensor], None] | None = None
        self._update: tuple[Any, UpdateCall] | None = None
        self._states: RequestStates | None = None
        self._held = HeldValues(self.num_layers)
        self._holds_layers = False
        self._first_layer = 0
        self._memory: Tensor | None = None

    def place(self, layer: int) -> tuple[LayerSet, int]:
        """The set that this layer belongs to, and its place in it."""
        return self._places[layer]

    @property
    def copies(self) -> Tensor:
        """[bytes] uint8: the buffers for copies of all sets, made at the first use."""
        if self._memory is None:
            sizes = [CopyBuffers.num_bytes(s.layers, self.capacity) for s in self.sets]
            memory = torch.empty(sum(sizes), dtype=torch.uint8, device=self.errors.device)
            for layer_set, part in zip(self.sets, torch.split(memory, sizes), strict=True):
                layer_set.buffers = CopyBuffers.create(layer_set.layers, self.capacity, part)
            self._memory = memory
        return self._memory

    def allocate(self) -> str | None:
        """Allocate the buffers of copies; the fallback reason if there is no memory.

        Called as staging is switched on, after vLLM has profiled its memory and taken its cache, so
        that no window has to allocate. Mode off never allocates it.
        """
        try:
            _ = self.copies
        except torch.OutOfMemoryError:
            logger.exception(
                "nwor: no memory for the copies of %d draft tokens in %d layers; windows are "
                "written directly. Lower --gpu-memory-utilization or --max-num-seqs",
                self.capacity,
                self.num_layers,
            )
            return "copy_buffers:OutOfMemoryError"
        return None

    def open(self, batch: GpuWindowBatch) -> None:
        """Set the window that the next stage and commit belong to."""
        self._batch = batch
        self._through = self._update = None

    def validate_in_commit(self, through: Callable[[CommitLaunch, Tensor], None]) -> None:
        """Let `through` launch this window's commit, which decides itself, by `num_sampled`."""
        self._through = through

    def update_in_commit(self, kernel: Any, call: UpdateCall) -> None:
        """Let this captured window's commit run vLLM's update too; it decides itself.

        Args:
            kernel: the update's.
        """
        self._update = kernel, call

    def reset(self) -> None:
        """Release the last window's K/V; a window that a graph replayed holds nothing here.

        The commit may still be running. Its stream is the one that the K/V were allocated on, so
        PyTorch gives their memory only to kernels that run after it.
        """
        self._batch = self._through = self._update = None
        if self._holds_layers:
            for layer_set in self.sets:
                layer_set.release()
            self._held.clear()
            self._holds_layers = False

    def stage(self, layer: int, key: Tensor, value: Tensor, rows: Tensor) -> str:
        """Point at one layer's K/V, or copy its drafts; returns '', or why that failed."""
        batch = self._batch
        assert batch is not None
        if not self._holds_layers:
            self._holds_layers, self._first_layer = True, layer
        elif layer == self._first_layer:  # a capture runs its forward again
            for layer_set in self.sets:
                layer_set.begin_forward()
        of_set, place = self._places[layer]
        if not batch.copied:
            held = self._held.take(layer, *of_set.laid_out(key, value))
            if held is None:
                return Fault.ACTIVATIONS_REUSED.value
            of_set.hold(place, *held)
            return ""
        _ = self.copies
        buffers = of_set.buffers
        assert buffers is not None
        to_key, to_value = buffers.keys[place], buffers.values[place]
        stage_kv_cache_triton(key, value, rows, to_key, to_value, buffers.metadata[place])
        of_set.hold(place, to_key, to_value)
        return ""

    def captured_sources(self) -> tuple[StagedSources, ...]:
        """Each set's addresses of the K/V held now (see `LayerSet.captured_sources`)."""
        return tuple(layer_set.captured_sources() for layer_set in self.sets)

    def commit(self, slots: Tensor, accepted: Tensor) -> str:
        """Write the accepted rows of all layers.

        `accepted` is [requests] int32, accepted drafts of each request; vLLM's `num_sampled`,
        which counts the certain first token too, if the commit decides.
        """
        assert self._batch is not None
        certain = self._batch.certain
        if self._update is not None:
            kernel, call = self._update
            _, update = self.bind_update(self._batch, kernel, call)
            update(*call.of_step())
        elif self._through is None:
            self._launch(slots, certain)(accepted)
        else:
            self._through(self._launch(slots, certain - 1), accepted)
        return ""

    def warm_up(self, batch: GpuWindowBatch) -> None:
        """Compile the commit of a captured shape, all of it padding: nothing is written."""
        self.open(batch)
        requests = len(batch.num_draft_tokens)
        for certain in (batch.certain - 1, batch.certain):
            self._launch(batch.slots, certain)(self._counts_of_all[:requests])
        self.forget_launches()

    def forget_launches(self) -> None:
        """Drop the bound launches of a warm-up, whose windows never come."""
        for layer_set in self.sets:
            layer_set.forget_launches()

    def _launch(self, slots: Tensor, certain: int) -> CommitLaunch:
        batch = self._batch
        assert batch is not None
        launches = [layer_set.launch(batch, slots, certain) for layer_set in self.sets]
        if len(launches) == 1:
            return launches[0]

        def launch_all(counts: Tensor) -> None:
            for launch in launches:
                launch(counts)

        return launch_all

    def bind_update(
        self, batch: GpuWindowBatch, kernel: Any, call: UpdateCall
    ) -> tuple[RequestStates, Update]:
        """The launch that commits a captured window and runs vLLM's update, and what it changes.

        Args:
            kernel: the update's.
        """
        self._states = states = call.states(self._states)
        certain = batch.certain - 1  # `num_sampled` counts the first row
        first, *others = self.sets
        update = first.launch_with_update(batch, batch.slots, certain, kernel, states)
        if not others:
            return states, update
        launches = [layer_set.launch(batch, batch.slots, certain) for layer_set in others]

        def update_last(idx_mapping: Tensor, sampled: Tensor, counts: Tensor, *more: Any) -> None:
            for launch in launches:
                launch(counts)
            update(idx_mapping, sampled, counts, *more)

        return states, update_last

    def write_directly(self, layers: list[int], slots: Tensor) -> None:
        """Write every staged row of these layers, as stock vLLM would have done at once."""
        batch, staged = self._batch, set(layers)
        assert batch is not None
        for layer_set in self.sets:
            if staged.issuperset(layer_set.numbers):
                layer_set.commit(batch, slots, self._counts_of_all, direct=True)
                continue
            for place, number in enumerate(layer_set.numbers):
                if number in staged:
                    layer_set.write_layer(batch, place, slots, self._counts_of_all)


WHAT_IS_LOST = (
    "nwor: the device refused a commit (%s, in %d of %d layers). The accepted tokens of that "
    "window are not in the KV cache, though vLLM goes on as if they were. Answers since the last "
    "reading of the counts may be wrong, and so may later answers that hit these blocks in the "
    "prefix cache. Every window is written directly from now on. Restart the server, and report "
    "this: no request can cause it, only a fault of nwor-bench"
)


class DeviceRefusals:
    """Commits of one worker that were refused, and whether it still stages.

    Args:
        errors: [layers] int32 on the device, into which commits or their ERROR_* flags.
    """

    def __init__(self, errors: Tensor):
        self.errors = errors
        self.reason: str | None = None
        """The fallback reason of the first refusal; it is kept for as long as the worker runs."""
        self.stopped = False
        """True from the window on with which all ranks stopped staging."""
        self._unread: dict[str, None] = {}

    def note(self, flags: Sequence[int]) -> None:
        """Take the flags as they were read, [layers]."""
        if not any(flags):
            return
        self.errors.zero_()  # in the stream's order: behind every commit that was read
        together = 0
        for layer, flag in enumerate(flags):
            together |= flag
            if flag:
                self._unread[f"layer {layer}: {error_names(flag)}"] = None
        if self.reason is None:
            self.reason = f"{Fault.DEVICE_REFUSED}:{error_names(together)}"
            layers = sum(map(bool, flags))
            logger.error(WHAT_IS_LOST, error_names(together), layers, len(flags))

    def take(self) -> list[str]:
        """Refusals since the last call, for a run's drain; waits for the device."""
        self.note(self.errors.tolist())
        unread, self._unread = list(self._unread), {}
        return unread

    def settle(self, reason: str | None) -> None:
        """Take the ranks' common reason for a window; a refusal in it stops staging."""
        if reason is None or fault_of(reason) is not Fault.DEVICE_REFUSED or self.stopped:
            return
        self.stopped = True
        if self.reason is None:
            logger.error("nwor: no window is staged from now on: %s", reason)
