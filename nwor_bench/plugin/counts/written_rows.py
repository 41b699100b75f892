"""Rows that commits wrote, as they counted them on the device, beside those that they had to write.

The device counts from the start on, and each reading brings the sum so far. A reading that adds up
says so of each of its windows. In one that does not, the oldest windows get what was written, and
the last one what is too much: committed tokens are then not the accepted ones.
"""

from collections.abc import Sequence

import numpy as np

from nwor_bench.plugin.counts.pending_step import PendingStep


class WrittenRows:
    """What the commits of each reading wrote.

    Args:
        before: rows written in each layer so far, modulo 2**32.
    """

    def __init__(self, before: Sequence[int]):
        self._before = before

    def settle(
        self, steps: Sequence[PendingStep], num_sampled: Sequence[list[int]], now: Sequence[int]
    ) -> None:
        """Tell each step of a reading how many drafts its commit wrote.

        Args:
            steps: in their order.
            num_sampled: tokens that each request of each step got.
            now: rows written in each layer up to the last step, modulo 2**32.
        """
        pairs = zip(steps, num_sampled, strict=True)
        committed = [
            (step, *_rows_due(step, counts)) for step, counts in pairs if step.certain is not None
        ]
        if not committed:
            return  # rows that nobody committed are found in the next reading with a commit
        wrote = [(new - old) % 2**32 for new, old in zip(now, self._before, strict=True)]
        self._before = now
        left = in_every_layer(wrote, sum(due for _, due, _ in committed))
        for step, due, certain in committed:
            rows = min(due, left)
            left -= rows
            step.committed_tokens = max(rows - certain, 0)
        step.committed_tokens = (step.committed_tokens or 0) + left


def in_every_layer(wrote: Sequence[int], due: int) -> int:
    """One number for all layers: the least if a layer lacks rows, else the most."""
    least = min(wrote)
    return least if least < due else max(wrote)


def _rows_due(step: PendingStep, num_sampled: list[int]) -> tuple[int, int]:
    """Rows that the step's commit had to write in each layer; how many of them are certain."""
    sampled, certain, drafts = np.array(num_sampled, dtype=np.int64), step.certain, step.drafts
    assert certain is not None
    assert drafts is not None
    accepted = np.clip(sampled - 1, 0, drafts)
    rows = accepted + certain
    if step.decided_in_commit:
        rows = np.clip(sampled + certain - 1, 0, drafts + certain)
    return int(rows.sum()), int((rows - accepted).sum())
