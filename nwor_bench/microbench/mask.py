"""Mask: which drafts were accepted, from the counts on the device, against doing nothing."""

import torch
from torch import Tensor

from nwor_bench.microbench.baselines import make_baseline
from nwor_bench.microbench.cases import OURS, PEERS, Group, Shape, bytes_moved
from nwor_bench.microbench.inputs import spread
from nwor_bench.microbench.subject import Call, Contest, Subject, contest
from nwor_kernels.mask.kernel import acceptance_mask_from_counts_triton
from nwor_kernels.mask.reference import acceptance_mask_from_counts_reference

SETS = 64
"""Calls of a round: a mask takes less than a microsecond."""


def mask_contest(group: Group, shape: Shape, device: torch.device, seed: int) -> Contest:
    """The mask as SCV launches it: from `num_sampled`, all requests with as many drafts."""
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
        return "" if right else "the mask or its counts are not the reference's"

    ours = Subject(OURS, 1, moved, calls, check)
    return contest(ours, PEERS["mask"], lambda name: make_baseline(name, moved, SETS, device))
