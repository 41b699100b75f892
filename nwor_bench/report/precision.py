"""Measurement precision: block by block, window by window, and of each ratio."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nwor_bench.analysis.analyse import Analysis
from nwor_bench.analysis.cell_data import CellData
from nwor_bench.analysis.paired import pair_times
from nwor_bench.records.store import RunData
from nwor_bench.records.types import Cell, CellResult, Phase, Verdict
from nwor_bench.report.document import Block, Paragraph, Section, Table, table
from nwor_bench.report.text import (
    NOT_MEASURED,
    compared_time,
    count,
    decimal,
    joined,
    p_value,
    percent,
    plural,
)

TITLE = "Measurement precision"

_WITHOUT_TIME = (Verdict.INVALID, Verdict.INEFFECTIVE)

Times = NDArray[np.float64]


@dataclass(frozen=True)
class _Blocks:
    """Each timed block's ratios and clocks, by its number, in time order."""

    ratios: dict[Cell, dict[int, float]]
    clocks: dict[int, float]
    """Lowest SM clock in MHz."""
    throttled: dict[int, float]
    """Milliseconds in which power or temperature lowered the clocks."""


def precision_section(analysis: Analysis) -> Section:
    """Tables of windows, ratios and blocks."""
    run, cells, found = analysis.run, analysis.cells, _blocks(analysis)
    blocks: list[Block] = [*_window_times(analysis), _ratios(cells)]
    facts = _warm_up_and_stop(run)
    if facts:
        blocks.append(Paragraph(facts))
    return Section(TITLE, (*blocks, _block_table(found, cells)), folded=True)


def _ratios(cells: Sequence[CellResult]) -> Table:
    rows = [
        [c.label, c.compared or NOT_MEASURED, count(c.matched_windows),
         count(c.unmatched_windows), percent(c.half_width, 2), percent(c.smallest_effect, 2),
         p_value(c.p_value_holm if c.p_value_holm is not None else c.p_value),
         ", ".join(map(str, c.outlier_blocks)) or NOT_MEASURED]
        for c in cells
        if c.ratio_to_off is not None
    ]  # fmt: skip
    heads = ["Cell", "Compared", "Matched windows", "Left out", "Interval +-",
             "Smallest visible effect", "p", "Outlying blocks"]  # fmt: skip
    caption = "Precision of each ratio; the A/A cell's row is the noise"
    return table(heads, rows, numbers_from=2, caption=caption)


def _warm_up_and_stop(run: RunData) -> str:
    warmup, stopped = run.header.warmup, run.header.stopped
    parts = []
    if warmup:
        unsteady = warmup.not_steady
        how = f"not steady ({unsteady})" if unsteady else "steady (no trend, spread within 10 %)"
        parts.append(f"Warm-up took {plural(warmup.batches or 0, 'batch')}; then times were {how}.")
    if stopped:
        parts.append(f"Blocks ended by {stopped}.")
    return " ".join(parts)


def _blocks(analysis: Analysis) -> _Blocks:
    compared = {cell.cell for cell in analysis.cells if cell.ratio_to_off is not None}
    run, gathered = analysis.run, analysis.gathered
    baseline = next((own for own in gathered if own.is_baseline), None)
    ratios: dict[Cell, dict[int, float]] = {}
    for own in gathered:
        pairs = pair_times(own, baseline) if baseline and own.cell in compared else None
        if pairs is not None:
            times = zip(pairs.blocks, pairs.treated, pairs.baseline, strict=True)
            ratios[own.cell] = {block: above / below for block, above, below in times}
    clocks: dict[int, float] = {}
    throttled: dict[int, float] = {}
    for batch in (batch for batch in run.batches if batch.phase == Phase.TIMED):
        clock = batch.conditions.get("gpu_sm_clock_mhz")
        if clock is not None:
            clocks[batch.block] = min(clock, clocks.get(batch.block, clock))
        held = batch.conditions.get("gpu_throttled_ms")
        if held is not None:
            throttled[batch.block] = throttled.get(batch.block, 0.0) + held
    return _Blocks(ratios, dict(sorted(clocks.items())), dict(sorted(throttled.items())))


def _block_table(found: _Blocks, cells: Sequence[CellResult]) -> Table:
    rows = [
        [str(block), *(decimal(own.get(block), 4) for own in found.ratios.values()),
         decimal(found.clocks.get(block), 0), decimal(found.throttled.get(block), 0)]
        for block in sorted({block for own in found.ratios.values() for block in own})
    ]  # fmt: skip
    heads = ["Block", *(cell.label for cell in found.ratios), "SM clock MHz", "Throttled ms"]
    caption = f"{compared_time(cells).capitalize()} over that of off x off, in time order"
    return table(heads, rows, caption=caption)


def _window_times(analysis: Analysis) -> list[Block]:
    """A table of all timed windows' times; a sentence if there are none."""
    idle = {cell.cell for cell in analysis.cells if cell.verdict in _WITHOUT_TIME}
    gathered = [own for own in analysis.gathered if own.cell not in idle]
    times = {own.cell: found for own in gathered if len(found := _times(own)) > 1}
    if not times:
        return [Paragraph("No valid window time was measured.")]
    blocks: list[Block] = [_window_table(times)]
    left_out = [cell.label for cell in analysis.cells if cell.cell in idle]
    if left_out:
        blocks.append(Paragraph(f"Left out, because their times do not count: {joined(left_out)}."))
    return blocks


def _times(cell: CellData) -> Times:
    return np.array([window.wall_ms for window in cell.windows if window.wall_ms is not None])


def _window_table(times: dict[Cell, Times]) -> Table:
    points = {"Least": 0.0, "1 %": 0.01, "25 %": 0.25, "Median": 0.5, "75 %": 0.75, "99 %": 0.99,
              "Most": 1.0}  # fmt: skip
    rows = [
        [cell.label, count(len(own)),
         *(decimal(float(value), 2) for value in np.quantile(own, list(points.values())))]
        for cell, own in times.items()
    ]  # fmt: skip
    caption = "Window times in milliseconds: least, percentiles and most"
    return table(["Cell", "Windows", *points], rows, caption=caption)
