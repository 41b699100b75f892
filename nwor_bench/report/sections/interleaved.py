"""The section on windows in which cells took turns: their ratios beside those of whole batches."""

from collections.abc import Sequence
from statistics import median

from nwor_bench.analysis.findings.interleaved import slope_words
from nwor_bench.analysis.interleaved.agreement import why_carry_over_untested
from nwor_bench.analysis.interleaved.effects import (
    ClockEffect,
    LengthEffect,
    PairEffect,
    pair_effects,
)
from nwor_bench.analysis.interleaved.robust import Estimate
from nwor_bench.analysis.interleaved.sham import sham_windows
from nwor_bench.analysis.interleaved.split import splits
from nwor_bench.analysis.statistics import RatioInterval
from nwor_bench.records.cell import SWITCHED, Cell
from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult, Verdict
from nwor_bench.report.document import Block, Bullets, Paragraph, Section, Table, table
from nwor_bench.report.sections.running_estimate import running_figure
from nwor_bench.report.sections.split import DIGITS, bounds, split_sentence, split_table
from nwor_bench.report.text import NOT_MEASURED, count, percent, plural, with_bounds

TITLE = "Windows in turn"

NOTE = (
    "Cells took turns within a batch: a group is four runs of a few windows, A B B A or B A A B, "
    "so that both cells saw the same batch, context and clocks. The first window of each run is "
    "left out. A group's effect is the mean log time of B's windows less that of A's; the ratio is "
    "Huber's robust location of the groups, the mean ratio counts rare long windows in full."
)

UNTESTED = "could not be tested"

IS_SHAM = (
    "The A/A cell is a sham: its turns switch as those of stage do (attention patched and "
    "restored; under full CUDA graphs a second set, captured as stock), and its windows compute "
    "what off x off computes. Its ratio shows what switching itself does."
)
NO_SHAM = "The A/A cell switched nothing, so its ratio cannot show a bias of switching."

SHAM_REASONS = {
    "nothing_to_switch": "on this runner a turn of stage patches nothing and has no graphs",
    "full_graph_of_another_shape": "vLLM replayed a CUDA graph of a shape that stage has not",
}
"""In words; a reason that is not here stands for itself."""

_WITHOUT_TIME = (Verdict.INVALID, Verdict.INEFFECTIVE)


def interleaved_section(run: RunData, cells: Sequence[CellResult]) -> Section | None:
    """Ratios, left-out groups, run lengths and clocks; None for a run without turns."""
    without = {cell.cell for cell in cells if cell.verdict in _WITHOUT_TIME}
    results = {cell.cell: cell for cell in cells}
    every = pair_effects(run)
    effects = [e for e in every if not {e.pair.treated, e.pair.reference} & without]
    if not effects:
        return None
    blocks: list[Block] = [Paragraph(NOTE), Paragraph(sham_words(run)), _ratios(effects, results)]
    seen = what_batches_show(cells)
    blocks += [Paragraph(seen)] if seen else []
    left_out = _left_out(effects)
    if left_out:
        blocks.append(Bullets(left_out))
    figure = running_figure(effects, run)
    parts = splits(effects, cells)
    blocks += [figure] if figure else []
    if parts:
        blocks += [*(Paragraph(split_sentence(part)) for part in parts), split_table(parts)]
    blocks.append(_lengths(effects))
    untested = _untested(effects)
    blocks += [Bullets(untested)] if untested else []
    clocks = _clocks(effects)
    if clocks is not None:
        blocks += [clocks, *_slopes(effects)]
    return Section(TITLE, tuple(blocks), folded=False)


def sham_words(run: RunData) -> str:
    """What the A/A cell switched, and so what its ratio can show."""
    counts = sham_windows(run)
    switched = counts.pop(SWITCHED, 0)
    without = ", ".join(
        f"{count(n)} ({SHAM_REASONS.get(why, why)})" for why, n in sorted(counts.items())
    )
    told = f" Windows of it that switched nothing: {without}." if without else ""
    if not switched:
        return f"{NO_SHAM}{told}"
    return f"{IS_SHAM}{told}"


def what_batches_show(cells: Sequence[CellResult]) -> str | None:
    """The bias of windows that whole batches would show; None without such a check."""
    found = [cell.visible_bias for cell in cells if cell.visible_bias is not None]
    if not found:
        return None
    ends = f", {percent(min(found))} to {percent(max(found))}" if len(found) > 1 else ""
    return (
        f"Whole batches show a bias of the windows' ratios from {percent(median(found))} on "
        f"(median of {plural(len(found), 'cell')}{ends}). They see a smaller one in less than half "
        "of the runs."
    )


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
        slope = _bounds(effect.carry_over) if effect.carry_over else UNTESTED
        rows.append([pair_name(effect), *cells, slope])
    heads = ["Cell", *(f"Runs of {length} (groups)" for length in lengths), "Carry-over"]
    caption = "Ratio by the length of runs: without carry-over it does not depend on it"
    return table(heads, rows, caption=caption)


def _untested(effects: Sequence[PairEffect]) -> tuple[str, ...]:
    return tuple(
        f"{pair_name(effect)}: carry-over {UNTESTED} ({why})."
        for effect in effects
        if (why := why_carry_over_untested(effect)) is not None
    )


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
