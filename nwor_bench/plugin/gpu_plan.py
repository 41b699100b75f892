"""From vLLM's V2 input batch to the window that a GPU stages.

Two shapes. A whole step: every request has a window of equal length, nothing is written until
the commit, and no index is needed (`whole_step`). Anything else: only drafts are staged, the
other tokens are written at once, and the device is told which rows are whose (`drafts_only`).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nwor_bench.plugin.gpu_staging import GpuWindowBatch

if TYPE_CHECKING:  # importing it loads vLLM, which takes seconds and nothing here needs
    from nwor_bench.plugin.graph_sets import StagingGraphs


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
    """

    def __init__(
        self,
        length: int,
        group: int,
        max_requests: int,
        graphs: "StagingGraphs",
        device: torch.device,
    ):
        self._length = length
        self._group = group
        self._graphs = graphs
        self._rows = torch.arange(max_requests * length, device=device)
        self._replays: dict[tuple[int, int], GpuWindowBatch] = {}

    def plan(self, input_batch: Any, slot_mappings: Tensor, descriptor: Any) -> Planned:
        """The window of one step.

        Args:
            input_batch: vLLM's, with at least one request that has drafts scheduled.
            slot_mappings: [groups, num_tokens, padded] int64, vLLM's own buffer.
            descriptor: which CUDA graph will run the step; None without graphs.
        """
        # By the names of vLLM's CUDAGraphMode.
        mode = "NONE" if descriptor is None else descriptor.cg_mode.name
        if mode == "FULL":
            return self._replay(input_batch, slot_mappings, descriptor)
        if input_batch.num_draft_tokens == 0:
            return None, "no_drafts"
        counts = DraftCounts(input_batch.num_draft_tokens_per_req, input_batch.num_tokens)
        slot_mapping = slot_mappings[self._group]
        length = counts.uniform_length()
        if mode == "NONE" and length is not None and length <= self._length:
            rows = self._rows[: counts.num_tokens]
            return whole_step(counts, length, rows, slot_mapping[: counts.num_tokens]), None
        copied = mode == "PIECEWISE"
        batch = drafts_only(counts, input_batch.query_start_loc_np, slot_mapping, copied=copied)
        if batch.max_query_len > self._length:
            return None, "window_beside_prefill_of_its_request"
        return batch, None

    def _replay(self, input_batch: Any, slot_mappings: Tensor, descriptor: Any) -> Planned:
        """A captured window: made once for each number of requests, since nothing else varies.

        vLLM writes slots to the same buffer in every step, so a view of it stays right.
        """
        requests, tokens = input_batch.num_reqs, descriptor.num_tokens
        drafts = self._length - 1
        if descriptor.uniform_token_count != self._length:
            return None, "full_graph_of_another_shape"
        if input_batch.num_draft_tokens != requests * drafts:
            return None, "full_graph_with_uneven_windows"
        ready = self._replays.get((tokens, requests))
        if ready is None:
            shape = self._graphs.shapes.get(descriptor)
            if shape is None:
                return None, self._graphs.unavailable or "full_graph_of_another_shape"
            counts = DraftCounts(np.full(requests, drafts, dtype=np.int32), requests * self._length)
            slots = slot_mappings[self._group, :tokens]
            ready = whole_step(counts, self._length, shape.rows, slots, shape.sources)
            self._replays[tokens, requests] = ready
        return ready, None


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
    counts: DraftCounts, length: int, rows: Tensor, slot_mapping: Tensor, sources: Any = None
) -> GpuWindowBatch:
    """Plan a step of equal windows, all of whose rows wait for the commit.

    Args:
        counts: drafts of each request.
        length: rows of each window, the certain first token included.
        rows: [num_tokens] int64, 0, 1, 2, ...
        slot_mapping: [num_tokens] int64, the target layers' slots; padding is -1.
        sources: the K/V of a captured graph; None where layers hand theirs in.
    """
    return GpuWindowBatch(
        num_draft_tokens=tuple(counts.per_request.tolist()),
        rows=rows,
        slots=slot_mapping,
        direct_slots=None,
        max_query_len=length,
        tokens_per_request=length,
        sources=sources,
    )


def _to_device(columns: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """Several small int32 columns in one copy that does not wait."""
    sizes = [len(column) for column in columns]
    packed = torch.from_numpy(np.concatenate(columns).astype(np.int32, copy=False))
    if device.type == "cuda":
        packed = packed.pin_memory()
    return list(torch.split(packed.to(device, non_blocking=True), sizes))
