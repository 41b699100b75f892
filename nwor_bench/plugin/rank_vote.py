"""Tensor-parallel ranks agree on each window's outcome.

Only the rank itself sees an error of its own. Without a vote it would write its window directly
while the others commit theirs: the caches would be right, but one engine would report two outcomes.
So the ranks exchange three numbers on the host for each staged window, over vLLM's gloo group, and
their reasons only after an error.
"""

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

DIFFERENT_COUNTS = "ranks_accepted_differently"


class RankVote:
    """Every rank must call `settle` equally often and in the same order.

    Args:
        group: the host's process group of the ranks; None for a single rank, which does not vote.
    """

    def __init__(self, group: Any = None):
        self._group = group

    @classmethod
    def of_worker(cls) -> "RankVote":
        """The vote among the tensor-parallel ranks that vLLM has set up in this process."""
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        return cls(group.cpu_group if group.world_size > 1 else None)

    @property
    def alone(self) -> bool:
        """True for a single rank, which decides without a vote."""
        return self._group is None

    def settle(self, reason: str | None, num_accepted: Sequence[int] = ()) -> str | None:
        """Why every rank falls back, or None if none has to.

        Args:
            reason: why this rank's window fell back, or None.
            num_accepted: accepted drafts of each request where the host knows them. Ranks that
                sampled differently would commit different tokens, so all write directly.
        """
        if self._group is None:
            return reason
        digest = crc32(repr(list(num_accepted)).encode())
        votes = torch.tensor([int(reason is not None), digest, -digest])
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=self._group)
        fault, highest, minus_lowest = votes.tolist()
        if fault:
            return self._common_reason(reason)
        return None if highest == -minus_lowest else DIFFERENT_COUNTS

    def _common_reason(self, reason: str | None) -> str:
        """The reason that all ranks have, else the first faulty rank's with its number."""
        reasons: list[str | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(reasons, reason, group=self._group)
        if len(set(reasons)) == 1:
            return str(reasons[0])
        return next(f"rank_{rank}:{text}" for rank, text in enumerate(reasons) if text)
