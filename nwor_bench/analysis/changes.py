"""Change of one cell from BASE to NEW: its time, and its ratio to off x off. Pure.

The two runs are different processes, perhaps of different days. Blocks with the same prompts, seed
and temperature are compared in pairs, which removes the prompts' lengths from the noise. With fewer
than MIN_BLOCKS such blocks the two sides are independent samples (Welch). The ratio to off x off is
measured within each run, so a shift of a whole run cancels in its change.

A draft count's change is that of its tokens per second over k = 0:

    log time per token(k) = log time of a window(k) / time(0) - log tokens of a window(k)

Above 1 is slower, as for other cells. Times come from each run's own groups and are independent.
Tokens are compared on the prompts of both runs: if these took as many windows in both, their change
is 0, without an error. A staged count is compared with the same count in mode off, which has
the same tokens.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log, log1p

import numpy as np

from nwor_bench.analysis.cell_data import CellData
from nwor_bench.analysis.draft_tokens import MIN_PROMPTS, by_prompt, named_rates, requests_of
from nwor_bench.analysis.effects import WINDOWS, WORK_MS
from nwor_bench.analysis.engine_times import adaptive_tokens
from nwor_bench.analysis.paired import LATENCY_MS, WINDOW_MS, pair_times
from nwor_bench.analysis.stored_run import StoredRun
from nwor_bench.analysis.worth import Measured, arm_of, times_of
from nwor_bench.records.cell import ADAPTIVE, Cell, Count, method_of
from nwor_bench.records.types import CellResult
from nwor_bench.stats.interval import Interval, combined, quotient
from nwor_bench.stats.paired import MIN_BLOCKS, paired_ratio

ByBlock = Mapping[int, float]

TIME_PER_TOKEN = "time_per_token"
"""`Change.measure` of a draft count."""


@dataclass(frozen=True)
class Change:
    """NEW over BASE.

    Attributes:
        measure: WINDOW_MS or LATENCY_MS; DEVICE_MS, WALL_MS or WORK_MS for interleaved windows.
        ratio: 1.02 is 2 % more time; unbounded if there are too few blocks.
        paired: True if blocks of the same prompts were compared in pairs.
        base_blocks, new_blocks: blocks behind the interval.
        why_open: why there is no interval.
    """

    measure: str
    ratio: Interval
    paired: bool = False
    base_blocks: int | None = None
    new_blocks: int | None = None
    why_open: str | None = None


def time_change(base: StoredRun, new: StoredRun, cell: Cell) -> Change | None:
    """Change of the cell's time per window, or per batch if a block's windows have no time.

    None if a side has no time at all, such as an INVALID cell.
    """
    if base.cells[cell].latency_ms_p50 is None or new.cells[cell].latency_ms_p50 is None:
        return None
    theirs, ours = base.data[cell], new.data[cell]
    same = _same_blocks(theirs, ours)
    if len(same) >= MIN_BLOCKS:
        times = pair_times(_only(ours, same), _only(theirs, same))
        assert times is not None  # the blocks are timed in both
        below = dict(zip(times.blocks, times.baseline, strict=True))
        above = dict(zip(times.blocks, times.treated, strict=True))
        return _change(times.compared, below, above, same)
    for measure in (WINDOW_MS, LATENCY_MS):
        below, above = _times(theirs, measure), _times(ours, measure)
        if below and above:
            return _change(measure, below, above, same)
    return None


def ratio_change(base: StoredRun, new: StoredRun, cell: Cell) -> Change | None:
    """Change of the cell's ratio to off x off; None if a run has no such ratio."""
    before, after = base.cells[cell], new.cells[cell]
    if before.ratio is None or after.ratio is None:
        return None
    if before.interleaved == after.interleaved == WINDOWS and before.compared == after.compared:
        ratio = quotient(after.ratio, before.ratio)
        return Change(str(after.compared), ratio, False, before.batches, after.batches)
    for measure in (WINDOW_MS, LATENCY_MS):
        below, above = _ratios(base, cell, measure), _ratios(new, cell, measure)
        if below and above:
            return _change(measure, below, above, _same_blocks(base.data[cell], new.data[cell]))
    return None


def work_change(before: CellResult, after: CellResult) -> Change | None:
    """Change of the ratio of the GPU's own work; None if a run has no such ratio."""
    if before.work is None or after.work is None:
        return None
    ratio = quotient(after.work, before.work)
    return Change(WORK_MS, ratio, False, before.batches, after.batches)


def _same_blocks(base: CellData, new: CellData) -> set[int]:
    """Blocks that both sides timed with the same prompts, seed and temperature."""
    ours, theirs = _work(new), _work(base)
    return {block for block, work in ours.items() if theirs.get(block) == work}


def _work(cell: CellData) -> dict[int, list[tuple[str, int, float]]]:
    work: dict[int, list[tuple[str, int, float]]] = defaultdict(list)
    for batch in cell.timed:
        work[batch.block].append((batch.prompt_digest, batch.seed, batch.temperature))
    return work


def _change(measure: str, base: ByBlock, new: ByBlock, same: Collection[int]) -> Change:
    """Paired over `same` blocks if there are enough, else unpaired."""
    common = sorted(base.keys() & new.keys() & set(same))
    if len(common) >= MIN_BLOCKS:
        pairs = [new[block] for block in common], [base[block] for block in common]
        return Change(measure, paired_ratio(*pairs), True, len(common), len(common))
    sides = []
    for blocks in (base, new):
        values = [blocks[block] for block in sorted(blocks)]
        ones = [1.0] * len(values)
        sides.append(paired_ratio(values, ones))
    before, after = sides
    both = quotient(after, before)
    few = [
        f"{name} has {len(blocks)}"
        for name, blocks in (("BASE", base), ("NEW", new))
        if len(blocks) < MIN_BLOCKS
    ]
    why = f"an interval needs {MIN_BLOCKS} timed blocks, and {' and '.join(few)}"
    return Change(
        measure,
        both,
        base_blocks=before.count if before.is_bounded else None,
        new_blocks=after.count if after.is_bounded else None,
        why_open=None if both.is_bounded else why,
    )


def _ratios(run: StoredRun, cell: Cell, measure: str) -> dict[int, float]:
    """Each block's ratio to off x off by that measure; empty if the run lacks it."""
    treated = run.data[cell]
    pair = (data for other, data in run.data.items() if other.pair == cell.pair)
    baseline = next((data for data in pair if data.is_baseline), None)
    if baseline is None:
        return {}
    if measure == LATENCY_MS:
        above, below = _times(treated, measure), _times(baseline, measure)
        return {block: above[block] / below[block] for block in above.keys() & below.keys()}
    times = pair_times(treated, baseline)
    if times is None or times.compared != measure:
        return {}
    ratios = [a / b for a, b in zip(times.treated, times.baseline, strict=True)]
    return dict(zip(times.blocks, ratios, strict=True))


def _times(cell: CellData, measure: str) -> dict[int, float]:
    """Each block's mean window time, or its latency; empty if a block has no time.

    Windows without a time are left out (on a GPU the first window after a prefill has none).
    """
    blocks: dict[int, list[float | None]] = {batch.block: [] for batch in cell.timed}
    if measure == LATENCY_MS:
        for batch in cell.timed:
            blocks[batch.block].append(batch.latency_ms)
        return {block: sum(filter(None, values)) for block, values in blocks.items()}
    for window in cell.windows:
        blocks[window.block].append(window.wall_ms)
    known = {b: [v for v in values if v] for b, values in blocks.items()}
    if not all(known.values()):
        return {}
    return {block: sum(values) / len(values) for block, values in known.items()}


def _only(cell: CellData, blocks: Collection[int]) -> CellData:
    """The cell's timed records of those blocks."""
    return replace(
        cell,
        timed=[batch for batch in cell.timed if batch.block in blocks],
        windows=[window for window in cell.windows if window.block in blocks],
    )


def token_time_change(base: Measured, new: Measured, cell: Cell) -> Change | None:
    """Change of the cell's time per token over k = 0, or over the same count in mode off; None
    without enough groups of windows, or requests, in both runs."""
    below, above = (times_of(data).get(arm_of(cell)) for data in (base, new))
    if below is None or above is None:
        return None
    change = combined(above.value - below.value, [above, below])
    if cell.drafts and cell.stock_twin is None:
        tokens = _tokens_change(base, new, cell.drafts)
        if tokens is None:
            return None
        change = combined(change.value - tokens.value, [change, tokens])
    return Change(TIME_PER_TOKEN, change.exp())


def _tokens_change(base: Measured, new: Measured, k: Count) -> Interval | None:
    """Change of the log tokens of a window, on the prompts of both runs; synthetic acceptance
    is what its rates say, and runs with other rates are not compared."""
    if k is ADAPTIVE:  # the blocks' own, which their times hold too
        earlier, later = adaptive_tokens(base.run), adaptive_tokens(new.run)
        if earlier is None or later is None:
            return None
        return Interval.of(log(later / earlier), 0.0, 1, 0)
    if method_of(k) in named_rates(base.run):
        return Interval.of(0.0, 0.0, 1, 0)
    before, after = (by_prompt(requests_of(data.run, [k])) for data in (base, new))
    prompts = sorted(before.keys() & after.keys())
    pairs = [(before[prompt][k], after[prompt][k]) for prompt in prompts]
    if pairs and all(one == other for one, other in pairs):
        return Interval.of(0.0, 0.0, 1, len(pairs))
    if len(pairs) < MIN_PROMPTS:
        return None
    left_out = [_log_change([*pairs[:n], *pairs[n + 1 :]]) for n in range(len(pairs))]
    error = ((len(pairs) - 1) * float(np.var(left_out))) ** 0.5  # the jackknife's
    return Interval.of(_log_change(pairs), error, len(pairs) - 1, len(pairs))


def _log_change(pairs: Sequence[tuple[tuple[float, ...], tuple[float, ...]]]) -> float:
    """Change of the log tokens, from pairs of (windows, accepted drafts) of the same prompt."""
    (before, accepted), (after, now) = (
        (sum(pair[side][0] for pair in pairs), sum(pair[side][1] for pair in pairs))
        for side in (0, 1)
    )
    return log1p(now / after) - log1p(accepted / before)
