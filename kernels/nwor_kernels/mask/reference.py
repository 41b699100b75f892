"""Acceptance mask: which drafts did rejection sampling keep? Torch reference."""

import torch
from torch import Tensor


def acceptance_mask_from_counts_reference(
    num_sampled: Tensor,
    num_draft_tokens: Tensor | None,
    accepted: Tensor,
    num_accepted: Tensor,
    drafts_per_request: int | None = None,
) -> None:
    """Fill the mask of a window's drafts and the number accepted per request.

    Rejection sampling returns, per request, the accepted drafts and then one more token (corrected
    or bonus): m ids mean m - 1 accepted drafts. A request without an id (a chunked prefill) has
    accepted nothing, nor more than it has drafts.

    Args:
        num_sampled: [requests] int, sampled ids of each request.
        num_draft_tokens: [requests] int32, drafts of each request; draft j of request r is
            entry sum(num_draft_tokens[:r]) + j of the mask.
        accepted: [capacity] bool, overwritten: True if draft j < number accepted; False
            past the window's drafts.
        num_accepted: [requests] int32, overwritten.
        drafts_per_request: drafts of every request, instead of `num_draft_tokens`.

    Raises:
        ValueError: both or neither of `num_draft_tokens` and `drafts_per_request`.
    """
    check_drafts(num_draft_tokens, drafts_per_request)
    if num_draft_tokens is None:
        num_draft_tokens = torch.full_like(num_accepted, drafts_per_request or 0)
    if num_draft_tokens.numel() == 0:
        accepted.fill_(False)
        return
    counts = (num_sampled - 1).clamp_(min=0)
    num_accepted.copy_(counts.minimum(num_draft_tokens))
    ends = num_draft_tokens.cumsum(0)
    starts = ends - num_draft_tokens
    position = accepted.new_ones(accepted.shape, dtype=ends.dtype).cumsum_(0) - 1
    request = (position[:, None] >= ends[None, :]).sum(dim=1).clamp_(max=len(ends) - 1)
    draft = position - starts[request]
    # Past the last draft the last request's drafts are exceeded, so the tail is False.
    accepted.copy_(draft < num_accepted[request])


def check_drafts(num_draft_tokens: Tensor | None, drafts_per_request: int | None) -> None:
    """Refuse both or neither of the two ways to give the drafts of each request."""
    if (num_draft_tokens is None) == (drafts_per_request is None):
        raise ValueError("give either num_draft_tokens or drafts_per_request")
