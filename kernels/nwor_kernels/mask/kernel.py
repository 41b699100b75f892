"""Acceptance mask in Triton: one launch, one round of loads.

Where all requests have as many drafts, a program takes many requests and loads nothing but what
was sampled (from counts: `equal_windows`). Else a program takes one request and adds up the drafts
before it from all draft counts (4 bytes a request), so no program waits for another.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from nwor_kernels.launch import Launch, starts_early
from nwor_kernels.mask.equal_windows import ENTRIES_PER_PROGRAM, equal_windows_kernel
from nwor_kernels.mask.reference import check_drafts

REQUESTS_PER_PROGRAM = 128
"""Requests that one program masks where all have as many drafts."""


def acceptance_mask_triton(
    sampled_token_ids: Tensor,
    num_draft_tokens: Tensor | None,
    vocab_size: int,
    accepted: Tensor,
    num_accepted: Tensor,
    drafts_per_request: int | None = None,
) -> None:
    """`acceptance_mask_reference` in one launch; safe inside a CUDA graph."""
    _launch(
        sampled_token_ids, num_draft_tokens, vocab_size, accepted, num_accepted, drafts_per_request
    )


def acceptance_mask_from_counts_triton(
    num_sampled: Tensor,
    num_draft_tokens: Tensor | None,
    accepted: Tensor,
    num_accepted: Tensor,
    drafts_per_request: int | None = None,
) -> None:
    """`acceptance_mask_from_counts_reference` in one launch; safe inside a CUDA graph."""
    if drafts_per_request and num_draft_tokens is None:
        _launch_equal(num_sampled, accepted, num_accepted, drafts_per_request)
        return
    _launch(num_sampled, num_draft_tokens, None, accepted, num_accepted, drafts_per_request)


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


_launches: dict[object, Launch] = {}


def _launch_equal(num_sampled: Tensor, accepted: Tensor, num_accepted: Tensor, drafts: int) -> None:
    capacity = accepted.numel()
    tensors = (num_sampled, accepted, num_accepted)
    layouts = [(tensor.dtype, tensor.stride()) for tensor in tensors]
    key = (drafts, capacity, num_sampled.device, num_sampled.shape, *layouts)
    launch = _launches.get(key)
    if launch is None:
        launch = _launches[key] = _prepare_equal(*tensors, drafts, capacity)
    launch(*tensors, num_sampled.shape[0], capacity)


def _prepare_equal(
    num_sampled: Tensor, accepted: Tensor, num_accepted: Tensor, drafts: int, capacity: int
) -> Launch:
    """Programs for every entry of the mask, and for every request's count."""
    entries = max(num_sampled.shape[0] * drafts, capacity, 1)
    each = min(triton.next_power_of_2(entries), ENTRIES_PER_PROGRAM)
    starts = starts_early(num_sampled.device)
    constants = {
        "STRIDES": (num_sampled.stride(0), accepted.stride(0), num_accepted.stride(0)),
        "DRAFTS": drafts,
        "ENTRIES": each,
        "STARTS_EARLY": starts,
    }
    grid = (triton.cdiv(entries, each), 1, 1)
    warps = max(each // 128, 1)
    return Launch(equal_windows_kernel, grid, constants, num_warps=warps, launch_pdl=starts)


def _launch(
    sampled: Tensor,
    num_draft_tokens: Tensor | None,
    vocab_size: int | None,
    accepted: Tensor,
    num_accepted: Tensor,
    drafts_per_request: int | None,
) -> None:
    tensors = (sampled, num_draft_tokens, accepted, num_accepted)
    key = (
        vocab_size,
        drafts_per_request,
        sampled.device,
        sampled.shape,
        *[None if tensor is None else (tensor.dtype, tensor.stride()) for tensor in tensors],
    )
    launch = _launches.get(key)
    if launch is None:
        check_drafts(num_draft_tokens, drafts_per_request)
        strides = [0 if tensor is None else tensor.stride(0) for tensor in tensors[1:]]
        launch = _launches[key] = _prepare(sampled, strides, vocab_size, drafts_per_request)
    launch(*tensors, sampled.shape[0], accepted.numel())


def _prepare(
    sampled: Tensor, strides: list[int], vocab_size: int | None, drafts_per_request: int | None
) -> Launch:
    num_requests = sampled.shape[0]
    most = triton.next_power_of_2(max(num_requests, 1))
    requests = 1 if drafts_per_request is None else min(most, REQUESTS_PER_PROGRAM)
    starts = starts_early(sampled.device)
    constants = {
        "STRIDES": (*strides, *sampled.stride()),
        "VOCAB_SIZE": vocab_size,
        "WIDTH": sampled.shape[1] if sampled.dim() == 2 else 1,
        "DRAFTS": drafts_per_request,
        "REQUESTS": requests,
        "EVERY": max(most, 128),
        "LANES": triton.next_power_of_2(max(drafts_per_request or 32, 1)),
        "STARTS_EARLY": starts,
    }
    num_warps = 1 if drafts_per_request is None else 4
    grid = (triton.cdiv(max(num_requests, 1), requests), 1, 1)
    return Launch(_mask_kernel, grid, constants, num_warps=num_warps, launch_pdl=starts)


@triton.jit(
    do_not_specialize=["num_requests", "capacity"],
    do_not_specialize_on_alignment=["sampled", "drafts", "accepted", "num_accepted"],
)
def _mask_kernel(
    sampled,
    drafts,
    accepted,
    num_accepted,
    num_requests,
    capacity,
    STRIDES: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    DRAFTS: tl.constexpr,
    REQUESTS: tl.constexpr,
    EVERY: tl.constexpr,
    LANES: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """One program: REQUESTS requests, LANES drafts of each at a time.

    STRIDES are those of drafts, accepted, num_accepted and sampled.
    """
    if STARTS_EARLY:
        gdc_wait()
    request = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    exists = request < num_requests
    ids = sampled + request.to(tl.int64) * STRIDES[3]
    if VOCAB_SIZE is None:
        valid = tl.load(ids, mask=exists, other=0)
    else:
        place = tl.arange(0, triton.next_power_of_2(WIDTH + (WIDTH == 0)))
        in_width = exists[:, None] & (place < WIDTH)[None, :]
        token = tl.load(ids[:, None] + (place * STRIDES[4])[None, :], mask=in_width, other=-1)
        valid = tl.sum(((token >= 0) & (token < VOCAB_SIZE)).to(tl.int32), axis=1)
    if DRAFTS is not None:
        own = DRAFTS
        most = DRAFTS
        first = request * DRAFTS
        total = num_requests * DRAFTS
    else:
        every = tl.arange(0, EVERY)
        counts = tl.load(drafts + every * STRIDES[0], mask=every < num_requests, other=0)
        own = tl.sum(tl.where(every[None, :] == request[:, None], counts[None, :], 0), axis=1)
        most = tl.max(own, axis=0)
        first = tl.sum(tl.where(every[None, :] < request[:, None], counts[None, :], 0), axis=1)
        total = tl.sum(counts, axis=0)
    kept = tl.minimum(tl.maximum(valid - 1, 0), own)
    tl.store(num_accepted + request * STRIDES[2], kept, mask=exists)

    lane = tl.arange(0, LANES)
    for start in range(0, most, LANES):
        draft = start + lane[None, :]
        entry = first[:, None] + draft
        inside = exists[:, None] & (draft < (own if DRAFTS is not None else own[:, None]))
        inside = inside & (entry < capacity)
        tl.store(accepted + entry * STRIDES[1], draft < kept[:, None], mask=inside)

    # Past the window's drafts: the programs share the tail out between them.
    spare = tl.arange(0, 128)
    for start in range(total + tl.program_id(0) * 128, capacity, tl.num_programs(0) * 128):
        at = start + spare
        tl.store(accepted + at * STRIDES[1], at < 0, mask=at < capacity)
