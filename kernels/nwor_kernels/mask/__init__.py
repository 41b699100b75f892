"""`nwor::acceptance_mask`: speculative cache validation on the device, without a host copy."""

import torch
from torch import Tensor

from nwor_kernels.mask.reference import acceptance_mask_reference

__all__ = ["acceptance_mask", "acceptance_mask_reference"]


@torch.library.custom_op(
    "nwor::acceptance_mask", mutates_args=("accepted", "num_accepted"), device_types="cpu"
)
def acceptance_mask(
    sampled_token_ids: Tensor,
    num_draft_tokens: Tensor,
    vocab_size: int,
    accepted: Tensor,
    num_accepted: Tensor,
) -> None:
    """See `acceptance_mask_reference` for shapes and meaning."""
    acceptance_mask_reference(
        sampled_token_ids, num_draft_tokens, vocab_size, accepted, num_accepted
    )


@acceptance_mask.register_kernel("cuda")
def _(
    sampled_token_ids: Tensor,
    num_draft_tokens: Tensor,
    vocab_size: int,
    accepted: Tensor,
    num_accepted: Tensor,
) -> None:
    """One Triton launch; Triton is imported by the first call, which only a GPU makes."""
    from nwor_kernels.mask.kernel import acceptance_mask_triton

    acceptance_mask_triton(sampled_token_ids, num_draft_tokens, vocab_size, accepted, num_accepted)


@acceptance_mask.register_fake
def _(
    sampled_token_ids: Tensor,
    num_draft_tokens: Tensor,
    vocab_size: int,
    accepted: Tensor,
    num_accepted: Tensor,
) -> None:
    """Nothing to infer: the operator only mutates."""
