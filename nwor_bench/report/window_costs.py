"""The costs of a window: its time by phase, and its bytes, predicted and measured."""

from collections.abc import Sequence
from statistics import fmean

from nwor_bench.analysis.analyse import Analysis
from nwor_bench.analysis.dram import CellBytes, predicted_difference, strategy_of
from nwor_bench.analysis.phases import PHASES, CellPhases, cell_phases
from nwor_bench.records.header import RunHeader
from nwor_bench.records.store import RunData
from nwor_bench.records.types import SETTLING, CellResult, NworMode, Phase, Verdict
from nwor_bench.report.answer import on_cpu
from nwor_bench.report.document import Block, Paragraph, Section, Table, table
from nwor_bench.report.text import NOT_MEASURED, count, decimal, percent, size
from nwor_bench.stats.interval import Interval

TIME, BYTES = "Where a window's time goes", "Bytes: predicted and measured"

ON_DEVICE = (
    "Device: milliseconds between events on the GPU, medians over the interleaved windows (in "
    "older runs: over probed batches). Forward is the replay of its CUDA graph, if it has one. "
    "There is no mask time if the commit decides by itself. The four together are the GPU's work. "
    "Drafter and host: the rest of a window. It is the drafter's work and the time in which the "
    "GPU waits for the host; no event separates the two."
)
ON_HOST = (
    "Host: milliseconds that our hooks add to a window, and the part of it that decides which "
    "drafts were accepted (waiting for the device included), medians over the timed windows. "
    "Launches and waits are those of deciding. Windows that captured a graph have the path capture."
)
NO_GPU = (
    "Not measured: forward, sample, mask and commit are timed between events on a GPU, and this "
    "run had none."
)
NO_WINDOW = "Not measured: no interleaved window has times that count."
READ, WRITE = "dram_read_bytes", "dram_write_bytes"

CACHE = (
    "Cache bytes are token counts times the bytes of one token's K and V over all target "
    "layers{each}. Avoided are those of rejected draft tokens. Predicted: a mean window's DRAM "
    "bytes less those of off x off, by the byte model for staging {how}. Tokens saved are not "
    "bytes saved: staging moves bytes too."
)
NO_DRAM = "DRAM traffic was not measured in this run."
MEASURED = (
    "Measured by the GPU itself (CUPTI PM sampling), in batches separate from the timed ones: "
    "means over blocks with 95 % intervals. A window is everything that the GPU does from its "
    "start to the start of the next, the drafter included. Windows beside a prefill, those without "
    f"all requests, and the first {SETTLING} of a batch are left out. Less off x off: minus the "
    "bytes of the same windows in off x off. Visible from: four of five such runs would have shown "
    "a difference of this size. The A/A arm shows the noise. DRAM is written when L2 evicts, so a "
    "window's writes may be counted in the next."
)


def phase_section(analysis: Analysis) -> Section:
    """Tables of phases, or the reason why there are none."""
    run = analysis.run
    invalid = {cell.cell for cell in analysis.cells if cell.verdict == Verdict.INVALID}
    rows = [row for row in cell_phases(run) if row.cell not in invalid]
    blocks = _phases(rows) if rows else [Paragraph(NO_GPU if on_cpu(run.header) else NO_WINDOW)]
    return Section(TIME, tuple(blocks), brief=True, folded=True)


def _phases(rows: Sequence[CellPhases]) -> list[Block]:
    device = table(
        ["Cell", "Window ms", "Forward", "Sample", "Mask", "Commit", "Drafter and host"],
        [
            [row.cell.label, decimal(row.window_ms, 3),
             *(decimal(row.device_ms[name], 3) for name in PHASES), decimal(row.rest_ms, 3)]
            for row in rows
        ],
        caption="A window on the device, ms",
    )  # fmt: skip
    host = table(
        ["Cell", "Hooks ms", "Deciding ms", "Share of window", "Launches", "Host waits",
         "Windows by path"],
        [
            [row.cell.label, decimal(row.hook_ms, 3), decimal(row.scv_host_ms, 3),
             percent(row.deciding_share), decimal(row.launches, 2), decimal(row.host_syncs, 2),
             ", ".join(f"{path} {count(n)}" for path, n in sorted(row.paths.items()))
             or NOT_MEASURED]
            for row in rows
        ],
        caption="What the hooks add on the host",
    )  # fmt: skip
    return [device, Paragraph(ON_DEVICE), host, Paragraph(ON_HOST)]


def traffic_section(analysis: Analysis) -> Section:
    """Predicted and cache bytes, then the counters' if there are any."""
    run, cells, dram = analysis.run, analysis.cells, analysis.dram
    blocks: list[Block] = [_cache_bytes(run, cells), Paragraph(_cache_note(run.header))]
    if dram:
        blocks = [Paragraph(answer(dram), strong=True), _amounts(dram),
                  _differences(dram), Paragraph(MEASURED),
                  *blocks]  # fmt: skip
    else:
        blocks.append(Paragraph(NO_DRAM))
    return Section(BYTES, tuple(blocks), brief=bool(dram), folded=True)


def dram_summary(cells: Sequence[CellBytes]) -> str | None:
    """The counters' answer in a sentence; None if nothing was counted."""
    return f"DRAM bytes: {answer(cells)}" if cells else None


def answer(cells: Sequence[CellBytes]) -> str:
    """How much write traffic staging saved, in one sentence a stage cell."""
    sentences = [_sentence(cell) for cell in cells if cell.cell.nwor_mode is NworMode.STAGE]
    return " ".join(sentences) or "No cell staged: there is nothing to compare."


def _sentence(cell: CellBytes) -> str:
    name, written = cell.cell.label, cell.differences.get(WRITE)
    if not cell.windows:
        return (
            f"{name}: no window counts, because none with all requests came after the first "
            f"{SETTLING} of a batch; write a larger --max-new-tokens."
        )
    if written is None:
        return f"{name}: its writes could not be compared with off x off."
    if not written.is_bounded:
        return f"{name}: too few blocks for an interval of its writes."
    if not written.holds(0):
        verb = "fewer" if written.value < 0 else "more"
        text = f"{name} wrote {_mb(abs(written.value))} MB a window {verb} than off x off"
    else:
        text = (
            f"{name}: no difference in writes was visible "
            f"(one of {_mb(cell.visible[WRITE])} MB would have been)"
        )
    predicted = cell.predicted.get(WRITE)
    if predicted is not None:
        text += f"; {_signed(predicted)} MB were predicted"
    return f"{text}."


def _amounts(cells: Sequence[CellBytes]) -> Table:
    rows = [
        [cell.cell.label, *(_with_interval(cell.amounts.get(n)) for n in (READ, WRITE)),
         count(cell.windows), count(cell.blocks), decimal(cell.staged, 1),
         decimal(cell.accepted, 2)]
        for cell in cells
    ]  # fmt: skip
    heads = ["Cell", "DRAM read", "DRAM written", "Windows", "Blocks", "Drafts",
             "Accepted"]  # fmt: skip
    return table(heads, rows, caption="MB a window (1 MB = 1,000,000 bytes)")


def _differences(cells: Sequence[CellBytes]) -> Table:
    rows = []
    for cell in cells:
        if cell.cell.is_baseline:
            continue
        row = [cell.cell.label]
        for name in (WRITE, READ):
            row += [_with_interval(cell.differences.get(name), signed=True),
                    _signed(cell.predicted.get(name)), _mb(cell.visible.get(name))]  # fmt: skip
        rows.append([*row, count(cell.matched)])
    heads = ["Cell", "Written", "Predicted", "Visible from", "Read", "Predicted", "Visible from",
             "Windows"]  # fmt: skip
    return table(heads, rows, caption="MB a window, less off x off")


def _cache_bytes(run: RunData, cells: Sequence[CellResult]) -> Table:
    rows = []
    for cell in cells:
        predicted = _predicted(run, cell)
        rows.append([
            cell.label, size(cell.bytes_staged), size(cell.bytes_committed),
            size(cell.bytes_avoided), _signed_size(predicted.get(WRITE)),
            _signed_size(predicted.get(READ)),
        ])  # fmt: skip
    heads = ["Cell", "Staged", "Committed", "Avoided cache writes", "Predicted DRAM written",
             "Predicted DRAM read"]  # fmt: skip
    caption = "Cache bytes of all timed windows; predicted DRAM bytes of one window"
    return table(heads, rows, caption=caption)


def _cache_note(header: RunHeader) -> str:
    per_token = header.engine.bytes_per_token
    per_layer = "" if per_token is None else f" ({count(per_token)} bytes)"
    return CACHE.format(each=per_layer, how=strategy_of(header).staging)


def _predicted(run: RunData, cell: CellResult) -> dict[str, float]:
    """The byte model's difference for a staging cell's mean window; empty for other cells."""
    if cell.nwor_mode != NworMode.STAGE or not cell.windows or not cell.nwor_total_staged:
        return {}
    timed = {(b.batch, b.block) for b in run.batches
             if b.phase == Phase.TIMED and b.cell == cell.cell}  # fmt: skip
    active = [w.num_reqs for w in run.windows
              if w.cell == cell.cell and (w.batch, w.block) in timed]  # fmt: skip
    return predicted_difference(
        run.header.engine,
        cell.nwor_total_staged / cell.windows,
        (cell.nwor_total_committed or 0) / cell.windows,
        strategy_of(run.header),
        fmean(active) if active else 0.0,
    )


def _signed_size(amount: float | None) -> str:
    if amount is None:
        return NOT_MEASURED
    return f"{'-' if round(amount) < 0 else '+'}{size(round(abs(amount)))}"


def _with_interval(amount: Interval | None, signed: bool = False) -> str:
    show = _signed if signed else _mb
    if amount is None or not amount.is_bounded:
        return show(None if amount is None else amount.value)
    return f"{show(amount.value)} [{show(amount.low)}, {show(amount.high)}]"


def _mb(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value / 1e6:,.2f}"


def _signed(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value / 1e6:+,.2f}"
