"""Mask: our kernel marks accepted drafts from counts on the device; it has no peer kernel."""

import torch
from torch import Tensor

from nwor_bench.microbench.baselines import make_baseline
from nwor_bench.microbench.cases import OURS, PEERS, Group, Shape, bytes_moved
from nwor_bench.microbench.implementation import (
    Call,
    Implementation,
    Implementations,
    with_peers,
)
from nwor_bench.microbench.inputs import spread
from nwor_kernels.mask.kernel import acceptance_mask_from_counts_triton
from nwor_kernels.mask.reference import acceptance_mask_from_counts_reference

SETS = 64
"""Calls in a round: one call takes less than 1 us."""


def mask_implementations(
    group: Group, shape: Shape, device: torch.device, seed: int
) -> Implementations:
    """The mask as SCV launches it: from `num_sampled`, with equal drafts per request."""
    generator = torch.Generator().manual_seed(seed)
    window, moved = group.window, bytes_moved(group, shape)
    sets = [
        (
            (spread(group.accepted, window, generator) + 1).to(device),
            torch.empty(window.tokens, dtype=torch.bool, device=device),
            torch.empty(window.requests, dtype=torch.int32, device=device),
        )
        for _ in range(SETS)
    ]

    def bind(num_sampled: Tensor, mask: Tensor, num_accepted: Tensor) -> Call:
        return lambda: acceptance_mask_from_counts_triton(
            num_sampled, None, mask, num_accepted, window.drafts
        )

    calls = [bind(*each) for each in sets]

    def check() -> str:
        num_sampled, mask, num_accepted = sets[0]
        wanted, wanted_counts = mask.clone(), num_accepted.clone()
        acceptance_mask_from_counts_reference(
            num_sampled, None, wanted, wanted_counts, window.drafts
        )
        mask.copy_(~wanted)
        num_accepted.fill_(-1)
        calls[0]()
        right = torch.equal(mask, wanted) and torch.equal(num_accepted, wanted_counts)
        return "" if right else "the mask or its counts differ from the reference"

    ours = Implementation(OURS, 1, moved, calls, check)
    return with_peers(ours, PEERS["mask"], lambda name: make_baseline(name, moved, SETS, device))
