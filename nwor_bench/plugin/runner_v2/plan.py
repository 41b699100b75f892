"""How the window of each step is staged: by reference, by copy, by a graph's replay, or not at all.

By reference a window keeps the K/V of its whole step alive in every layer, which vLLM's memory
profile has not seen. So drafts beside a prefill are copied, and those of very large steps.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nwor_bench.plugin.layers import is_latent, is_sparse
from nwor_bench.plugin.runner_v2.batch import (
    DraftCounts,
    GpuWindowBatch,
    drafts_only,
    equal_drafts,
    set_slots,
    whole_step,
)
from nwor_bench.records.fallback_reasons import BREAKABLE_CUDA_GRAPHS

if TYPE_CHECKING:
    from nwor_bench.plugin.runner_v2.graph_sets import StagingGraphs

REFERENCED_PART = 64
"""By reference a window may keep 1/64 of the device's memory alive: 1.25 GB of 80.

vLLM has not seen it in its memory profile, and leaves about 8 % free by default. A step of 320
rows (64 requests with 4 drafts) of Llama-3.1-8B holds 126 MB.
"""


def memory_of(device: torch.device) -> int | None:
    """All of a CUDA device's memory in bytes; None for a CPU, which has no limit here."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def most_referenced_rows(layers: list[Any], itemsize: int, memory_bytes: int | None) -> int | None:
    """Most rows of a step that may stay alive by reference in every layer.

    A row's K and V are views into the layer's fused QKV, all of which they keep alive; those of a
    latent layer likewise.

    Args:
        layers: vLLM's attention layers of the target, on this rank.
        itemsize: bytes of an activation.
        memory_bytes: the device's memory; None: any number of rows.
    """
    if memory_bytes is None:
        return None
    row = sum(map(_held_elements, layers))
    return memory_bytes // REFERENCED_PART // (row * itemsize)


def _held_elements(layer: Any) -> int:
    """Elements of a row that holding its K and V keeps alive."""
    impl = layer.impl
    if not is_latent(layer):
        of_keys = (impl.num_heads + impl.num_kv_heads) * impl.head_size
        return int(of_keys + impl.num_kv_heads * layer.head_size_v)
    if is_sparse(layer):
        return int(impl.head_size)  # tensors of their own
    # The normalised latent; the rotary part is a view of what both projections down gave.
    return int(impl.kv_lora_rank + (impl.q_lora_rank or 0) + impl.head_size)


MOST_PLANS = 256
"""Plans of equal windows kept for the steps to come, by requests and length; the oldest goes."""

Planned = tuple[GpuWindowBatch | None, str | None]
"""A window, or the reason why this step is written directly."""


@dataclass
class WindowPlanner:
    """Turns steps into windows."""

    length: int
    """Rows of a full window, the certain first token included (k + 1)."""
    slots: int | slice
    """Index of the target layers' slots in the runner's (`SlotRows.chosen`)."""
    max_requests: int
    """Most requests of a step."""
    graphs: "StagingGraphs"
    """The full CUDA graphs that stage."""
    device: torch.device
    """Holds the rows' numbers."""
    copied: bool = False
    """Drafts are copied in every step, not only if they would not stay in place."""
    most_referenced: int | None = None
    """Most rows of a step whose K/V may be held by reference; None: any number."""
    breakable: bool = False
    """vLLM's piecewise CUDA graphs capture the write (`breaks_piecewise_graphs`)."""

    def __post_init__(self) -> None:
        self._copies: dict[tuple[int, int], GpuWindowBatch] = {}
        self._rows = torch.arange(self.max_requests * self.length, device=self.device)
        self._replays: dict[tuple[int, ...], GpuWindowBatch] = {}

    def plan(
        self,
        input_batch: Any,
        slot_mappings: Tensor,
        descriptor: Any,
        certain_at_once: bool = False,
    ) -> Planned:
        """The window of one step.

        Args:
            input_batch: vLLM's, with at least one request that has drafts scheduled.
            slot_mappings: [groups, num_tokens, padded] int64, vLLM's own buffer.
            descriptor: which CUDA graph will run the step; None without graphs.
            certain_at_once: another request may read the certain tokens in this very step
                (`may_read_this_step`), so they must not wait for the commit.
        """
        # By the names of vLLM's CUDAGraphMode.
        mode = "NONE" if descriptor is None else descriptor.cg_mode.name
        if mode == "FULL":
            if certain_at_once and not self.copied:
                return None, "prefix_hit_in_full_graph"  # its capture writes nothing at once
            return self._replay(input_batch, slot_mappings, descriptor)
        if mode == "PIECEWISE" and self.breakable:
            return None, BREAKABLE_CUDA_GRAPHS
        if input_batch.num_draft_tokens == 0:
            return None, "no_drafts"
        counts = DraftCounts(input_batch.num_draft_tokens_per_req, input_batch.num_tokens)
        slot_mapping = slot_mappings[self.slots]
        length = counts.uniform_length()
        copied = self.copied or mode == "PIECEWISE" or not self._may_hold(counts)
        if mode == "NONE" and length is not None and length <= self.length:
            if copied or certain_at_once:
                return self._copy(len(counts.per_request), length, slot_mapping), None
            rows = self._rows[: counts.num_tokens]
            slots = slot_mapping[..., : counts.num_tokens]
            return whole_step(counts, length, rows, slots), None
        batch = drafts_only(counts, input_batch.query_start_loc_np, slot_mapping, copied=copied)
        if batch.max_query_len > self.length:
            return None, "window_beside_prefill_of_its_request"
        return batch, None

    def _may_hold(self, counts: DraftCounts) -> bool:
        """True if the K/V of this whole step may stay alive in every layer until the commit."""
        most = self.most_referenced
        return counts.windows_alone and (most is None or counts.num_tokens <= most)

    def _copy(self, requests: int, length: int, slot_mapping: Tensor) -> GpuWindowBatch:
        """Equal windows outside a graph: their numbers are made once, only slots change."""
        ready = self._copies.get((requests, length))
        if ready is None:
            ready = equal_drafts(requests, length, slot_mapping.device, slot_mapping.shape[:-1])
            _keep(self._copies, (requests, length), ready)
        set_slots(ready, slot_mapping)
        return ready

    def _replay(self, input_batch: Any, slot_mappings: Tensor, descriptor: Any) -> Planned:
        """A captured window: made once for each number of requests, since nothing else varies.

        vLLM writes slots to the same buffer in every step, so a view of it stays right. A graph
        that copies reads slots from buffers of its own, which are filled before every replay.
        """
        requests, tokens = input_batch.num_reqs, descriptor.num_tokens
        length = descriptor.uniform_token_count
        if length is None or not 1 < length <= self.length:
            return None, "full_graph_of_another_shape"
        drafts = length - 1
        key = (tokens, requests, length, descriptor.num_active_loras)
        if input_batch.num_draft_tokens != requests * drafts:
            return None, "full_graph_with_uneven_windows"
        ready = self._replays.get(key)
        if ready is None:
            captured = self.graphs.shapes.get(descriptor)
            if captured is None:
                return None, self.graphs.unavailable or "full_graph_of_another_shape"
            ready = replace(captured, num_draft_tokens=(drafts,) * requests)
            if not captured.copied:
                ready = replace(ready, slots=slot_mappings[self.slots, :tokens])
            _keep(self._replays, key, ready)
        if ready.copied:
            set_slots(ready, slot_mappings[self.slots, :tokens])
        return ready, None


def _keep(plans: dict[Any, GpuWindowBatch], key: Any, plan: GpuWindowBatch) -> None:
    """Keep a plan, and drop the oldest: each holds tensors on the device."""
    if len(plans) >= MOST_PLANS:
        del plans[next(iter(plans))]
    plans[key] = plan


def may_read_this_step(scheduler_output: Any) -> bool:
    """True if a request starts, or starts again, on top of cached tokens.

    Only then can a step read what it writes: running requests read blocks of their own, and a
    block is looked up when a request starts. Whether the block is new is not asked, since with
    async scheduling the host does not know how far each request has come.

    Args:
        scheduler_output: vLLM's SchedulerOutput of the step.
    """
    if any(new.num_computed_tokens > 0 for new in scheduler_output.scheduled_new_reqs):
        return True
    # The V2 runner is given a preempted request as a new one, V1 as a resumed one.
    return bool(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
