"""`nwor::acceptance_mask`: speculative cache validation on the device, without a host copy."""

import torch
from torch import Tensor

from nwor_kernels.mask.reference import (
    acceptance_mask_from_counts_reference,
    acceptance_mask_reference,
)

__all__ = [
    "acceptance_mask",
    "acceptance_mask_from_counts",
    "acceptance_mask_from_counts_reference",
    "acceptance_mask_reference",
]

_MUTATED = ("accepted", "num_accepted")


@torch.library.custom_op("nwor::acceptance_mask", mutates_args=_MUTATED, device_types="cpu")
def acceptance_mask(
    sampled_token_ids: Tensor,
    num_draft_tokens: Tensor | None,
    vocab_size: int,
    accepted: Tensor,
    num_accepted: Tensor,
    drafts_per_request: int | None = None,
) -> None:
    """See `acceptance_mask_reference` for shapes and meaning."""
    acceptance_mask_reference(
        sampled_token_ids, num_draft_tokens, vocab_size, accepted, num_accepted, drafts_per_request
    )


@acceptance_mask.register_kernel("cuda")
def _(
    sampled_token_ids: Tensor,
    num_draft_tokens: Tensor | None,
    vocab_size: int,
    accepted: Tensor,
    num_accepted: Tensor,
    drafts_per_request: int | None = None,
) -> None:
    """One Triton launch; Triton is imported by the first call, which only a GPU makes."""
    from nwor_kernels.mask.kernel import acceptance_mask_triton

    acceptance_mask_triton(
        sampled_token_ids, num_draft_tokens, vocab_size, accepted, num_accepted, drafts_per_request
    )


@acceptance_mask.register_fake
def _(
    sampled_token_ids: Tensor,
    num_draft_tokens: Tensor | None,
    vocab_size: int,
    accepted: Tensor,
    num_accepted: Tensor,
    drafts_per_request: int | None = None,
) -> None:
    """Nothing to infer: the operator only mutates."""


@torch.library.custom_op(
    "nwor::acceptance_mask_from_counts", mutates_args=_MUTATED, device_types="cpu"
)
def acceptance_mask_from_counts(
    num_sampled: Tensor,
    num_draft_tokens: Tensor | None,
    accepted: Tensor,
    num_accepted: Tensor,
    drafts_per_request: int | None = None,
) -> None:
    """See `acceptance_mask_from_counts_reference` for shapes and meaning."""
    acceptance_mask_from_counts_reference(
        num_sampled, num_draft_tokens, accepted, num_accepted, drafts_per_request
    )


@acceptance_mask_from_counts.register_kernel("cuda")
def _(
    num_sampled: Tensor,
    num_draft_tokens: Tensor | None,
    accepted: Tensor,
    num_accepted: Tensor,
    drafts_per_request: int | None = None,
) -> None:
    """One Triton launch, as above."""
    from nwor_kernels.mask.kernel import acceptance_mask_from_counts_triton

    acceptance_mask_from_counts_triton(
        num_sampled, num_draft_tokens, accepted, num_accepted, drafts_per_request
    )


@acceptance_mask_from_counts.register_fake
def _(
    num_sampled: Tensor,
    num_draft_tokens: Tensor | None,
    accepted: Tensor,
    num_accepted: Tensor,
    drafts_per_request: int | None = None,
) -> None:
    """Nothing to infer: the operator only mutates."""
