"""Times of draft counts that have an engine each, from whole batches. Pure.

All counts run once a block, in random order. A count's time over that of k = 0 is the mean of the
blocks' log ratios, with that count's own scatter and autocorrelation (`stats.paired.mean_of`).

Two engines that do the same may differ as long as they live. Only the A/A engine, a second one
without a drafter, shows by how much: each interval is wider by the farther end of its interval.
That is one draw. It holds if engines differ by no more than their blocks scatter (95 % at eight
blocks). If they differ by much more, an engine is farther away than the A/A engine in half of all
runs; one degree of freedom would hold there too, at 13 to 51 times the A/A difference.

A request's time per output token is vLLM's own, from its first token to its last: the same clock in
every engine, without the prefill. Times its tokens a step it is the time of a step. Under adaptive
verification those depend on the batch size and change as vLLM learns: all blocks' tokens count, so
that tokens over time is the measured time per token, whose error is the blocks'.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import log
from statistics import fmean

import numpy as np

from nwor_bench.analysis.draft_rates import noise_floor
from nwor_bench.models.methods import WITHOUT_DRAFTER
from nwor_bench.records.cell import ADAPTIVE, Count
from nwor_bench.records.header import RunHeader
from nwor_bench.records.store import RunData
from nwor_bench.records.types import BatchRecord, Phase
from nwor_bench.stats.interval import Interval
from nwor_bench.stats.paired import mean_of


def block_times(run: RunData) -> dict[Count | None, Interval]:
    """Log time of a step over that at k = 0 by draft count, None being the A/A arm, from the blocks
    that both ran; of counts with MIN_BLOCKS or more."""
    logs: dict[Count | None, dict[int, float]] = {}
    adaptive = adaptive_tokens(run)
    for batch in _timed(run):
        tokens = adaptive if batch.cell.drafts is ADAPTIVE else _tokens(run.header, [batch])
        value = None if tokens is None else _log_step(batch, tokens)
        if value is not None:
            logs.setdefault(batch.cell.drafts, {})[batch.block] = value
    base = logs.pop(0, {})
    pairs = {k: [row[b] - base[b] for b in sorted(row.keys() & base)] for k, row in logs.items()}
    known = {k: mean_of(np.array(values)) for k, values in pairs.items() if values}
    bounded = {k: estimate for k, estimate in known.items() if estimate.is_bounded}
    offset = noise_floor(bounded.get(None))
    return {k: replace(e, offset=0.0 if k is None else offset) for k, e in bounded.items()}


def adaptive_tokens(*runs: RunData) -> float | None:
    """Tokens of a step with adaptive verification, in all timed blocks; None without one."""
    batches = [b for run in runs for b in _timed(run) if b.cell.drafts is ADAPTIVE]
    return _tokens(runs[0].header, batches) if batches else None


def _timed(run: RunData) -> list[BatchRecord]:
    """Batches of the timed blocks that ended."""
    return [b for b in run.batches if b.phase == Phase.TIMED and (b.phase, b.block) in run.finished]


def _tokens(header: RunHeader, batches: Sequence[BatchRecord]) -> float:
    """Tokens of a step of these batches' requests."""
    steps = [step for batch in batches for step in steps_of(header, batch)]
    number, accepted = sum(n for n, _ in steps), sum(a for _, a in steps)
    return 1 + accepted / number if number else 1.0


def _log_step(batch: BatchRecord, tokens: float) -> float | None:
    """Log time of a step of a batch's requests; None if vLLM kept no times."""
    if batch.request_times is None or not batch.request_times.tpot_ms:
        return None
    return log(fmean(batch.request_times.tpot_ms) * tokens)


def steps_of(header: RunHeader, batch: BatchRecord) -> Sequence[tuple[float, float]]:
    """Each request's steps after its first token, and the accepted drafts that it got in them.

    Older runs do not say what a request got: there it is the batch's mean. Prompt lookup finds
    drafts in some steps only, and the others, which give one token, have no window.
    """
    if batch.request_tokens:
        return [(tokens - 1 - drafts, drafts) for tokens, drafts in batch.request_tokens]
    after_first = batch.output_tokens / batch.requests - 1
    looks_up = header.pair.method in WITHOUT_DRAFTER
    steps = [max(n, after_first - a) if looks_up else n for n, a in batch.request_acceptance]
    return [(number, after_first - number) for number in steps]
