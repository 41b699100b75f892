"""Compare a cell's acceptance with that of off x off, position by position. Pure.

In bf16 the drafter has ties too, so acceptance may differ slightly although all tokens are equal.
The two counts of a position are compared by Agresti and Caffo's interval of the difference of two
rates (one success and one failure added to each), at a level divided by the number of positions.

The plain interval is off in two ways:

- Both cells run the same prompts, and equal text has nearly equal acceptance. The interval is wider
  than necessary, which costs power only.
- After a tie the text differs, and the windows of one request are correlated. For each such request
  the variance grows as if each cell drew its rate after the first difference anew from 0 to 1. One
  batch then has little power if many requests differ, so each batch is compared alone and together
  with the cell's earlier batches.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import sqrt
from statistics import NormalDist

from nwor_bench.records.types import BatchRecord, Cell

ALPHA = 1e-4
"""Chance of a false alarm for a sound cell in one comparison, over all positions."""

_UNIFORM_VARIANCE = 1 / 12


@dataclass(frozen=True)
class Acceptance:
    """Counts of one cell and of off x off on the same prompts. None: not measured."""

    accepted: tuple[int, ...] | None
    drafts: int | None
    """Windows of a request, over all requests: the trials of every position."""

    expected_accepted: tuple[int, ...] | None
    expected_drafts: int | None
    diverged: tuple[int, ...] = ()
    """For each differing request its output tokens from the first difference on."""

    tokens: int = 0
    """Output tokens of all requests."""

    batches: int = 1

    def plus(self, other: "Acceptance") -> "Acceptance":
        """The sum of both; a count that one of them lacks is None."""
        return Acceptance(
            _add(self.accepted, other.accepted),
            _sum(self.drafts, other.drafts),
            _add(self.expected_accepted, other.expected_accepted),
            _sum(self.expected_drafts, other.expected_drafts),
            self.diverged + other.diverged,
            self.tokens + other.tokens,
            self.batches + other.batches,
        )


def acceptance_of(
    batch: BatchRecord, reference: BatchRecord, diverged: tuple[int, ...], tokens: int
) -> Acceptance:
    """vLLM's own counts of two batches of the same prompts."""
    return Acceptance(
        batch.vllm_accepted_per_position,
        batch.vllm_num_drafts,
        reference.vllm_accepted_per_position,
        reference.vllm_num_drafts,
        diverged,
        tokens,
    )


class AcceptanceCheck:
    """Compares each batch of a cell with off x off's, alone and with the cell's earlier ones.

    A batch that shares a prompt with an earlier one is compared alone only: greedy decoding repeats
    itself, which adds no evidence.
    """

    def __init__(self) -> None:
        self._before: dict[Cell, Acceptance] = {}
        self._prompts: dict[Cell, set[Hashable]] = {}

    def add(self, cell: Cell, batch: Acceptance, prompts: Sequence[Hashable]) -> str | None:
        """Where acceptance leaves its interval, in words; None if nowhere."""
        seen = self._prompts.setdefault(cell, set())
        outside = acceptance_outside(batch)
        if outside or not seen.isdisjoint(prompts):
            return outside
        seen |= set(prompts)
        before = self._before.get(cell)
        together = self._before[cell] = batch if before is None else before.plus(batch)
        return acceptance_outside(together)


def acceptance_outside(found: Acceptance, alpha: float = ALPHA) -> str | None:
    """Where acceptance per position leaves its interval; None if nowhere.

    Args:
        found: the counts of one batch or of several.
        alpha: chance of a false alarm over all positions.
    """
    ours, theirs = found.accepted, found.expected_accepted
    drafts, expected = found.drafts, found.expected_drafts
    if ours is None or theirs is None or len(ours) != len(theirs) or not drafts or not expected:
        if ours == theirs and drafts == expected:
            return None
        return (
            f"accepted per position {ours} in {drafts} drafts of requests, {theirs} in {expected} "
            "with off x off"
        )
    shares = [tokens / found.tokens for tokens in found.diverged]
    for position, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        allowed = half_width(a, drafts, b, expected, shares, alpha / len(ours))
        difference = (a + 1) / (drafts + 2) - (b + 1) / (expected + 2)
        if abs(difference) > allowed:
            return (
                f"accepted per position: draft {position + 1} {a} of {drafts} times, {b} of "
                f"{expected} with off x off in {found.batches} batches; the rates differ by "
                f"{abs(difference):.3f}, chance explains {allowed:.3f}"
            )
    return None


def half_width(
    accepted: int,
    drafts: int,
    expected_accepted: int,
    expected_drafts: int,
    diverged: Sequence[float],
    alpha: float,
) -> float:
    """Half the interval of the difference of two rates at level `alpha`, as a fraction.

    `diverged` has for each differing request the share of all tokens behind its first difference.
    """
    variance = 2 * _UNIFORM_VARIANCE * sum(share * share for share in diverged)
    for count, number in ((accepted, drafts), (expected_accepted, expected_drafts)):
        rate = (count + 1) / (number + 2)
        variance += rate * (1 - rate) / (number + 2)
    return NormalDist().inv_cdf(1 - alpha / 2) * sqrt(variance)


def _add(ours: tuple[int, ...] | None, theirs: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if ours is None or theirs is None:
        return None
    return tuple(a + b for a, b in zip_longest(ours, theirs, fillvalue=0))


def _sum(ours: int | None, theirs: int | None) -> int | None:
    return None if ours is None or theirs is None else ours + theirs
