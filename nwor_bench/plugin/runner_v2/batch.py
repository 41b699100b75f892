"""A window on a GPU, and the three ways to build it from a step.

`whole_step`: every request has a window of equal length; nothing is written until the commit, and
no index is needed. `equal_drafts`: the same by copy; the first token of each window is written at
once. `drafts_only`: any other step; only drafts are staged, the other tokens are written at once,
and the device is given the request of each row.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from nwor_bench.plugin.window import WindowBatch
from nwor_kernels.commit.plan import StagedSources


@dataclass(frozen=True)
class GpuWindowBatch(WindowBatch):
    """A window on a GPU, planned by the V2 runner's hook."""

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

    @cached_property
    def commit_shape(self) -> tuple[str, int, int, Hashable]:
        """Name of the commit's launch for a validator: rows, those of each request, and sources.

        Two captured graphs of as many rows hold their K/V at different addresses: vLLM captures
        one graph without a LoRA adapter and others with some.
        """
        return "commit", self.slots.shape[-1], self.tokens_per_request or 1, self.sources

    @property
    def source_rows(self) -> Tensor | None:
        """[N] int64, each staged row's place in the tensors held; None: row i is the i-th."""
        return None if self.copied or self.tokens_per_request else self.rows

    def fits(self, accepted: Tensor) -> bool:
        """`accepted` holds one count a request, not a mask."""
        shape = accepted.shape
        return len(shape) == 1 and shape[0] >= len(self.num_draft_tokens)


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


def drafts_only(
    counts: DraftCounts, query_start_loc: np.ndarray, slot_mapping: Tensor, *, copied: bool
) -> GpuWindowBatch:
    """Plan a step that stages only its drafts.

    Args:
        counts: drafts of each request.
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
    counts: DraftCounts, length: int, rows: Tensor, slot_mapping: Tensor
) -> GpuWindowBatch:
    """Plan a step of equal windows, all of whose rows wait for the commit.

    Args:
        counts: drafts of each request.
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
        requests: windows of the step.
        length: rows of each window, the certain first token included.
        device: where the tensors are kept.
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
        batch: the plan.
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
    """Several small int32 columns in one copy that does not wait."""
    sizes = [len(column) for column in columns]
    packed = torch.from_numpy(np.concatenate(columns).astype(np.int32, copy=False))
    if device.type == "cuda":
        packed = packed.pin_memory()
    return list(torch.split(packed.to(device, non_blocking=True), sizes))
