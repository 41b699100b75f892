"""Interleaved windows: their ratios beside those of whole batches, and the effect in parts."""

from collections.abc import Sequence
from statistics import median

from nwor_bench.analysis.analyse import Analysis
from nwor_bench.analysis.effects import PairEffect, Split, sham_windows, why_carry_over_untested
from nwor_bench.instruments.robust import RatioInterval
from nwor_bench.records.cell import SWITCHED, Cell
from nwor_bench.records.fallback_reasons import in_words
from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult, Verdict
from nwor_bench.report.document import Block, Bullets, Paragraph, Section, Table, table
from nwor_bench.report.text import NOT_MEASURED, change, count, percent, plural, with_bounds

TITLE = "Interleaved windows"

NOTE = (
    "Cells alternate within a batch. A group is four runs of a few windows, A B B A or B A A B, so "
    "both cells saw the same batch, context and clocks; the first window of each run is left out. "
    "A group's effect is the mean log time of B's windows minus that of A's; the ratio is Huber's "
    "robust location over the groups."
)
IS_SHAM = (
    "The A/A cell switches as stage does (attention patched and restored; with full CUDA graphs a "
    "second set, captured as stock) and computes what off x off computes. Its ratio shows the "
    "effect of switching itself."
)
NO_SHAM = "The A/A cell switched nothing, so its ratio cannot show a bias of switching."

SHAM_REASONS = {
    "nothing_to_switch": "on this runner stage patches nothing and has no graphs",
    "full_graph_of_another_shape": "vLLM replayed a CUDA graph of a shape that stage lacks",
}
"""In words; other reasons are printed unchanged."""

UNTESTED = "could not be tested"
_WITHOUT_TIME = (Verdict.INVALID, Verdict.INEFFECTIVE)
_DIGITS = 4
"""Of these ratios: most are known to a tenth of a per cent."""


def interleaved_section(analysis: Analysis) -> Section | None:
    """Ratios, left-out groups and the effect in parts; None for a run of whole batches."""
    cells = analysis.cells
    without = {cell.cell for cell in cells if cell.verdict in _WITHOUT_TIME}
    results = {cell.cell: cell for cell in cells}
    effects = [e for e in analysis.effects if not {e.pair.treated, e.pair.reference} & without]
    if not effects:
        return None
    blocks: list[Block] = [
        Paragraph(NOTE),
        _ratios(effects, results),
        Paragraph(sham_words(analysis.run)),
    ]
    seen = what_batches_show(cells)
    blocks += [Paragraph(seen)] if seen else []
    remarks = [*_left_out(effects), *_untested(effects)]
    blocks += [Bullets(tuple(remarks))] if remarks else []
    blocks += [_split_table(analysis.splits)] if analysis.splits else []
    return Section(TITLE, tuple(blocks))


def split_lines(parts: Sequence[Split]) -> list[str]:
    """`stage x graph, 2.8 % less: attention 1.5 % less +- 0.10, writes 1.3 % less +- 0.07.`

    One sentence for each staging cell whose effect is split.
    """
    return [
        f"{part.cell.label}, {change(part.total.ratio)}: attention {_part(part.attention)}, writes "
        f"{_part(part.writes)}."
        for part in parts
    ]


def sham_words(run: RunData) -> str:
    """What the A/A cell switched, and so what its ratio shows."""
    counts = sham_windows(run)
    switched = counts.pop(SWITCHED, 0)
    without = ", ".join(
        f"{count(n)} ({SHAM_REASONS.get(why, why)})" for why, n in sorted(counts.items())
    )
    rest = f" Windows of it that switched nothing: {without}." if without else ""
    return f"{IS_SHAM if switched else NO_SHAM}{rest}"


def what_batches_show(cells: Sequence[CellResult]) -> str | None:
    """The smallest bias of windows that whole batches would show; None without such a check."""
    found = [cell.visible_bias for cell in cells if cell.visible_bias is not None]
    if not found:
        return None
    ends = f", {percent(min(found))} to {percent(max(found))}" if len(found) > 1 else ""
    return (
        f"Whole batches would show a bias of the windows' ratios of {percent(median(found))} or "
        f"more (median of {plural(len(found), 'cell')}{ends}). They miss a smaller one in more "
        "than half of the runs."
    )


def _pair_name(effect: PairEffect) -> str:
    """`stage x graph`, or `stage x graph over control x off`."""
    treated, reference = effect.pair.treated, effect.pair.reference
    return treated.label if reference.is_baseline else f"{treated.label} over {reference.label}"


def _ratios(effects: Sequence[PairEffect], results: dict[Cell, CellResult]) -> Table:
    rows = []
    for effect in effects:
        own = results.get(effect.pair.treated) if effect.pair.reference.is_baseline else None
        found = effect.decisive
        rows.append([
            _pair_name(effect),
            NOT_MEASURED if own is None else own.interleaved or NOT_MEASURED,
            _bounds(found.robust if found else None),
            NOT_MEASURED if own is None else _batches(own),
            _bounds(effect.carry_over) if effect.carry_over else UNTESTED,
            count(len(effect.groups)),
            count(sum(effect.left_out.values())),
        ])  # fmt: skip
    heads = ["Cell", "Decided by", "Windows", "Whole batches", "Carry-over", "Groups", "Left out"]
    caption = "Time over off x off [95 % interval] by interleaved windows and by whole batches"
    return table(heads, rows, numbers_from=2, caption=caption)


def _batches(cell: CellResult) -> str:
    if cell.ratio_batches is None:
        return NOT_MEASURED
    low, high = cell.ratio_batches_low, cell.ratio_batches_high
    return with_bounds(cell.ratio_batches, low, high, _DIGITS)


def _bounds(ratio: RatioInterval | None) -> str:
    if ratio is None:
        return NOT_MEASURED
    return with_bounds(ratio.ratio, ratio.low, ratio.high, _DIGITS)


def _left_out(effects: Sequence[PairEffect]) -> list[str]:
    return [
        f"{_pair_name(effect)}: groups left out: "
        f"{', '.join(f'{count(n)} {in_words(why)}' for why, n in sorted(effect.left_out.items()))}."
        for effect in effects
        if effect.left_out
    ]


def _untested(effects: Sequence[PairEffect]) -> list[str]:
    return [
        f"{_pair_name(effect)}: carry-over {UNTESTED} ({why})."
        for effect in effects
        if (why := why_carry_over_untested(effect)) is not None
    ]


def _part(ratio: RatioInterval) -> str:
    return f"{change(ratio.ratio)} +- {100 * ratio.half_width:.2f}"


def _split_table(parts: Sequence[Split]) -> Table:
    rows = [
        [part.cell.label, name, over, _bounds(ratio), change(ratio.ratio)]
        for part in parts
        for name, over, ratio in (
            ("total", f"{part.cell.label} / off x off", part.total),
            ("attention", f"{part.control.label} / off x off", part.attention),
            ("writes, validation and commit", f"{part.cell.label} / {part.control.label}",
             part.writes),
        )
    ]  # fmt: skip
    heads = ["Cell", "Part", "Compared", "Ratio", "Change"]
    caption = "The effect in parts: control x off has stage's attention and off's writes"
    return table(heads, rows, numbers_from=3, caption=caption)
