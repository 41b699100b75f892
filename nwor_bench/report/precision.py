"""How sure the ratios are: interleaved windows, the effect in parts, window times."""

from collections.abc import Sequence

from nwor_bench.analysis.analyse import Analysis
from nwor_bench.analysis.effects import WORK_MS, PairEffect, Split, sham_windows
from nwor_bench.records.cell import SWITCHED, Cell
from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult, Verdict
from nwor_bench.report.document import Block, Paragraph, Section, Table, table
from nwor_bench.report.text import (
    NOT_MEASURED,
    change,
    count,
    interval,
    joined,
    p_value,
    percent,
    plural,
    sure_ratio,
)

PRECISION = "Measurement precision"

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
"""Decimals of these ratios: most are known to a tenth of a per cent."""


def precision_section(analysis: Analysis) -> Section:
    """Interleaved windows, if cells are interleaved within batches; window times and ratios."""
    facts = _warm_up_and_stop(analysis.run)
    stopped = [Paragraph(facts)] if facts else []
    blocks = (*interleaved_blocks(analysis), _ratios(analysis.cells), *stopped)
    return Section(PRECISION, blocks, folded=True)


def interleaved_blocks(analysis: Analysis) -> list[Block]:
    """Ratios, left-out groups and the effect in parts; nothing for a run of whole batches."""
    cells = analysis.cells
    without = {cell.cell for cell in cells if cell.verdict in _WITHOUT_TIME}
    results = {cell.cell: cell for cell in cells}
    effects = [e for e in analysis.effects if not {e.pair.treated, e.pair.reference} & without]
    if not effects:
        return []
    return [
        Paragraph(NOTE),
        _windows_and_batches(effects, results),
        Paragraph(sham_words(analysis.run)),
        *([_split_table(analysis.splits)] if analysis.splits else []),
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


def _pair_name(effect: PairEffect) -> str:
    """`stage x graph`, or `stage x graph over control x off`."""
    treated, reference = effect.pair.treated, effect.pair.reference
    return treated.label if reference.is_baseline else f"{treated.label} over {reference.label}"


def _windows_and_batches(effects: Sequence[PairEffect], results: dict[Cell, CellResult]) -> Table:
    rows = []
    for effect in effects:
        result = results.get(effect.pair.treated) if effect.pair.is_over_stock else None
        decisive = effect.decisive
        rows.append([
            _pair_name(effect),
            NOT_MEASURED if result is None else result.interleaved or NOT_MEASURED,
            interval(decisive.robust if decisive else None, _DIGITS),
            interval(effect.work, _DIGITS),
            interval(result.whole if result else None, _DIGITS),
            interval(effect.carry_over, _DIGITS) if effect.carry_over else UNTESTED,
            count(len(effect.groups)),
            count(sum(effect.left_out.values())),
        ])  # fmt: skip
    heads = ["Cell", "Decided by", "Windows", "GPU's work", "Whole batches", "Carry-over",
             "Groups", "Left out"]  # fmt: skip
    caption = "Time over off x off by interleaved windows and by whole batches"
    return table(heads, rows, numbers_from=2, caption=caption)


def _split_table(parts: Sequence[Split]) -> Table:
    rows = [
        [part.cell.label, name, over, interval(ratio, _DIGITS), change(ratio.value)]
        for part in parts
        for name, over, ratio in (
            ("total", f"{part.cell.label} / off x off", part.total),
            ("attention", f"{part.control.label} / off x off", part.attention),
            ("writes, validation and commit", f"{part.cell.label} / {part.control.label}",
             part.writes),
        )
    ]  # fmt: skip
    heads = ["Cell", "Part", "Compared", "Ratio", "Change"]
    what = "GPU's work" if any(part.clock == WORK_MS for part in parts) else "effect"
    caption = f"The {what} in parts: control x off has stage's attention and off's writes"
    return table(heads, rows, numbers_from=3, caption=caption)


def _ratios(cells: Sequence[CellResult]) -> Table:
    rows = [
        [c.label, c.compared or NOT_MEASURED, count(c.matched_windows),
         count(c.unmatched_windows), percent(c.half_width, 2), percent(c.smallest_effect, 2),
         p_value(sure.p_value if (sure := sure_ratio(c)) else None)]
        for c in cells
        if c.ratio is not None
    ]  # fmt: skip
    heads = ["Cell", "Compared", "Matched windows", "Left out", "Interval +-",
             "Smallest visible effect", "p"]  # fmt: skip
    caption = "Precision of each ratio; the A/A cell's row is the noise"
    return table(heads, rows, numbers_from=2, caption=caption)


def _warm_up_and_stop(run: RunData) -> str:
    warmup, stopped = run.header.warmup, run.header.stopped
    parts = []
    if warmup:
        unsteady = warmup.not_steady
        how = f"not steady ({unsteady})" if unsteady else "steady (no trend, spread within 10 %)"
        then = f"; then times were {how}" if warmup.lookback else ""
        parts.append(f"Warm-up took {plural(warmup.batches or 0, 'batch')}{then}.")
    if stopped:
        parts.append(f"Blocks ended by {stopped}.")
    spent = {name: s for name, s in (run.header.spent_s or {}).items() if s >= 0.05}
    if spent:
        by_part = joined([f"{name} {seconds:.1f} s" for name, seconds in spent.items()])
        parts.append(f"Time: {by_part}.")
    return " ".join(parts)
