"""Windows on a GPU: how the draft tokens of a step are staged, or why they are not.

By reference: a window points at the K/V of its step, which keeps those of every layer alive; vLLM's
memory profile has not seen that. So drafts beside a prefill are copied, and those of large steps. A
full CUDA graph stages as it was captured.

`whole_step`: every request has a window of equal length; nothing is written until the commit, and
no index is needed. `equal_drafts`: the same by copy; the first token of each window is written at
once. `drafts_only`: any other step; only drafts are staged, the other tokens are written at once,
and the device is given the request of each row.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from nwor_bench.plugin.layers import is_latent
from nwor_bench.plugin.states import StateTables
from nwor_bench.plugin.window import WindowBatch
from nwor_bench.records.fallback_reasons import BREAKABLE_CUDA_GRAPHS
from nwor_bench.records.window_order import is_windows
from nwor_kernels.commit.plan import StagedSources


@dataclass(frozen=True)
class GpuWindowBatch(WindowBatch):
    """A window on a GPU."""

    max_query_len: int = 1
    """Most query rows of a request with a window."""
    staged_start: Tensor | None = None
    """[requests] int32, each request's first staged row in the source; None: the whole step is
    staged, and the step's `query_start_loc` holds it."""
    staged_end: Tensor | None = None
    """[requests] int32, the row after each request's last staged one; None likewise."""
    tokens_per_request: int | None = None
    """Staged rows of each request if the step is nothing but equal windows; else None, and
    `row_request` and `row_index` place each row."""
    certain: int = 0
    """Rows of each request that are staged before its first draft: 1 if the whole step is
    staged, 0 if the first token is written at once."""
    row_request: Tensor | None = None
    """[N] int32, the request of each staged row."""
    row_index: Tensor | None = None
    """[N] int32, the place of each staged row in its request's window."""
    sources: tuple[StagedSources, ...] | None = None
    """Addresses of a captured graph's K/V in each layer set; None: collected layer by layer."""
    copied: bool = False
    """True if the rows' K/V are copied into buffers, one after the other."""
    states: StateTables | str | None = None
    """Where a captured graph's recurrent states lie, or why stock writes them."""
    path: str = ""
    """How a captured graph runs it, for `WindowRecord.path`."""

    @cached_property
    def commit_shape(self) -> tuple[str, int, int, Hashable]:
        """Name of the commit's launch for a validator: rows, those of each request, and sources.

        Two captured graphs of as many rows hold their K/V at different addresses: vLLM captures
        one graph without a LoRA adapter and others with some.
        """
        return "commit", self.slots.shape[-1], self.tokens_per_request or 1, self.sources

    @property
    def size(self) -> tuple[int, int]:
        """Requests, and most rows of one."""
        return len(self.num_draft_tokens), self.max_query_len

    @property
    def source_rows(self) -> Tensor | None:
        """[N] int64, each staged row's place in the tensors held; None: row i is the i-th."""
        return None if self.copied or self.tokens_per_request else self.rows

    def fits(self, accepted: Tensor) -> bool:
        """`accepted` holds one count a request, not a mask."""
        shape = accepted.shape
        return len(shape) == 1 and shape[0] >= len(self.num_draft_tokens)


@dataclass(frozen=True)
class StepDrafts:
    """Drafts of each request of a step: `per_request` [requests] int32 on the host."""

    per_request: np.ndarray
    num_tokens: int

    @property
    def total(self) -> int:
        """Draft tokens of the step."""
        return int(self.per_request.sum())

    def uniform_length(self) -> int | None:
        """Rows of each window if the step is nothing but equal windows, else None."""
        drafts = int(self.per_request[0])
        rows = drafts + 1
        if drafts == 0 or rows * len(self.per_request) != self.num_tokens:
            return None
        return rows if bool((self.per_request == drafts).all()) else None


def drafts_only(
    counts: StepDrafts, query_start_loc: np.ndarray, slot_mapping: Tensor, *, copied: bool
) -> GpuWindowBatch:
    """Plan a step that stages only its drafts.

    Args:
        query_start_loc: [requests + 1] int32 on the host; a request's drafts are its last rows.
        slot_mapping: [num_tokens, padded] int64, the target layers' slots; [groups, num_tokens,
            padded] for several KV-cache groups.
        copied: drafts go to staging buffers, else their place in the step's K/V is used.
    """
    drafts = counts.per_request
    requests = len(drafts)
    ends = query_start_loc[1 : requests + 1]
    row_request = np.repeat(np.arange(requests, dtype=np.int32), drafts)
    first_staged = np.concatenate(([0], np.cumsum(drafts)))[:-1]
    row_index = np.arange(len(row_request), dtype=np.int32) - first_staged[row_request]
    rows = (ends - drafts)[row_request] + row_index
    starts = first_staged if copied else ends - drafts
    lengths = ends - query_start_loc[:requests]
    packed = _to_device(
        [rows, row_request, row_index, starts, starts + drafts], slot_mapping.device
    )
    batch_rows = packed[0].long()
    direct_slots = slot_mapping.clone()
    direct_slots[..., batch_rows] = -1
    return GpuWindowBatch(
        num_draft_tokens=tuple(drafts.tolist()),
        rows=batch_rows,
        slots=slot_mapping[..., batch_rows],
        direct_slots=direct_slots,
        max_query_len=int(lengths[drafts > 0].max()),
        staged_start=packed[3],
        staged_end=packed[4],
        row_request=packed[1],
        row_index=packed[2],
        copied=copied,
    )


def whole_step(
    counts: StepDrafts, length: int, rows: Tensor, slot_mapping: Tensor
) -> GpuWindowBatch:
    """Plan a step of equal windows, all of whose rows wait for the commit.

    Args:
        length: rows of each window, the certain first token included.
        rows: [num_tokens] int64, 0, 1, 2, ...
        slot_mapping: [num_tokens] or [groups, num_tokens] int64, the target layers' slots; padding
            is -1.
    """
    return GpuWindowBatch(
        num_draft_tokens=tuple(counts.per_request.tolist()),
        rows=rows,
        slots=slot_mapping,
        direct_slots=None,
        max_query_len=length,
        tokens_per_request=length,
        certain=1,
    )


def equal_drafts(
    requests: int, length: int, device: torch.device, groups: tuple[int, ...] = ()
) -> GpuWindowBatch:
    """Plan steps of equal windows whose drafts are copied, and whose first tokens are written.

    Made once and used again, in a captured graph too: nothing in it moves, and `set_slots` fills
    in each step's slots, which are padding until then.

    Args:
        length: rows of each window, the certain first token included.
        groups: leading dimension of slots that are [groups, N]; () for one KV-cache group.
    """
    drafts = length - 1
    step = torch.arange(requests * length, device=device).view(requests, length)
    bounds = torch.arange(requests + 1, dtype=torch.int32, device=device) * drafts
    return GpuWindowBatch(
        num_draft_tokens=(drafts,) * requests,
        rows=step[:, 1:].flatten(),
        slots=torch.full((*groups, requests * drafts), -1, device=device),
        direct_slots=torch.full((*groups, requests * length), -1, device=device),
        max_query_len=length,
        staged_start=bounds[:-1],
        staged_end=bounds[1:],
        tokens_per_request=drafts,
        copied=True,
    )


def set_slots(batch: GpuWindowBatch, slot_mapping: Tensor) -> None:
    """Fill in the slots of a step planned by `equal_drafts`; two small copies on the device.

    Args:
        slot_mapping: [num_tokens or more] or [groups, num_tokens or more] int64, the target layers'
            slots; padding is -1.
    """
    direct = batch.direct_slots
    assert direct is not None
    length = batch.max_query_len
    groups = direct.shape[:-1]
    step = slot_mapping[..., : direct.shape[-1]].view(*groups, -1, length)
    batch.slots.view(*groups, -1, length - 1).copy_(step[..., 1:])
    direct.view(*groups, -1, length)[..., 0].copy_(step[..., 0])


def _to_device(columns: list[np.ndarray], device: torch.device) -> list[Tensor]:
    sizes = [len(column) for column in columns]
    packed = torch.from_numpy(np.concatenate(columns).astype(np.int32, copy=False))
    if device.type == "cuda":
        packed = packed.pin_memory()
    return list(torch.split(packed.to(device, non_blocking=True), sizes))


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
        itemsize: bytes of an activation.
        memory_bytes: the device's memory; None: any number of rows.
    """
    if memory_bytes is None:
        return None
    row = sum(map(_held_elements, layers))
    return memory_bytes // REFERENCED_PART // (row * itemsize)


def _held_elements(layer: Any) -> int:
    impl = layer.impl
    if not is_latent(layer):
        of_keys = (impl.num_heads + impl.num_kv_heads) * impl.head_size
        return int(of_keys + impl.num_kv_heads * layer.head_size_v)
    # The normalised latent; the rotary part is a view of the output of both projections down.
    return int(impl.kv_lora_rank + (impl.q_lora_rank or 0) + impl.head_size)


MAX_PLANS = 256
"""Plans of equal windows kept for the steps to come, by requests and length; the oldest goes."""

Planned = tuple[GpuWindowBatch | None, str | None]
"""A window, or the reason why this step is written directly."""


class CapturedWindows(Protocol):
    """Full CUDA graphs that stage (`StagingGraphs`)."""

    shapes: dict[Any, GpuWindowBatch]
    unavailable: str | None

    def why_direct(self, descriptor: Any, input_batch: Any) -> str | None:
        """Why this step's windows are left to stock's graph; None if they are staged."""


@dataclass
class WindowPlanner:
    """Plans the window of each step."""

    length: int
    """Rows of a full window, the certain first token included (k + 1)."""
    slots: int | slice
    """Index of the target layers' slots in the runner's (`SlotRows.chosen`)."""
    max_requests: int
    """Most requests of a step."""
    graphs: CapturedWindows
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
        counts = StepDrafts(input_batch.num_draft_tokens_per_req, input_batch.num_tokens)
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

    def _may_hold(self, counts: StepDrafts) -> bool:
        """True if the K/V of this whole step may stay alive in every layer until the commit."""
        most = self.most_referenced
        alone = is_windows(counts.num_tokens, counts.total, len(counts.per_request))
        return alone and (most is None or counts.num_tokens <= most)

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
        slower = self.graphs.why_direct(descriptor, input_batch)
        if slower is not None:
            return None, slower
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
    if len(plans) >= MAX_PLANS:
        del plans[next(iter(plans))]
    plans[key] = plan


def may_read_this_step(scheduler_output: Any) -> bool:
    """True if a request starts, or starts again, on top of cached tokens.

    Only then can a step read what it writes: running requests read blocks of their own, and a
    block is looked up when a request starts. Whether the block is new is not asked, since with
    async scheduling the host does not know how far each request has come.
    """
    if any(new.num_computed_tokens > 0 for new in scheduler_output.scheduled_new_reqs):
        return True
    # The V2 runner gets a preempted request as a new one, V1 as a resumed one.
    return bool(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
