"""Two cells' times, block by block, on the same work. Pure.

What NWOR and SCV change is the time of a window, so that is what is compared: not a batch's
latency, which holds the prefill too, nor the time per output token, in which a cell that
happens to accept more looks faster. Where both cells decode greedily and pass parity they run
the same windows one by one. Where they do not (sampling, other acceptance) a block's windows
are put into strata of equal batch size (requests with drafts, draft tokens) and context (tokens
generated so far a request, in steps of CONTEXT_STEP). A stratum weighs as many windows as both
cells have in it; a window that finds no partner is left out and counted. For equal sequences
this is the plain mean over all windows.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from nwor_bench.analysis.cell_data import CellData
from nwor_bench.analysis.invariants import accepted
from nwor_bench.records.types import BatchRecord, WindowRecord

CONTEXT_STEP = 64
"""Tokens a request by which a stratum's windows may differ in context."""

WINDOW_MS = "window_ms"
LATENCY_MS = "latency_ms"

Strata = dict[tuple[int, int, int], list[float]]


@dataclass(frozen=True)
class PairedTimes:
    """Times in ms of the blocks that both cells ran, in the blocks' order.

    `compared` is WINDOW_MS, or LATENCY_MS (sum over the block's batches) where a block has no pair
    of timed windows; `matched_windows` are the treated cell's, and `unmatched_windows` those of
    both cells that were left out. Both are None for LATENCY_MS. A window without a time (the last
    before an engine pauses may have none) is neither.
    """

    compared: str
    blocks: tuple[int, ...]
    treated: tuple[float, ...]
    baseline: tuple[float, ...]
    matched_windows: int | None = None
    unmatched_windows: int | None = None


def pair_times(cell: CellData, baseline: CellData) -> PairedTimes | None:
    """The two cells' times, or None if no block was timed in both."""
    ours, theirs = _by_block(cell), _by_block(baseline)
    blocks = sorted(ours.keys() & theirs.keys())
    if not blocks:
        return None
    strata = [(_strata(*ours[block]), _strata(*theirs[block])) for block in blocks]
    matched = [_match(*both) for both in strata]
    found = [match for match in matched if match is not None]
    if len(found) < len(blocks):
        return PairedTimes(
            LATENCY_MS,
            tuple(blocks),
            tuple(_latency(ours[block][0]) for block in blocks),
            tuple(_latency(theirs[block][0]) for block in blocks),
        )
    windows = sum(len(times) for both in strata for side in both for times in side.values())
    matches = sum(match[2] for match in found)
    return PairedTimes(
        WINDOW_MS,
        tuple(blocks),
        tuple(match[0] for match in found),
        tuple(match[1] for match in found),
        matches,
        windows - 2 * matches,
    )


def _by_block(cell: CellData) -> dict[int, tuple[list[BatchRecord], list[WindowRecord]]]:
    groups: dict[int, tuple[list[BatchRecord], list[WindowRecord]]] = {}
    for batch in cell.timed:
        groups.setdefault(batch.block, ([], []))[0].append(batch)
    for window in cell.windows:
        groups[window.block][1].append(window)
    return groups


def _strata(batches: Sequence[BatchRecord], windows: Sequence[WindowRecord]) -> Strata:
    """A block's window times by batch size and context; a window without a time is none."""
    requests = max(batch.requests for batch in batches)
    generated: dict[int, int] = defaultdict(int)
    strata: Strata = defaultdict(list)
    for window in sorted(windows, key=lambda w: (w.batch, w.window)):
        if window.wall_ms is not None and window.wall_ms > 0:
            step = generated[window.batch] // (CONTEXT_STEP * requests)
            strata[window.num_reqs, window.draft_tokens, step].append(window.wall_ms)
        # Each request gains its accepted drafts and one more token.
        generated[window.batch] += accepted(window) + window.num_reqs
    return strata


def _match(ours: Strata, theirs: Strata) -> tuple[float, float, int] | None:
    """Mean times over the strata of both, weighted alike, and the pairs of windows in them."""
    pairs = {key: min(len(ours[key]), len(theirs[key])) for key in ours.keys() & theirs.keys()}
    total = sum(pairs.values())
    if total == 0:
        return None
    above, below = (
        sum(count * sum(side[key]) / len(side[key]) for key, count in pairs.items()) / total
        for side in (ours, theirs)
    )
    return above, below, total


def _latency(batches: Sequence[BatchRecord]) -> float:
    return sum(batch.latency_ms for batch in batches)
