"""Is a cell's acceptance that of off x off, position by position? Pure.

In bf16 the drafter has ties of its own, so equal tokens may come with a few other acceptances.
The two counts of a position are compared by Agresti and Caffo's interval of the difference of two
rates (one success and one failure added to each), at a level divided by the number of positions.

Two things make its plain form too narrow or too wide. Both cells run the same prompts, so equal
text has nearly equal acceptance: the interval is wider than need be, which costs power only.
Behind a tie the text is another one, and the windows of one request go together: for each such
request the variance grows as if the rate behind its first difference were drawn anew between 0
and 1 for each cell.
"""

from collections.abc import Sequence
from math import sqrt
from statistics import NormalDist

from nwor_bench.records import BatchRecord

ALPHA = 1e-4
"""Chance of calling a sound batch's acceptance another one, over all its positions."""

_UNIFORM_VARIANCE = 1 / 12


def acceptance_outside(
    batch: BatchRecord, reference: BatchRecord, diverged: Sequence[float] = (), alpha: float = ALPHA
) -> str | None:
    """Where acceptance per position (vLLM's own count) leaves its interval; None if nowhere.

    Args:
        batch, reference: of the same prompts.
        diverged: for each differing request the share of the batch's tokens behind its first
            difference.
        alpha: chance of a false alarm over all positions.
    """
    ours, theirs = batch.vllm_accepted_per_position, reference.vllm_accepted_per_position
    drafts, expected = batch.vllm_num_drafts, reference.vllm_num_drafts
    if ours is None and theirs is None:
        return None
    if ours is None or theirs is None or len(ours) != len(theirs) or not drafts or not expected:
        if ours == theirs and drafts == expected:
            return None
        return (
            f"accepted per position {ours} in {drafts} drafts of requests, {theirs} in {expected} "
            "with off x off"
        )
    for position, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        allowed = half_width(a, drafts, b, expected, diverged, alpha / len(ours))
        difference = (a + 1) / (drafts + 2) - (b + 1) / (expected + 2)
        if abs(difference) > allowed:
            return (
                f"accepted at position {position}: {a} of {drafts}, {b} of {expected} with off x "
                f"off; the rates differ by {abs(difference):.3f}, chance explains {allowed:.3f}"
            )
    return None


def half_width(
    accepted: int, drafts: int, expected: int, of: int, diverged: Sequence[float], alpha: float
) -> float:
    """Half the interval of the difference of two rates, at level `alpha`, as a fraction."""
    variance = 2 * _UNIFORM_VARIANCE * sum(share * share for share in diverged)
    for count, number in ((accepted, drafts), (expected, of)):
        rate = (count + 1) / (number + 2)
        variance += rate * (1 - rate) / (number + 2)
    return NormalDist().inv_cdf(1 - alpha / 2) * sqrt(variance)
