"""The section on windows in which cells took turns: their ratios beside those of whole batches."""

from collections.abc import Sequence

from nwor_bench.analysis.findings.interleaved import slope_words
from nwor_bench.analysis.interleaved.effects import (
    ClockEffect,
    LengthEffect,
    PairEffect,
    pair_effects,
)
from nwor_bench.analysis.interleaved.robust import Estimate
from nwor_bench.analysis.interleaved.split import splits
from nwor_bench.analysis.statistics import RatioInterval
from nwor_bench.records.cell import Cell
from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult, Verdict
from nwor_bench.report.document import Block, Bullets, Paragraph, Section, Table, table
from nwor_bench.report.sections.running_estimate import running_figure
from nwor_bench.report.sections.split import DIGITS, bounds, split_sentence, split_table
from nwor_bench.report.text import NOT_MEASURED, count, percent, with_bounds

TITLE = "Windows in turn"

NOTE = (
    "Cells took turns within a batch: a group is four runs of a few windows, A B B A or B A A B, "
    "so that both cells saw the same batch, context and clocks. The first window of each run is "
    "left out. A group's effect is the mean log time of B's windows less that of A's; the ratio is "
    "Huber's robust location of the groups, the mean ratio counts rare long windows in full."
)

_WITHOUT_TIME = (Verdict.INVALID, Verdict.INEFFECTIVE)


def interleaved_section(run: RunData, cells: Sequence[CellResult]) -> Section | None:
    """Ratios, left-out groups, run lengths and clocks; None for a run without turns."""
    without = {cell.cell for cell in cells if cell.verdict in _WITHOUT_TIME}
    results = {cell.cell: cell for cell in cells}
    every = pair_effects(run)
    effects = [e for e in every if not {e.pair.treated, e.pair.reference} & without]
    if not effects:
        return None
    blocks: list[Block] = [Paragraph(NOTE), _ratios(effects, results)]
    left_out = _left_out(effects)
    if left_out:
        blocks.append(Bullets(left_out))
    figure = running_figure(effects, run)
    parts = splits(effects, cells)
    blocks += [figure] if figure else []
    if parts:
        blocks += [*(Paragraph(split_sentence(part)) for part in parts), split_table(parts)]
    blocks.append(_lengths(effects))
    clocks = _clocks(effects)
    if clocks is not None:
        blocks += [clocks, *_slopes(effects)]
    return Section(TITLE, tuple(blocks), folded=False)


def pair_name(effect: PairEffect) -> str:
    """`stage x graph`, or `stage x graph over control x off`."""
    treated, reference = effect.pair.treated, effect.pair.reference
    return treated.label if reference.is_baseline else f"{treated.label} over {reference.label}"


def _ratios(effects: Sequence[PairEffect], results: dict[Cell, CellResult]) -> Table:
    rows = []
    for effect in effects:
        own = results.get(effect.pair.treated) if effect.pair.reference.is_baseline else None
        found = effect.decisive
        rows.append(
            [
                pair_name(effect),
                NOT_MEASURED if own is None else own.interleaved or NOT_MEASURED,
                _on(effect.device),
                _on(effect.host),
                NOT_MEASURED if found is None else _bounds(found.mean),
                NOT_MEASURED if own is None else _batches(own),
                count(len(effect.groups)),
                count(sum(effect.left_out.values())),
            ]
        )
    heads = ["Cell", "Decided by", "Device's clock", "Host's clock", "Mean ratio",
             "Whole batches", "Groups", "Left out"]  # fmt: skip
    caption = "Time over off x off [95 % interval] by neighbouring windows and by whole batches"
    return table(heads, rows, numbers_from=2, caption=caption)


def _on(effect: ClockEffect | None) -> str:
    return NOT_MEASURED if effect is None else _bounds(effect.robust)


def _batches(cell: CellResult) -> str:
    low, high = cell.ratio_batches_low, cell.ratio_batches_high
    if cell.ratio_batches is None:
        return NOT_MEASURED
    return with_bounds(cell.ratio_batches, low, high, DIGITS)


def _bounds(ratio: RatioInterval | None) -> str:
    return NOT_MEASURED if ratio is None else bounds(ratio)


def _left_out(effects: Sequence[PairEffect]) -> tuple[str, ...]:
    return tuple(
        f"{pair_name(effect)}: left out "
        f"{', '.join(f'{count(n)} ({why})' for why, n in sorted(effect.left_out.items()))}."
        for effect in effects
        if effect.left_out
    )


def _lengths(effects: Sequence[PairEffect]) -> Table:
    """A row a cell: its ratio by the length of runs, and their slope."""
    lengths = sorted({each.run_length for effect in effects for each in effect.by_length})
    rows = []
    for effect in effects:
        own = {each.run_length: each for each in effect.by_length}
        cells = [_length(own.get(length)) for length in lengths]
        rows.append([pair_name(effect), *cells, _bounds(effect.carry_over)])
    heads = ["Cell", *(f"Runs of {length} (groups)" for length in lengths), "Carry-over"]
    caption = "Ratio by the length of runs: without carry-over it does not depend on it"
    return table(heads, rows, caption=caption)


def _length(own: LengthEffect | None) -> str:
    return NOT_MEASURED if own is None else f"{_bounds(own.ratio)} ({count(own.groups)})"


def _clocks(effects: Sequence[PairEffect]) -> Table | None:
    """A row a bin of SM clocks and cell; None if no clock was recorded."""
    rows = [
        (each.low_mhz, [f"{each.low_mhz} to {each.high_mhz}", pair_name(effect),
                        count(each.groups), percent(each.share), _bounds(each.ratio)])
        for effect in effects
        for each in effect.conditions.clocks
    ]  # fmt: skip
    if not rows:
        return None
    ordered = [row for _, row in sorted(rows, key=lambda each: each[0])]
    heads = ["SM clock MHz", "Cell", "Groups", "Share", "Ratio"]
    caption = "Groups by the SM clock at the end of their batch"
    return table(heads, ordered, numbers_from=2, caption=caption)


def _slopes(effects: Sequence[PairEffect]) -> list[Block]:
    """By how much each ratio goes with clocks and throttling, as far as these varied."""
    lines = []
    for effect in effects:
        found = effect.conditions
        parts = _parts(found.per_100_mhz, "for 100 MHz more")
        parts += _parts(found.if_throttled, "while throttled")
        if found.throttled_share is not None:
            parts.append(f"{percent(found.throttled_share)} of its groups in throttled batches")
        if parts:
            lines.append(f"{pair_name(effect)}: {'; '.join(parts)}.")
    if not lines:
        return []
    lead = Paragraph("Change of the ratio with the GPU's clock and throttling [95 % interval]:")
    return [lead, Bullets(tuple(lines))]


def _parts(slope: Estimate | None, when: str) -> list[str]:
    return [] if slope is None else [f"{slope_words(slope)} {when}"]
