"""Compare a cell's acceptance with that of off x off, position by position. Pure.

In bf16 the drafter has ties too, so acceptance may differ slightly although all tokens are equal.
The two counts of a position are compared by Agresti and Caffo's interval of the difference of two
rates (one success and one failure added to each), at a level divided by the number of positions.

The plain interval is off in two ways:

- Both cells run the same prompts, and equal text has nearly equal acceptance. The interval is wider
  than necessary, which costs power only.
- After a tie the text differs, and the windows of one request are correlated. For each such request
  the variance grows as if each cell drew its rate after the first difference anew from 0 to 1. One
  batch then has little power if many requests differ, so each batch is compared by itself and
  together with the cell's earlier batches.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby, zip_longest
from math import sqrt
from statistics import NormalDist
from typing import Any

from nwor_bench.analysis.parity.ties import ErrorScale, together_outside
from nwor_bench.analysis.parity.tokens import TokenCheck, digest
from nwor_bench.records.cell import Cell, NworMode, cell_order
from nwor_bench.records.types import BatchRecord, WindowRecord
from nwor_bench.records.window_order import RUNS_OF_GROUP

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


def acceptance_outside(counts: Acceptance, alpha: float = ALPHA) -> str | None:
    """Where acceptance per position leaves its interval; None if nowhere.

    Args:
        counts: of one batch or of several.
        alpha: chance of a false alarm over all positions.
    """
    ours, theirs = counts.accepted, counts.expected_accepted
    drafts, expected = counts.drafts, counts.expected_drafts
    if ours is None or theirs is None or len(ours) != len(theirs) or not drafts or not expected:
        if ours == theirs and drafts == expected:
            return None
        return (
            f"accepted per position {ours} in {drafts} drafts of requests, {theirs} in {expected} "
            "with off x off"
        )
    shares = [tokens / counts.tokens for tokens in counts.diverged]
    for position, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        allowed = half_width(a, drafts, b, expected, shares, alpha / len(ours))
        difference = (a + 1) / (drafts + 2) - (b + 1) / (expected + 2)
        if abs(difference) > allowed:
            return (
                f"accepted per position: draft {position + 1} {a} of {drafts} times, {b} of "
                f"{expected} with off x off in {counts.batches} batches; the rates differ by "
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


INTERLEAVED_ALPHA = 1e-6
"""Chance of a false alarm in one comparison, over all positions; a run makes one for each cell. In
simulations whose requests keep their rate of acceptance for 1, 2 and 10 windows, differences
scattered by 0.96 to 1.05 times what the interval says."""


def acceptance_violations(windows: Iterable[WindowRecord]) -> Iterator[tuple[Cell, str]]:
    """Cells whose acceptance leaves its interval: each on its own, and all that stage together.

    Args:
        windows: of timed interleaved batches, in the order in which they ran.
    """
    counts = _counts(windows).items()
    known = {cell: sums for cell, sums in counts if sums.drafts and sums.expected_drafts}
    broken = {
        cell: text
        for cell, sums in known.items()
        if (text := acceptance_outside(sums, INTERLEAVED_ALPHA))
    }
    staging = [cell for cell in known if cell.nwor_mode is not NworMode.OFF]
    if staging and not any(cell in broken for cell in staging):
        total, *rest = (known[cell] for cell in staging)
        for sums in rest:
            total = total.plus(sums)
        text = acceptance_outside(total, INTERLEAVED_ALPHA)
        broken |= dict.fromkeys(staging, f"all that stage together: {text}") if text else {}
    for cell in sorted(broken, key=cell_order):
        yield cell, f"{cell.label}, interleaved windows: {broken[cell]}."


def _counts(windows: Iterable[WindowRecord]) -> dict[Cell, Acceptance]:
    """Each cell's counts and those of what it is compared with, from the complete groups that both
    share."""
    by_cell: dict[Cell, Acceptance] = {}
    batches: dict[Cell, set[tuple[int, int]]] = defaultdict(set)
    inside = (window for window in windows if window.group is not None)
    for (block, batch, _), members in groupby(inside, key=lambda w: (w.block, w.batch, w.group)):
        group = list(members)
        twins = {window.cell.stock_twin for window in group} - {None}
        theirs = [w for w in group if w.cell in twins or (not twins and w.cell.is_baseline)]
        ours = [window for window in group if window not in theirs]
        if len(group) != RUNS_OF_GROUP * (group[0].run_length or 0) or len(ours) != len(theirs):
            continue  # cut by the end of its batch, or a pair without off x off
        cell = ours[0].cell
        if cell.arm is not None and not twins:
            continue  # the A/A arm is off x off again; other draft counts accept other numbers
        new = (block, batch) not in batches[cell]
        batches[cell].add((block, batch))
        width = max(len(window.accepted_per_position) for window in group)
        counts = Acceptance(*_sums(ours, width), *_sums(theirs, width), batches=int(new))
        by_cell[cell] = by_cell[cell].plus(counts) if cell in by_cell else counts
    return by_cell


def _sums(windows: Sequence[WindowRecord], width: int) -> tuple[tuple[int, ...], int]:
    """Accepted drafts of `width` positions, and windows of a request that had drafts."""
    rows = [[0] * width, *(window.accepted_per_position for window in windows)]
    drafts = sum(window.drafts_per_position[0] for window in windows if window.drafts_per_position)
    return tuple(map(sum, zip_longest(*rows, fillvalue=0))), drafts


SUMS_EVENT = "parity_sums"

Tie = tuple[str, int, int, float]
"""(digest of the prompt, output position, token, gap in nats)."""


@dataclass(frozen=True)
class BatchSums:
    """One batch of a cell: its share of the sums."""

    prompts: tuple[str, ...]
    """Digests of its prompts."""
    ties: tuple[Tie, ...]
    acceptance: Acceptance | None
    """None with another draft count than the reference's."""
    compared: int
    """Tokens that were compared, each generated after the reference's own tokens."""


def batch_sums(
    prompts: Sequence[Sequence[int]], checked: TokenCheck, acceptance: Acceptance | None
) -> BatchSums:
    """A batch's differing tokens and its counts of acceptance."""
    digests = tuple(map(digest, prompts))
    ties = [(digests[v.place.request], v.place.position, v.place.token, v.gap or 0.0)
            for v in checked.verdicts]  # fmt: skip
    return BatchSums(digests, tuple(ties), acceptance, checked.tokens_compared)


@dataclass
class _CellSums:
    """Sums over a cell's batches."""

    ties: dict[tuple[str, int, int], float] = field(default_factory=dict)
    prompts: set[str] = field(default_factory=set)
    compared: float = 0.0
    acceptance: Acceptance | None = None


class ParitySums:
    """The sums of all cells, and whether sound cells can have them."""

    def __init__(self) -> None:
        self._cells: dict[Cell, _CellSums] = defaultdict(_CellSums)

    def add(self, cell: Cell, batch: BatchSums, scale: ErrorScale | None) -> str | None:
        """Why a sound cell would not have these sums; None if it may.

        Acceptance is compared by the batch itself, and with the cell's earlier batches. A batch
        that shares a prompt with one of them is compared only by itself: greedy decoding repeats
        itself, which adds no evidence.

        Args:
            scale: error of mode off; None: not measured, because no token differed so far.
        """
        sums = self._cells[cell]
        # Equal prompts have equal ties: each counts once.
        for prompt, position, token, gap in batch.ties:
            sums.ties.setdefault((prompt, position, token), gap)
        new = set(batch.prompts) - sums.prompts
        repeats = not sums.prompts.isdisjoint(batch.prompts)
        sums.prompts |= new
        sums.compared += len(new) / len(batch.prompts) * batch.compared
        many = None
        if scale is not None:
            many = together_outside(tuple(sums.ties.values()), scale, sums.compared)
        if many or batch.acceptance is None:
            return many
        outside = acceptance_outside(batch.acceptance)
        if outside or repeats:
            return outside
        before, now = sums.acceptance, batch.acceptance
        sums.acceptance = now if before is None else before.plus(now)
        return acceptance_outside(sums.acceptance)


def sums_event(cell: Cell, record: BatchRecord, batch: BatchSums) -> dict[str, Any]:
    """The batch's part for the records."""
    place = {"phase": record.phase, "block": record.block, "batch": record.batch}
    return {"event": SUMS_EVENT, **cell.names, **place, **asdict(batch)}


def read_sums(event: Mapping[str, Any]) -> BatchSums:
    """The batch's part from its event."""
    counts: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in (event["acceptance"] or {}).items()
    }
    ties = tuple((prompt, at, token, gap) for prompt, at, token, gap in event["ties"])
    if (compared := event.get("compared")) is None:  # an older run, whose ties have no gaps in nats
        ties, compared = (), 0
    acceptance = Acceptance(**counts) if counts else None
    return BatchSums(tuple(event["prompts"]), ties, acceptance, compared)
