"""Change of one cell from BASE to NEW: its time, and its ratio to off x off. Pure.

The two runs are different processes, perhaps of different days. Blocks with the same prompts, seed
and temperature are compared in pairs, which removes the prompts' lengths from the noise. With fewer
than MIN_BLOCKS such blocks the two sides are independent samples (Welch). The ratio to off x off is
measured within each run, so a shift of a whole run cancels in its change.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from nwor_bench.analysis.cell_data import CellData
from nwor_bench.analysis.comparing.stored_run import StoredRun
from nwor_bench.analysis.effects import WINDOWS, WORK_MS
from nwor_bench.analysis.paired import LATENCY_MS, WINDOW_MS, pair_times
from nwor_bench.records.cell import Cell
from nwor_bench.records.types import CellResult
from nwor_bench.stats.interval import Interval, quotient
from nwor_bench.stats.paired import MIN_BLOCKS, paired_ratio
from nwor_bench.stats.robust import from_ends

ByBlock = Mapping[int, float]


@dataclass(frozen=True)
class Change:
    """NEW over BASE (1.02 = 2 % more time), with a 95 % interval if there are enough blocks.

    Attributes:
        measure: WINDOW_MS or LATENCY_MS; DEVICE_MS, WALL_MS or WORK_MS for interleaved windows.
        paired: True if blocks of the same prompts were compared in pairs.
        base_blocks, new_blocks: blocks behind the interval.
        why_open: why there is no interval.
    """

    measure: str
    ratio: float
    interval: Interval | None
    paired: bool = False
    base_blocks: int | None = None
    new_blocks: int | None = None
    why_open: str | None = None


@dataclass(frozen=True)
class _Side:
    """One run's number, by block and over all blocks."""

    ratio: Interval
    blocks: ByBlock


def time_change(base: StoredRun, new: StoredRun, cell: Cell) -> Change | None:
    """Change of the cell's time per window, or per batch if a block's windows have no time.

    None if a side has no time at all, such as an INVALID cell.
    """
    before, after = base.cells[cell], new.cells[cell]
    if before.latency_ms_p50 is None or after.latency_ms_p50 is None:
        return None
    ours, theirs = new.data[cell], base.data[cell]
    same = same_blocks(theirs, ours)
    if len(same) >= MIN_BLOCKS:
        times = pair_times(_only(ours, same), _only(theirs, same))
        assert times is not None  # the blocks are timed in both
        # _change makes the interval, so that pairing is in one place.
        above = dict(zip(times.blocks, times.treated, strict=True))
        below = dict(zip(times.blocks, times.baseline, strict=True))
        return _change(times.compared, _side(below), _side(above), same)
    for measure in (WINDOW_MS, LATENCY_MS):
        below, above = _times(theirs, measure), _times(ours, measure)
        if below and above:
            return _change(measure, _side(below), _side(above), same)
    return None


def ratio_change(base: StoredRun, new: StoredRun, cell: Cell) -> Change | None:
    """Change of the cell's ratio to off x off; None if a run has no such ratio."""
    if base.cells[cell].ratio_to_off is None or new.cells[cell].ratio_to_off is None:
        return None
    interleaved = _interleaved(base.cells[cell], new.cells[cell])
    if interleaved is not None:
        return interleaved
    for measure in (WINDOW_MS, LATENCY_MS):
        below, above = _ratio_side(base, cell, measure), _ratio_side(new, cell, measure)
        if below is not None and above is not None:
            return _change(measure, below, above, same_blocks(base.data[cell], new.data[cell]))
    return None


def work_change(before: CellResult, after: CellResult) -> Change | None:
    """Change of the ratio of the GPU's own work; None if a run has no such ratio."""
    sides = [
        (cell.work_ratio, cell.work_ratio_ci_low, cell.work_ratio_ci_high, cell.groups)
        for cell in (before, after)
    ]
    return _of_groups(WORK_MS, sides, before, after)


def _interleaved(before: CellResult, after: CellResult) -> Change | None:
    """Change of ratios that are both of neighbouring windows on the same clock; else None."""
    sides = [
        (cell.ratio_to_off, cell.ratio_ci_low, cell.ratio_ci_high, cell.groups)
        for cell in (before, after)
        if cell.interleaved == WINDOWS and cell.compared == after.compared
    ]
    return _of_groups(after.compared, sides, before, after)


def _of_groups(
    measure: str | None,
    sides: Sequence[tuple[float | None, float | None, float | None, int | None]],
    before: CellResult,
    after: CellResult,
) -> Change | None:
    found = [
        from_ends(ratio, low, high, groups)
        for ratio, low, high, groups in sides
        if ratio is not None and low is not None and high is not None and groups is not None
    ]
    if len(found) < 2 or measure is None:
        return None
    both = quotient(found[1], found[0])
    counts = (before.batches, after.batches)
    return Change(measure, found[1].value / found[0].value, both, False, *counts)


def same_blocks(base: CellData, new: CellData) -> set[int]:
    """Blocks that both sides timed with the same prompts, seed and temperature."""
    ours, theirs = _work(new), _work(base)
    return {block for block, work in ours.items() if theirs.get(block) == work}


def _work(cell: CellData) -> dict[int, list[tuple[str, int, float]]]:
    work: dict[int, list[tuple[str, int, float]]] = {}
    for batch in cell.timed:
        each = (batch.prompt_digest, batch.seed, batch.temperature)
        work.setdefault(batch.block, []).append(each)
    return work


def _change(measure: str, base: _Side, new: _Side, same: Collection[int]) -> Change:
    """Paired over `same` blocks if there are enough, else unpaired."""
    common = sorted(base.blocks.keys() & new.blocks.keys() & set(same))
    if len(common) >= MIN_BLOCKS:
        paired = paired_ratio(
            [new.blocks[block] for block in common], [base.blocks[block] for block in common]
        )
        return Change(measure, paired.value, paired, True, len(common), len(common))
    below, above = (s.ratio.count if s.ratio.is_bounded else None for s in (base, new))
    both = quotient(new.ratio, base.ratio)
    interval, why = (both, None) if both.is_bounded else (None, _too_few(base, new))
    ratio = new.ratio.value / base.ratio.value
    return Change(measure, ratio, interval, False, below, above, why)


def _too_few(base: _Side, new: _Side) -> str:
    sides = (("BASE", base), ("NEW", new))
    parts = [f"{n} has {len(s.blocks)}" for n, s in sides if len(s.blocks) < MIN_BLOCKS]
    return f"an interval needs {MIN_BLOCKS} timed blocks, and {' and '.join(parts)}"


def _side(values: ByBlock) -> _Side:
    numbers = [values[block] for block in sorted(values)]
    ones = [1.0] * len(numbers)
    return _Side(paired_ratio(numbers, ones), values)


def _ratio_side(run: StoredRun, cell: Cell, measure: str) -> _Side | None:
    """The cell's ratio to off x off by that measure; None if the run lacks it."""
    own, baseline = run.data[cell], run.baseline_of(cell)
    if baseline is None:
        return None
    if measure == LATENCY_MS:
        above, below = _times(own, measure), _times(baseline, measure)
        blocks = {b: above[b] / below[b] for b in above.keys() & below.keys()}
        return _side(blocks) if blocks else None
    times = pair_times(own, baseline)
    if times is None or times.compared != measure:
        return None
    ratios = [a / b for a, b in zip(times.treated, times.baseline, strict=True)]
    return _side(dict(zip(times.blocks, ratios, strict=True)))


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
