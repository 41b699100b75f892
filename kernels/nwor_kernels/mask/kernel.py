"""Acceptance mask in Triton: one warp a request, one launch, one round of loads.

A request's first entry in the mask is the sum of the drafts before it; each program forms that
sum by itself from all draft counts (4 bytes a request), so no program waits for another.
"""

import triton
import triton.language as tl
from torch import Tensor


def acceptance_mask_triton(
    sampled_token_ids: Tensor,
    num_draft_tokens: Tensor,
    vocab_size: int,
    accepted: Tensor,
    num_accepted: Tensor,
) -> None:
    """`acceptance_mask_reference` in one launch; safe inside a CUDA graph."""
    num_requests, width = sampled_token_ids.shape
    _mask_kernel[(max(num_requests, 1),)](
        sampled_token_ids,
        num_draft_tokens,
        accepted,
        num_accepted,
        vocab_size,
        num_requests,
        width if num_requests else 0,  # the one program of an empty window reads no ids
        accepted.numel(),
        *sampled_token_ids.stride(),
        num_draft_tokens.stride(0),
        accepted.stride(0),
        num_accepted.stride(0),
        REQUESTS=max(triton.next_power_of_2(num_requests), 128),
        WIDTH=max(triton.next_power_of_2(width), 32),
        num_warps=1,
        num_stages=1,
    )


@triton.jit(do_not_specialize=["vocab_size", "num_requests", "width", "capacity"])
def _mask_kernel(
    sampled,
    drafts,
    accepted,
    num_accepted,
    vocab_size,
    num_requests,
    width,
    capacity,
    sampled_row,
    sampled_one,
    drafts_stride,
    accepted_stride,
    num_accepted_stride,
    REQUESTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    request = tl.program_id(0)
    lane = tl.arange(0, WIDTH)
    every = tl.arange(0, REQUESTS)
    ids = sampled + request.to(tl.int64) * sampled_row + lane * sampled_one
    token = tl.load(ids, mask=lane < width, other=-1)
    counts = tl.load(drafts + every * drafts_stride, mask=every < num_requests, other=0)

    valid = tl.sum(((token >= 0) & (token < vocab_size)).to(tl.int32), axis=0)
    own = tl.sum(tl.where(every == request, counts, 0), axis=0)
    first = tl.sum(tl.where(every < request, counts, 0), axis=0)
    kept = tl.minimum(tl.maximum(valid - 1, 0), own)
    if request < num_requests:
        tl.store(num_accepted + request * num_accepted_stride, kept)
    for start in range(0, own, WIDTH):
        draft = start + lane
        inside = (draft < own) & (first + draft < capacity)
        tl.store(accepted + (first + draft) * accepted_stride, draft < kept, mask=inside)

    # Past the window's drafts: the programs share the tail out between them.
    tail = tl.sum(counts, axis=0) + request * WIDTH
    for start in range(tail, capacity, tl.num_programs(0) * WIDTH):
        at = start + lane
        tl.store(accepted + at * accepted_stride, at < 0, mask=at < capacity)
