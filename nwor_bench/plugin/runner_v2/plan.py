"""From vLLM's V2 input batch to the window that a GPU stages.

Three shapes. A whole step: every request has a window of equal length, nothing is written until
the commit, and no index is needed (`whole_step`); staged by copy, the first token of each is
written at once (`equal_drafts`). Anything else: only drafts are staged, the other tokens are
written at once, and the device is told which rows are whose (`drafts_only`).

By reference a window keeps the K/V of its whole step alive in every layer, which vLLM's memory
profile has not seen. So drafts beside a prefill are copied, and those of very large steps.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nwor_bench.plugin.runner_v2.staging import GpuWindowBatch

if TYPE_CHECKING:  # importing it loads vLLM, which takes seconds and nothing here needs
    from nwor_bench.plugin.runner_v2.graph_sets import StagingGraphs


MOST_PLANS = 256
"""Plans of equal windows kept for the steps to come, by requests and length; the oldest goes."""


@dataclass(frozen=True)
class DraftCounts:
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

    @property
    def windows_alone(self) -> bool:
        """True for a step without prefill: each request runs its drafts and the token before."""
        return self.num_tokens == self.total + len(self.per_request)


Planned = tuple[GpuWindowBatch | None, str | None]
"""A window, or the reason why this step is written directly."""


class WindowPlanner:
    """Turns steps into windows.

    Args:
        length: rows of a full window, the certain first token included (k + 1).
        group: number of the target layers' KV-cache group.
        max_requests: most requests of a step.
        graphs: the full CUDA graphs that stage.
        device: where the rows' numbers are kept.
        copied: drafts are copied in every step, not only where they would not stay put.
        most_referenced: most rows of a step whose K/V may be held by reference; None: any number.
    """

    def __init__(
        self,
        length: int,
        group: int,
        max_requests: int,
        graphs: "StagingGraphs",
        device: torch.device,
        copied: bool = False,
        most_referenced: int | None = None,
    ):
        self._length = length
        self._group = group
        self._graphs = graphs
        self._copied = copied
        self._most_referenced = most_referenced
        self._copies: dict[tuple[int, int], GpuWindowBatch] = {}
        self._rows = torch.arange(max_requests * length, device=device)
        self._replays: dict[tuple[int, int], GpuWindowBatch] = {}

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
            if certain_at_once and not self._copied:
                return None, "prefix_hit_in_full_graph"  # its capture writes nothing at once
            return self._replay(input_batch, slot_mappings, descriptor)
        if input_batch.num_draft_tokens == 0:
            return None, "no_drafts"
        counts = DraftCounts(input_batch.num_draft_tokens_per_req, input_batch.num_tokens)
        slot_mapping = slot_mappings[self._group]
        length = counts.uniform_length()
        copied = self._copied or mode == "PIECEWISE" or not self._may_hold(counts)
        if mode == "NONE" and length is not None and length <= self._length:
            if copied or certain_at_once:
                return self._copy(len(counts.per_request), length, slot_mapping), None
            rows = self._rows[: counts.num_tokens]
            return whole_step(counts, length, rows, slot_mapping[: counts.num_tokens]), None
        batch = drafts_only(counts, input_batch.query_start_loc_np, slot_mapping, copied=copied)
        if batch.max_query_len > self._length:
            return None, "window_beside_prefill_of_its_request"
        return batch, None

    def _may_hold(self, counts: DraftCounts) -> bool:
        """May the K/V of this whole step stay alive, in every layer, until the commit?"""
        most = self._most_referenced
        return counts.windows_alone and (most is None or counts.num_tokens <= most)

    def _copy(self, requests: int, length: int, slot_mapping: Tensor) -> GpuWindowBatch:
        """Equal windows outside a graph: their numbers are made once, only slots change."""
        ready = self._copies.get((requests, length))
        if ready is None:
            ready = equal_drafts(requests, length, slot_mapping.device)
            _keep(self._copies, (requests, length), ready)
        set_slots(ready, slot_mapping)
        return ready

    def _replay(self, input_batch: Any, slot_mappings: Tensor, descriptor: Any) -> Planned:
        """A captured window: made once for each number of requests, since nothing else varies.

        vLLM writes slots to the same buffer in every step, so a view of it stays right. A graph
        that copies reads slots from buffers of its own, which are filled before every replay.
        """
        requests, tokens = input_batch.num_reqs, descriptor.num_tokens
        drafts = self._length - 1
        if descriptor.uniform_token_count != self._length:
            return None, "full_graph_of_another_shape"
        if input_batch.num_draft_tokens != requests * drafts:
            return None, "full_graph_with_uneven_windows"
        ready = self._replays.get((tokens, requests))
        if ready is None:
            captured = self._graphs.shapes.get(descriptor)
            if captured is None:
                return None, self._graphs.unavailable or "full_graph_of_another_shape"
            ready = replace(captured, num_draft_tokens=(drafts,) * requests)
            if not captured.copied:
                ready = replace(ready, slots=slot_mappings[self._group, :tokens])
            _keep(self._replays, (tokens, requests), ready)
        if ready.copied:
            set_slots(ready, slot_mappings[self._group, :tokens])
        return ready, None


def _keep(
    plans: dict[tuple[int, int], GpuWindowBatch], key: tuple[int, int], plan: GpuWindowBatch
) -> None:
    """Keep a plan, and drop the oldest: each holds tensors on the device."""
    if len(plans) >= MOST_PLANS:
        del plans[next(iter(plans))]
    plans[key] = plan


def drafts_only(
    counts: DraftCounts, query_start_loc: np.ndarray, slot_mapping: Tensor, *, copied: bool
) -> GpuWindowBatch:
    """Plan a step that stages its drafts alone.

    Args:
        counts: drafts of each request.
        query_start_loc: [requests + 1] int32 on the host; a request's drafts are its last rows.
        slot_mapping: [num_tokens, padded] int64, the target layers' slots.
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
    direct_slots[batch_rows] = -1
    return GpuWindowBatch(
        num_draft_tokens=tuple(drafts.tolist()),
        rows=batch_rows,
        slots=slot_mapping[batch_rows],
        direct_slots=direct_slots,
        max_query_len=int(lengths[drafts > 0].max()),
        staged_start=packed[3],
        staged_end=packed[4],
        row_request=packed[1],
        row_index=packed[2],
        copied=copied,
    )


def whole_step(
    counts: DraftCounts, length: int, rows: Tensor, slot_mapping: Tensor
) -> GpuWindowBatch:
    """Plan a step of equal windows, all of whose rows wait for the commit.

    Args:
        counts: drafts of each request.
        length: rows of each window, the certain first token included.
        rows: [num_tokens] int64, 0, 1, 2, ...
        slot_mapping: [num_tokens] int64, the target layers' slots; padding is -1.
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


def equal_drafts(requests: int, length: int, device: torch.device) -> GpuWindowBatch:
    """Plan steps of equal windows whose drafts are copied, and whose first tokens are written.

    Made once and used again, in a captured graph too: nothing in it moves, and `set_slots` fills
    in each step's slots, which are padding until then.

    Args:
        requests: windows of the step.
        length: rows of each window, the certain first token included.
        device: where the tensors are kept.
    """
    drafts = length - 1
    step = torch.arange(requests * length, device=device).view(requests, length)
    bounds = torch.arange(requests + 1, dtype=torch.int32, device=device) * drafts
    return GpuWindowBatch(
        num_draft_tokens=(drafts,) * requests,
        rows=step[:, 1:].flatten(),
        slots=torch.full_like(step[:, 1:], -1).flatten(),
        direct_slots=torch.full_like(step, -1).flatten(),
        max_query_len=length,
        staged_start=bounds[:-1],
        staged_end=bounds[1:],
        tokens_per_request=drafts,
        copied=True,
    )


def set_slots(batch: GpuWindowBatch, slot_mapping: Tensor) -> None:
    """Fill in the slots of a step planned by `equal_drafts`; two small copies on the device.

    Args:
        batch: the plan.
        slot_mapping: [num_tokens or more] int64, the target layers' slots; padding is -1.
    """
    assert batch.direct_slots is not None
    length = batch.max_query_len
    step = slot_mapping[: batch.direct_slots.numel()].view(-1, length)
    batch.slots.view(-1, length - 1).copy_(step[:, 1:])
    batch.direct_slots.view(-1, length)[:, 0].copy_(step[:, 0])


def _to_device(columns: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """Several small int32 columns in one copy that does not wait."""
    sizes = [len(column) for column in columns]
    packed = torch.from_numpy(np.concatenate(columns).astype(np.int32, copy=False))
    if device.type == "cuda":
        packed = packed.pin_memory()
    return list(torch.split(packed.to(device, non_blocking=True), sizes))
