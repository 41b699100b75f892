"""Speculative cache validation: which of a window's drafts did the target accept?

`off` copies the sampled ids to the host and loops (the reference). `graph` and `adaptive`
decide on the device; if no graph can be captured the same kernel runs eagerly and the
fallback is counted with its reason.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from nwor_bench.records.types import ScvMode
from nwor_kernels.mask.reference import acceptance_mask_reference


class ValidationRefused(ValueError):
    """The sampled ids cannot be matched to the window; the message is the fallback reason."""


@dataclass(frozen=True)
class Validation:
    """A validated window.

    Attributes:
        accepted: [N] bool, in the order of the window's drafts.
        num_accepted: accepted drafts of each request of the batch.
        path: "host" or "device".
        fallback_reason: why a device mode did not run on the device as it says; None if it did.
    """

    accepted: Tensor
    num_accepted: list[int]
    path: str
    fallback_reason: str | None


class Validator:
    """Validates windows in one SCV mode at a time and counts how.

    Args:
        capacity: most draft tokens that a window can have.
        vocab_size: size of the target's vocabulary.
        device: where the sampled ids live.
    """

    def __init__(self, capacity: int, vocab_size: int, device: torch.device):
        self.mode = ScvMode.OFF
        self.counters: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self._capacity = capacity
        self._vocab_size = vocab_size
        self._device = device

    def validate(self, sampled_token_ids: Tensor, num_draft_tokens: tuple[int, ...]) -> Validation:
        """Decide which drafts were accepted.

        Args:
            sampled_token_ids: [requests, width] int, -1 padded, width <= drafts + 1.
            num_draft_tokens: drafts of each request, in the same order.

        Raises:
            ValidationRefused: ids of a shape or type that cannot belong to this window.
        """
        self._refuse_misfits(sampled_token_ids, num_draft_tokens)
        if self.mode is ScvMode.OFF:
            return self._on_host(sampled_token_ids, num_draft_tokens)
        return self._on_device(sampled_token_ids, num_draft_tokens)

    def _refuse_misfits(self, ids: Tensor, num_draft_tokens: tuple[int, ...]) -> None:
        problem = None
        if ids.dim() != 2 or ids.shape[0] != len(num_draft_tokens):
            problem = "sampled_ids_shape"
        elif ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
            problem = "sampled_ids_dtype"
        elif sum(num_draft_tokens) > self._capacity:
            problem = "more_drafts_than_capacity"
        if problem:
            raise ValidationRefused(problem)

    def _on_host(self, ids: Tensor, num_draft_tokens: tuple[int, ...]) -> Validation:
        num_accepted = accepted_on_host(ids.tolist(), num_draft_tokens, self._vocab_size)
        mask = [
            draft < accepted
            for drafts, accepted in zip(num_draft_tokens, num_accepted, strict=True)
            for draft in range(drafts)
        ]
        accepted = torch.tensor(mask, dtype=torch.bool, device=self._device)
        return Validation(accepted, num_accepted, "host", None)

    def _on_device(self, ids: Tensor, num_draft_tokens: tuple[int, ...]) -> Validation:
        drafts = torch.tensor(num_draft_tokens, dtype=torch.int32, device=self._device)
        accepted = torch.empty(sum(num_draft_tokens), dtype=torch.bool, device=self._device)
        num_accepted = torch.empty_like(drafts)
        acceptance_mask_reference(ids, drafts, self._vocab_size, accepted, num_accepted)
        self.counters["scv_device_validations"] += 1
        reason = self._why_no_capture()
        self.count_fallback(reason)
        return Validation(accepted, num_accepted.tolist(), "device", reason)

    def count_fallback(self, reason: str) -> None:
        """Count a validation that did not run as its mode says."""
        self.counters["scv_fallback_count"] += 1
        self.fallbacks[reason] += 1

    def _why_no_capture(self) -> str:
        return "no_cuda" if self._device.type != "cuda" else "capture_not_supported"


def accepted_on_host(
    sampled_token_ids: list[list[int]], num_draft_tokens: tuple[int, ...], vocab_size: int
) -> list[int]:
    """Accepted drafts of each request: valid ids less the one that is no draft.

    A row without a valid id (a chunked prefill) accepted nothing; no row accepts more than
    it has drafts.
    """
    accepted = []
    for ids, drafts in zip(sampled_token_ids, num_draft_tokens, strict=True):
        valid = sum(1 for token in ids if 0 <= token < vocab_size)
        accepted.append(min(max(valid - 1, 0), drafts))
    return accepted
