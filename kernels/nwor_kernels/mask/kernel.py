"""Acceptance mask in Triton: one launch, one round of loads, from the counts that vLLM returns.

If all requests have the same number of drafts, every entry of the mask loads its own request's
count (they share a cache line or two). Otherwise a program takes one request and adds up the drafts
before it from all draft counts (4 bytes a request). Either way no program waits for another.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nwor_kernels.launch import Launch, starts_early
from nwor_kernels.mask.reference import check_drafts

ENTRIES_PER_PROGRAM = 512
"""Most entries of the mask that a program writes for equal windows, a multiple of 128 threads."""

_launches: dict[object, Launch] = {}


def acceptance_mask_from_counts_triton(
    num_sampled: Tensor,
    num_draft_tokens: Tensor | None,
    accepted: Tensor,
    num_accepted: Tensor,
    drafts_per_request: int | None = None,
) -> None:
    """`acceptance_mask_from_counts_reference` in one launch; safe inside a CUDA graph."""
    check_drafts(num_draft_tokens, drafts_per_request)
    if drafts_per_request == 0:
        accepted.zero_()
        num_accepted.zero_()
        return
    requests, capacity = num_sampled.shape[0], accepted.numel()
    tensors = [num_sampled, num_draft_tokens, accepted, num_accepted]
    given = [tensor for tensor in tensors if tensor is not None]
    layouts = [(tensor.dtype, tensor.stride()) for tensor in given]
    key = (drafts_per_request, capacity, num_sampled.device, requests, *layouts)
    launch = _launches.get(key)
    if launch is None and drafts_per_request is not None:
        launch = _prepare_equal(num_sampled, accepted, num_accepted, drafts_per_request, capacity)
    elif launch is None:
        launch = _prepare([tensor.stride(0) for tensor in given], requests, num_sampled.device)
    _launches[key] = launch
    launch(*given, requests, capacity)


def bind_mask(
    accepted: Tensor, num_accepted: Tensor, drafts_per_request: int
) -> Callable[[Tensor], None]:
    """`acceptance_mask_from_counts_triton` for equal windows, all but the counts fixed.

    Args:
        accepted: [most requests * drafts_per_request] bool, the mask.
        num_accepted: [most requests] int32.
        drafts_per_request: drafts of each request.

    Returns:
        The launch, given `num_sampled` [requests] int32, contiguous; it takes the least host time.
    """
    bound: dict[int, Callable[[Tensor, int], None]] = {}

    def mask(num_sampled: Tensor) -> None:
        requests = num_sampled.shape[0]
        launch = bound.get(requests)
        if launch is None:
            if num_sampled.dtype is not torch.int32 or not num_sampled.is_contiguous():
                raise ValueError(f"counts must be contiguous int32, not {num_sampled.dtype}")
            entries = requests * drafts_per_request
            prepared = _prepare_equal(
                num_sampled, accepted, num_accepted, drafts_per_request, entries
            )
            fixed = (accepted, num_accepted, requests)
            launch = bound[requests] = prepared.bind(*fixed, at=0)
        launch(num_sampled, requests * drafts_per_request)

    return mask


def _prepare_equal(
    num_sampled: Tensor, accepted: Tensor, num_accepted: Tensor, drafts: int, capacity: int
) -> Launch:
    """Programs for every entry of the mask, and for every request's count."""
    entries = max(num_sampled.shape[0] * drafts, capacity, 1)
    per_program = min(triton.next_power_of_2(entries), ENTRIES_PER_PROGRAM)
    starts = starts_early(num_sampled.device)
    constants = {
        "STRIDES": (num_sampled.stride(0), accepted.stride(0), num_accepted.stride(0)),
        "DRAFTS": drafts,
        "ENTRIES": per_program,
        "STARTS_EARLY": starts,
    }
    grid = (triton.cdiv(entries, per_program), 1, 1)
    warps = max(per_program // 128, 1)
    return Launch(_equal_windows_kernel, grid, constants, num_warps=warps, launch_pdl=starts)


@triton.jit(
    do_not_specialize=["num_requests", "capacity"],
    do_not_specialize_on_alignment=["sampled", "accepted", "num_accepted"],
)
def _equal_windows_kernel(
    sampled,
    accepted,
    num_accepted,
    num_requests,
    capacity,
    STRIDES: tl.constexpr,
    DRAFTS: tl.constexpr,
    ENTRIES: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """One program: ENTRIES entries of the mask. STRIDES are those of the three tensors.

    The next kernel may start at once: it waits for this kernel's writes, and its start-up overlaps
    with them. Entries past the last request belong to requests that do not exist: they accept
    nothing.
    """
    if STARTS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    request = entry // DRAFTS
    draft = entry - request * DRAFTS
    exists = request < num_requests
    place = request.to(tl.int64)
    valid = tl.load(sampled + place * STRIDES[0], mask=exists, other=0)
    kept = tl.minimum(tl.maximum(valid - 1, 0), DRAFTS)
    inside = entry < capacity
    tl.store(accepted + entry.to(tl.int64) * STRIDES[1], draft < kept, mask=inside)
    tl.store(num_accepted + place * STRIDES[2], kept, mask=exists & (draft == 0))


def _prepare(strides: list[int], requests: int, device: torch.device) -> Launch:
    starts = starts_early(device)
    constants = {
        "STRIDES": tuple(strides),
        "EVERY": max(triton.next_power_of_2(max(requests, 1)), 128),
        "STARTS_EARLY": starts,
    }
    grid = (max(requests, 1), 1, 1)
    return Launch(_uneven_windows_kernel, grid, constants, num_warps=1, launch_pdl=starts)


@triton.jit(
    do_not_specialize=["num_requests", "capacity"],
    do_not_specialize_on_alignment=["sampled", "drafts", "accepted", "num_accepted"],
)
def _uneven_windows_kernel(
    sampled,
    drafts,
    accepted,
    num_accepted,
    num_requests,
    capacity,
    STRIDES: tl.constexpr,
    EVERY: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """One program: one request, 32 drafts at a time. STRIDES are those of the four tensors."""
    if STARTS_EARLY:
        gdc_wait()
    request = tl.program_id(0)
    exists = request < num_requests
    place = request.to(tl.int64)
    every = tl.arange(0, EVERY)
    counts = tl.load(drafts + every * STRIDES[1], mask=every < num_requests, other=0)
    num_drafts = tl.sum(tl.where(every == request, counts, 0), axis=0)
    first = tl.sum(tl.where(every < request, counts, 0), axis=0)
    total = tl.sum(counts, axis=0)
    valid = tl.load(sampled + place * STRIDES[0], mask=exists, other=0)
    kept = tl.minimum(tl.maximum(valid - 1, 0), num_drafts)
    tl.store(num_accepted + place * STRIDES[3], kept, mask=exists)

    lane = tl.arange(0, 32)
    for start in range(0, num_drafts, 32):
        draft = start + lane
        entry = first + draft
        inside = (draft < num_drafts) & (entry < capacity)
        tl.store(accepted + entry * STRIDES[2], draft < kept, mask=inside)

    # Past the window's drafts: the programs share the tail.
    spare = tl.arange(0, 128)
    for start in range(total + request * 128, capacity, tl.num_programs(0) * 128):
        at = start + spare
        tl.store(accepted + at * STRIDES[2], at < 0, mask=at < capacity)
