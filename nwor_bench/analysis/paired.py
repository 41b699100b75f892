"""Two cells' times, block by block, on the same work. Pure.

NWOR and SCV change the time of a window, so window times are compared. A batch's latency includes
the prefill, and the time per output token favours a cell that happens to accept more.

Two cells that decode greedily and pass parity run the same windows. Otherwise (sampling, other
acceptance) a block's windows are grouped into strata of equal batch size (requests with drafts,
draft tokens) and context (tokens generated so far per request, in steps of CONTEXT_STEP). A
stratum's weight is the number of windows that both cells have in it. Windows without a partner
are left out and counted. For equal sequences the result is the mean over all windows.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import NamedTuple

from nwor_bench.analysis.cell_data import CellData
from nwor_bench.analysis.invariants import output_tokens
from nwor_bench.records.types import BatchRecord, WindowRecord

CONTEXT_STEP = 64
"""Most tokens per request by which the contexts of a stratum's windows differ."""

WINDOW_MS = "window_ms"
LATENCY_MS = "latency_ms"

Strata = dict[tuple[int, int, int], list[float]]


@dataclass(frozen=True)
class PairedTimes:
    """Times in ms of the blocks that both cells ran, in the blocks' order.

    `compared` is WINDOW_MS, or LATENCY_MS (sum over the block's batches) if a block has no pair of
    timed windows. `matched_windows` counts the treated cell's windows, `unmatched_windows` the
    windows of both cells that were left out; both are None for LATENCY_MS. Neither counts windows
    without a time (the last window before a pause may have none).
    `token_logs` and `time_logs` are each block's log ratio of output tokens a window and of time a
    window, over all timed windows (LATENCY_MS: all tokens of the batches, and their latency);
    `token_logs` is empty if a block's windows gave no token.
    """

    compared: str
    blocks: tuple[int, ...]
    treated: tuple[float, ...]
    baseline: tuple[float, ...]
    token_logs: tuple[float, ...]
    time_logs: tuple[float, ...]
    matched_windows: int | None = None
    unmatched_windows: int | None = None


def pair_times(cell: CellData, baseline: CellData) -> PairedTimes | None:
    """The two cells' times, or None if no block was timed in both."""
    ours, theirs = by_block(cell), by_block(baseline)
    blocks = sorted(ours.keys() & theirs.keys())
    if not blocks:
        return None
    strata = [(_strata(*ours[block]), _strata(*theirs[block])) for block in blocks]
    matched = [_match(*both) for both in strata]
    used = [match for match in matched if match is not None]
    by_window = len(used) == len(blocks)

    def work(batches: Sequence[BatchRecord], windows: Sequence[WindowRecord]) -> Work:
        return windows_work(windows) if by_window else _batches_work(batches)

    sides = [(work(*ours[block]), work(*theirs[block])) for block in blocks]
    token_logs: tuple[float, ...] = ()
    if all(treated.tokens and other.tokens for treated, other in sides):
        token_logs = tuple(log(a.tokens / a.windows * b.windows / b.tokens) for a, b in sides)
    time_logs = tuple(log(a.ms / a.windows * b.windows / b.ms) for a, b in sides)
    if not by_window:
        return PairedTimes(
            LATENCY_MS,
            tuple(blocks),
            tuple(treated.ms for treated, _ in sides),
            tuple(other.ms for _, other in sides),
            token_logs,
            time_logs,
        )
    windows = sum(len(times) for both in strata for side in both for times in side.values())
    matches = sum(match[2] for match in used)
    return PairedTimes(
        WINDOW_MS,
        tuple(blocks),
        tuple(match[0] for match in used),
        tuple(match[1] for match in used),
        token_logs,
        time_logs,
        matches,
        windows - 2 * matches,
    )


def by_block(cell: CellData) -> dict[int, tuple[list[BatchRecord], list[WindowRecord]]]:
    """The cell's timed batches and windows by block."""
    groups: dict[int, tuple[list[BatchRecord], list[WindowRecord]]] = {}
    for batch in cell.timed:
        groups.setdefault(batch.block, ([], []))[0].append(batch)
    for window in cell.windows:
        groups[window.block][1].append(window)
    return groups


def _strata(batches: Sequence[BatchRecord], windows: Sequence[WindowRecord]) -> Strata:
    """A block's window times by batch size and context, without untimed windows."""
    requests = max(batch.requests for batch in batches)
    generated: dict[int, float] = defaultdict(float)
    strata: Strata = defaultdict(list)
    for window in sorted(windows, key=lambda w: (w.batch, w.window)):
        if window.wall_ms:
            step = int(generated[window.batch] // (CONTEXT_STEP * requests))
            strata[window.num_reqs, window.draft_tokens, step].append(window.wall_ms)
        # Each request gains its accepted drafts and one more token.
        generated[window.batch] += output_tokens(window)
    return strata


def _match(ours: Strata, theirs: Strata) -> tuple[float, float, int] | None:
    """Both cells' mean times over common strata, weighted alike, and the number of window pairs."""
    pairs = {key: min(len(ours[key]), len(theirs[key])) for key in ours.keys() & theirs.keys()}
    total = sum(pairs.values())
    if total == 0:
        return None
    above, below = (
        sum(count * sum(side[key]) / len(side[key]) for key, count in pairs.items()) / total
        for side in (ours, theirs)
    )
    return above, below, total


class Work(NamedTuple):
    """What windows or batches of one cell did."""

    tokens: float
    ms: float
    windows: int


def _batches_work(batches: Sequence[BatchRecord]) -> Work:
    tokens = sum(batch.output_tokens for batch in batches)
    # A batch without windows counts as one.
    windows = sum(max(1, batch.windows) for batch in batches)
    return Work(tokens, sum(batch.latency_ms for batch in batches), windows)


def windows_work(windows: Sequence[WindowRecord]) -> Work:
    """Tokens and wall time of the windows that have a time."""
    timed = [(output_tokens(window), window.wall_ms) for window in windows if window.wall_ms]
    return Work(sum(tokens for tokens, _ in timed), sum(ms for _, ms in timed), len(timed))
