"""The sections on the cells: their times, and how finely those could be told apart."""

from collections.abc import Sequence

from nwor_bench.analysis.significance import DEFAULT_MARGIN
from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult
from nwor_bench.report.document import Block, Bullets, Paragraph, Section, Table, table
from nwor_bench.report.sections.intervals import interval_figure
from nwor_bench.report.text import (
    NOT_MEASURED,
    compared_time,
    count,
    decimal,
    joined,
    label,
    p_value,
    percent,
    plural,
    ratio,
)


def first_blocks(cells: Sequence[CellResult]) -> list[Block]:
    """What stands on the first screen: intervals on one axis, and the times."""
    figure = interval_figure(cells, DEFAULT_MARGIN)
    return [*([figure] if figure else []), _times(cells)] if cells else []


def cell_section(cells: Sequence[CellResult]) -> Section:
    """Why a verdict is what it is, and the tokens."""
    blocks: list[Block] = []
    left_out = [f"{label(c)} ({c.verdict})" for c in cells if c.ratio_to_off is None]
    if len(left_out) == len(cells):
        blocks.append(Paragraph("No cell could be compared with off x off."))
    elif len(left_out) > 1:
        blocks.append(Paragraph(f"Without a ratio: {joined(left_out)}."))
    reasons = [f"{label(c)} ({c.verdict}): {c.reason.rstrip('.')}." for c in cells if c.reason]
    if reasons:
        blocks.append(Bullets(tuple(reasons)))
    return Section("Cells", (*blocks, _tokens(cells)), brief=True)


def _times(cells: Sequence[CellResult]) -> Table:
    time = compared_time(cells)
    return table(
        ["Cell", "Verdict", "Time over off x off [95 % interval]", "p50 ms", "p95 ms",
         "Window ms", "Tokens/s", "Batches"],
        [
            [label(c), c.verdict, ratio(c), decimal(c.latency_ms_p50), decimal(c.latency_ms_p95),
             decimal(c.window_ms_mean, 2), decimal(c.tokens_per_s), count(c.batches)]
            for c in cells
        ],
        numbers_from=2,
        caption=f"Times; the ratio is of the {time}, below 1 is faster; the interval is each "
        "cell's own",
    )  # fmt: skip


def _tokens(cells: Sequence[CellResult]) -> Table:
    return table(
        ["Cell", "SCV", "Windows", "Drafts", "Accepted", "Staged", "Committed", "Rejected",
         "Stage operations", "NWOR fallbacks"],
        [
            [label(c), c.scv_status, count(c.windows), count(c.draft_tokens),
             count(c.accepted_tokens), count(c.nwor_total_staged), count(c.nwor_total_committed),
             count(c.nwor_total_rejected), count(c.nwor_stage_operations),
             count(c.nwor_fallback_count)]
            for c in cells
        ],
        numbers_from=2,
        caption="Tokens and fallbacks",
    )  # fmt: skip


def precision_section(run: RunData, cells: Sequence[CellResult]) -> Section:
    """How fine the run could measure."""
    rows = [
        [label(c), c.compared or NOT_MEASURED, count(c.matched_windows),
         count(c.unmatched_windows), percent(c.half_width, 2), _bootstrap(c),
         percent(c.smallest_effect, 2),
         p_value(c.p_value_holm if c.p_value_holm is not None else c.p_value),
         p_value(c.wilcoxon_p_holm if c.wilcoxon_p_holm is not None else c.wilcoxon_p),
         ", ".join(map(str, c.outlier_blocks)) or NOT_MEASURED]
        for c in cells
        if c.ratio_to_off is not None
    ]  # fmt: skip
    heads = ["Cell", "Compared", "Matched windows", "Left out", "Interval +-",
             "Block bootstrap", "Smallest effect to be seen", "p", "p (Wilcoxon)",
             "Outlying blocks"]  # fmt: skip
    caption = "Precision of each ratio; the A/A cell's row is the noise"
    blocks: list[Block] = [table(heads, rows, numbers_from=2, caption=caption)]
    facts = _warm_up_and_stop(run)
    if facts:
        blocks.append(Paragraph(facts))
    return Section("Measurement precision", tuple(blocks), folded=True)


def _bootstrap(cell: CellResult) -> str:
    """The block bootstrap's interval of the ratio."""
    low, high = cell.bootstrap_low, cell.bootstrap_high
    return NOT_MEASURED if low is None or high is None else f"[{low:.3f}, {high:.3f}]"


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
