"""Tensor-parallel ranks agree on each window's outcome.

A rank sees only its own errors, and would write its window directly while the others commit theirs.
So the ranks exchange a few numbers on the host for each staged window, over vLLM's gloo group, and
their reasons after an error.

Late counts are compared late: all ranks seal the same steps and keep a checksum of all counts up to
each. A vote says how far a rank has read, and the next one compares the checksums of the last
sealed step that all have read.
"""

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from nwor_bench.records.fallback_reasons import Fault

MAX_NOTED = 4096
"""Sums kept for a vote: of a window of 8 ms, those of nine minutes."""

NO_VOTE = -(1 << 40)
"""Below every checksum and its negative: a rank that has no sum to compare."""


class RankVote:
    """Every rank must call `settle` equally often and in the same order.

    Args:
        group: the host's process group of the ranks; None for a single rank, which does not vote.
    """

    def __init__(self, group: Any = None):
        self._group = group
        self._noted: dict[int, int] = {}
        self._read_by_all = 0

    @classmethod
    def of_worker(cls) -> "RankVote":
        """The vote among the tensor-parallel ranks that vLLM has set up in this process."""
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        return cls(group.cpu_group if group.world_size > 1 else None)

    @property
    def is_single(self) -> bool:
        """True for a single rank, which decides without a vote."""
        return self._group is None

    def note(self, step: int, digest: int) -> None:
        """Note a checksum of this rank's counts up to a sealed step, for the votes to come."""
        self._noted[step] = digest
        if len(self._noted) > MAX_NOTED:
            del self._noted[next(iter(self._noted))]

    def settle(self, reason: str | None, num_accepted: Sequence[int] = ()) -> str | None:
        """Why every rank falls back; None if none has to.

        Args:
            reason: why this rank's window fell back, or None.
            num_accepted: accepted drafts of each request if the host knows them; if ranks differ,
                all write directly.
        """
        if self._group is None:
            return reason
        digest = crc32(repr(list(num_accepted)).encode())
        late = self._noted.get(self._read_by_all)
        both = (NO_VOTE, NO_VOTE) if late is None else (late, -late)
        read = next(reversed(self._noted), 0)
        votes = torch.tensor([int(reason is not None), digest, -digest, *both, -read])
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=self._group)
        fault, high, minus_low, late_high, late_minus_low, minus_read = votes.tolist()
        self._read_by_all = -minus_read
        if fault:
            return self._common_reason(reason)
        differ = high > -minus_low or late_high > -late_minus_low
        return Fault.RANKS_DIFFER.value if differ else None

    def of_first(self, value: Any) -> Any:
        """The first rank's value, on every rank."""
        if self._group is None:
            return value
        shared = [value]
        first = dist.get_global_rank(self._group, 0)
        dist.broadcast_object_list(shared, src=first, group=self._group)
        return shared[0]

    def _common_reason(self, reason: str | None) -> str:
        reasons: list[str | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(reasons, reason, group=self._group)
        if len(set(reasons)) == 1:
            return str(reasons[0])
        return next(f"rank_{rank}:{text}" for rank, text in enumerate(reasons) if text)
