"""The cells of a run: ratios on one axis, times, tokens, acceptance."""

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from nwor_bench.analysis.analyse import PERCENTILES, noise_floor
from nwor_bench.analysis.parity.tokens import EXACT
from nwor_bench.analysis.verdicts import DEFAULT_MARGIN
from nwor_bench.records.header import RunHeader
from nwor_bench.records.types import AA, CellResult, Verdict
from nwor_bench.report.answer import on_cpu
from nwor_bench.report.document import Block, Bullets, Figure, Paragraph, Section, Table, table
from nwor_bench.report.html import colour
from nwor_bench.report.terminal import fits
from nwor_bench.report.text import (
    NOT_MEASURED,
    compared_time,
    count,
    decimal,
    interval,
    percent,
    work_change,
)
from nwor_bench.stats.interval import flat

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

VERDICT_MARKS = {"FASTER": "<", "SLOWER": ">", "SAME": "o", "AMBIGUOUS": "D"}
"""matplotlib's marker of each verdict: readable without its colour."""

_ROW, _REST, _PHONE = 34, 108, 480
"""CSS pixels of a row of the figure, of everything else in it, and its width."""

_LABEL = 26
"""Characters in a line of a row's label, which has at most two: bars need room beside it."""

ACCEPTANCE_NOTE = "Equal acceptance does not prove equal output; see Evidence."

FEW_FOR_P95 = 20
_TERMINAL = 80

REQUEST_NOTE = (
    "Request latency: vLLM's own request metrics over the timed batches, defined as in vllm bench "
    "serve. All requests of a batch arrive at once, so TTFT includes waiting for each other's "
    "prefills. These are not paired block by block: compare cells by their ratio."
)


def first_figure(header: RunHeader, cells: Sequence[CellResult]) -> list[Figure]:
    """All ratios on one axis; nothing without ratios."""
    figure = None if header.checks_only else interval_figure(cells, DEFAULT_MARGIN)
    return [] if figure is None else [figure]


def first_table(header: RunHeader, cells: Sequence[CellResult]) -> list[Table]:
    """The cells in a table that fits 80 columns."""
    if not cells:
        return []
    if header.checks_only:
        return [_outputs(cells)]
    return [_verdict_table(cells) if on_cpu(header) else _verdicts(cells)]


def _outputs(cells: Sequence[CellResult]) -> Table:
    """The counts of a run that times nothing, of cells that a check says something of if any."""
    live = [cell for cell in cells if cell.verdict != Verdict.INEFFECTIVE]
    checked = any(cell.verdict == Verdict.CHECKED and cell.arm != AA for cell in live)
    rows = [
        [c.label, "no check" if c.verdict == Verdict.INEFFECTIVE
         else "same" if c.parity == EXACT else c.parity or NOT_MEASURED, count(c.windows),
         count(c.draft_tokens), count(c.accepted_tokens), count(c.nwor_total_staged),
         count(c.nwor_total_committed)]
        for c in (live if checked else cells)
    ]  # fmt: skip
    heads = ["Cell", "Tokens", "Windows", "Drafts", "Accepted", "Staged", "Committed"]
    caption = "One batch of each cell, compared with that of off x off"
    return table(heads, rows, numbers_from=2, caption=caption)


def _verdicts(cells: Sequence[CellResult]) -> Table:
    """With the GPU's work if it was timed; and the change of tokens per second, if that fits."""
    if any(cell.work for cell in cells):
        heads = ["Cell", "Verdict", "Over off x off", "GPU work, %", "Tokens/s"]
        rows = [
            [c.label, c.verdict, interval(c.ratio), work_change(c), _change_of_rate(c) or _rate(c)]
            for c in cells
        ]
        return table(heads, rows, numbers_from=2, caption=_caption_of(cells))
    full = _verdict_table(cells, [_rate(cell) for cell in cells])
    if any(cell.rate for cell in cells) and fits(full, _TERMINAL):
        return full
    return _verdict_table(cells, [decimal(cell.tokens_per_s) for cell in cells])


def _verdict_table(cells: Sequence[CellResult], rates: Sequence[str] = ()) -> Table:
    """Without tokens/s (`rates`) on a CPU, where they would pass for NWOR's."""
    rate_columns: Sequence[Sequence[str]] = [[rate] for rate in rates] or [[]] * len(cells)
    rows = [
        [c.label, c.verdict, interval(c.ratio), decimal(c.window_ms_mean, 2), *rate,
         percent(c.acceptance_rate)]
        for c, rate in zip(cells, rate_columns, strict=True)
    ]  # fmt: skip
    heads = ["Cell", "Verdict", "Over off x off", "ms", *(["Tokens/s"] if rates else []),
             "Accepted"]  # fmt: skip
    return table(heads, rows, numbers_from=2, caption=_caption_of(cells))


def _caption_of(cells: Sequence[CellResult]) -> str:
    time = compared_time(cells).capitalize()
    return f"{time} over off x off's, with 95 % intervals; below 1 is faster"


def _rate(cell: CellResult) -> str:
    """`1,450 +2.0 %`: of the batches, and the change of decoding against off x off."""
    rate = cell.tokens_per_s
    text = decimal(rate, 0 if (rate or 0) >= 1000 else 1)
    change = _change_of_rate(cell)
    return f"{text} {change}" if change and rate is not None else text


def _change_of_rate(cell: CellResult) -> str:
    return "" if cell.rate is None else f"{100 * (cell.rate.value - 1):+.1f} %"


def cell_section(cells: Sequence[CellResult]) -> Section:
    """Reasons of the verdicts, times of batches and requests, tokens, acceptance."""
    reasons = [f"{c.label} ({c.verdict}): {c.reason.rstrip('.')}." for c in cells if c.reason]
    why = [Bullets(tuple(reasons))] if reasons else []
    blocks = (*why, *_times(cells), _tokens(cells), *_acceptance(cells))
    return Section("Cells", blocks, brief=True)


def _times(cells: Sequence[CellResult]) -> list[Block]:
    """Percentiles of batches and, if vLLM gave any, of requests; nothing without a timed batch."""
    if not any(cell.batches for cell in cells):
        return []
    known = [name for name in PERCENTILES if any(getattr(c, name) is not None for c in cells)]
    rows = [
        [c.label, count(c.batches), decimal(c.latency_ms_p50), decimal(c.latency_ms_p95),
         *(decimal(getattr(c, name), 2) for name in known)]
        for c in cells
    ]  # fmt: skip
    names = [f"{name.split('_')[0].upper()} {name.split('_')[-1]}" for name in known]
    caption = "Batch and request times, ms"
    if any(cell.latency_ms_p95 is not None and cell.batches < FEW_FOR_P95 for cell in cells):
        caption += "; p95 of few batches is near the maximum"
    body = table(["Cell", "Batches", "p50 ms", "p95 ms", *names], rows, caption=caption)
    return [body, Paragraph(REQUEST_NOTE)] if known else [body]


def _tokens(cells: Sequence[CellResult]) -> Table:
    return table(
        ["Cell", "SCV", "Windows", "Drafts", "Accepted", "Staged", "Committed", "Rejected",
         "Stage operations", "NWOR fallbacks"],
        [
            [c.label, c.scv_status, count(c.windows), count(c.draft_tokens),
             count(c.accepted_tokens), count(c.nwor_total_staged), count(c.nwor_total_committed),
             count(c.nwor_total_rejected), count(c.nwor_stage_operations),
             count(c.nwor_fallback_count)]
            for c in cells
        ],
        numbers_from=2,
        caption="Tokens and fallbacks",
    )  # fmt: skip


def interval_figure(cells: Sequence[CellResult], margin: float) -> Figure | None:
    """Ratios to off x off, the noise band and the margin of SAME; None if none is compared."""
    shown = [cell for cell in cells if cell.ratio is not None]
    if all(cell.arm == AA for cell in shown):
        return None
    floor = (noise_floor(cells) or {}).get("floor")
    time = compared_time(cells)
    words = "; ".join(f"{c.label} {interval(c.ratio)}, {c.verdict}" for c in shown)

    def draw(canvas: "Canvas") -> None:
        axes, soft = canvas.subplots(), colour("soft")
        if floor:
            axes.axvspan(1 - floor, 1 + floor, color=colour("band"), lw=0, zorder=0)
        for place in (1 - margin, 1 + margin):
            axes.axvline(place, color=soft, lw=1.5, ls=":", zorder=1)
        axes.axvline(1, color=colour("text"), lw=1.5, zorder=1)
        _draw_marks(axes, shown)
        axes.set_xlim(*_range(shown, max(margin, floor or 0.0)))
        axes.set_xlabel(f"{time} / that of off x off")
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter("{x:.3f}")
        axes.text(0, 1.02, "← less time", transform=axes.transAxes, va="bottom", color=soft)
        axes.text(1, 1.02, "more time →", transform=axes.transAxes, va="bottom", ha="right",
                  color=soft)  # fmt: skip
        canvas.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=4)

    return Figure(
        name="intervals",
        caption=_caption(margin, floor),
        alternative=f"{time[0].upper()}{time[1:]} over that of off x off. {words}.",
        draw=draw,
        height=_ROW * len(shown) + _REST,
        width=_PHONE,
    )


def _draw_marks(axes: "Axes", cells: Sequence[CellResult]) -> None:
    """Each cell's ratio with its interval, one row a cell, the first at the top."""
    labels = ["\n".join(wrap(c.label, _LABEL, max_lines=2, placeholder=" ...")) for c in cells]
    axes.set_yticks(range(len(cells)), labels)
    axes.set_ylim(len(cells) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    for verdict, marker in VERDICT_MARKS.items():
        marked = [(row, c.ratio) for row, c in enumerate(cells) if c.verdict == verdict and c.ratio]
        if marked:
            reach = [[r.value - r.low if r.is_bounded else 0.0 for _, r in marked],
                     [r.high - r.value if r.is_bounded else 0.0 for _, r in marked]]  # fmt: skip
            tint = colour(verdict.lower())
            axes.errorbar(
                [r.value for _, r in marked], [row for row, _ in marked], xerr=reach, label=verdict,
                fmt=marker, color=tint, mfc="none" if marker == "D" else tint, ms=8, mew=2, lw=2,
                capsize=4, ls="none", clip_on=False,
            )  # fmt: skip


def _range(cells: Sequence[CellResult], reach: float) -> tuple[float, float]:
    """Wide enough for every interval, the margin and the noise band, with a little room."""
    values = [1 - reach, 1 + reach]
    for cell in cells:
        values += [value for value in flat(cell.ratio).values() if value is not None]
    room = 0.05 * (max(values) - min(values))
    return max(0.0, min(values) - room), max(values) + room


def _caption(margin: float, floor: float | None) -> str:
    band = "" if floor is None else "; shaded: noise"
    return f"Bars: 95 % intervals{band}; dotted: {100 * margin:g} %."


def _acceptance(cells: Sequence[CellResult]) -> list[Block]:
    """Accepted drafts, altogether and by position."""
    positions = max((len(cell.acceptance_per_position) for cell in cells), default=0)
    rows = []
    for cell in cells:
        rates = [percent(rate) for rate in cell.acceptance_per_position]
        rates += [NOT_MEASURED] * (positions - len(rates))
        rows.append(
            [cell.label, percent(cell.acceptance_rate), decimal(cell.acceptance_length, 2), *rates]
        )
    heads = ["Cell", "Rate", "Length", *(f"Draft {position + 1}" for position in range(positions))]
    caption = "Acceptance: accepted over proposed draft tokens, in total and by position"
    return [table(heads, rows, caption=caption), Paragraph(ACCEPTANCE_NOTE)]
