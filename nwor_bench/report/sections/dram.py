"""The section on DRAM bytes as the GPU's counters counted them, beside what the model predicts."""

from collections.abc import Sequence
from statistics import median

from nwor_bench.analysis.dram.counters import Amount, CellBytes, cell_bytes, clock_facts
from nwor_bench.analysis.dram.prediction import strategy_of
from nwor_bench.records.store import RunData
from nwor_bench.records.types import SETTLING, NworMode
from nwor_bench.report.document import Block, Paragraph, Section, Table, table
from nwor_bench.report.text import NOT_MEASURED, count, decimal

TITLE = "DRAM bytes, counted"

READ, WRITE, L2 = "dram_read_bytes", "dram_write_bytes", "l2_bytes"

ABOUT = (
    "Counted by the GPU itself (CUPTI PM sampling), in batches apart from the timed ones. A "
    "window is all that the GPU does from its start to the start of the next one, the drafter "
    "included. Windows beside a prefill, those without all requests, and the first "
    f"{SETTLING} of a batch are left out. Means over blocks with 95 % intervals, in MB "
    "(1 MB = 1,000,000 bytes)."
)
DIFFERENCES = (
    "Less off x off: the mean over blocks of the same windows' bytes less those of off x off, "
    "below 0 where the cell moves less. Predicted: by the byte model for staging {how}. "
    "Seen from: the smallest difference that this many blocks of this noise would have shown in "
    "four of five such runs. The A/A arm shows the noise. DRAM is written when L2 evicts, later "
    "than the store: what a window writes may be counted in the next."
)


def dram_section(run: RunData) -> Section | None:
    """Two tables and how well they are known; None where nothing was counted."""
    cells = cell_bytes(run)
    if not cells:
        return None
    blocks: list[Block] = [
        Paragraph(answer(cells), strong=True),
        Paragraph(ABOUT),
        _amounts(cells),
        _differences(cells),
        Paragraph(DIFFERENCES.format(how=strategy_of(run.header).staging)),
    ]
    facts = _how_well(run, cells)
    if facts:
        blocks.append(Paragraph(facts))
    return Section(TITLE, tuple(blocks), brief=True)


def dram_summary(run: RunData) -> str | None:
    """What the counters say and what they cost, for the terminal; None where nothing counted."""
    cells = cell_bytes(run)
    return f"DRAM bytes: {answer(cells)} {_cost(cells)}".rstrip() if cells else None


def answer(cells: Sequence[CellBytes]) -> str:
    """How much write traffic staging saved, in one sentence a stage cell."""
    sentences = [_sentence(cell) for cell in cells if cell.cell.nwor_mode is NworMode.STAGE]
    return " ".join(sentences) or "No cell staged: there is nothing to compare."


def _sentence(cell: CellBytes) -> str:
    name, found = cell.cell.label, cell.differences.get(WRITE)
    if not cell.windows:
        return (
            f"{name}: no window counts, for none of all requests stood behind the first {SETTLING} "
            "of a batch; write a larger --max-new-tokens."
        )
    if found is None:
        return f"{name}: its writes could not be compared with off x off."
    if found.low is None or found.high is None:
        return f"{name}: too few blocks for an interval of its writes."
    amount = f"{_mb(abs(found.mean))} MB a window"
    if found.excludes_zero:
        verb = "fewer" if found.mean < 0 else "more"
        text = f"{name} wrote {amount} {verb} than off x off"
    else:
        text = f"{name}: no difference in writes was seen"
        if found.smallest is not None:
            text += f" (one of {_mb(found.smallest)} MB would have been)"
    predicted = cell.predicted.get(WRITE)
    if predicted is not None:
        text += f"; {_signed(predicted)} MB were predicted"
    return f"{text}."


def _amounts(cells: Sequence[CellBytes]) -> Table:
    rows = [
        [cell.cell.label, *(_with_interval(cell.amounts.get(n)) for n in (READ, WRITE, L2)),
         count(cell.windows), count(cell.blocks), decimal(cell.staged, 1),
         decimal(cell.accepted, 2)]
        for cell in cells
    ]  # fmt: skip
    heads = ["Cell", "DRAM read", "DRAM written", "Through L2", "Windows", "Blocks", "Drafts",
             "Accepted"]  # fmt: skip
    return table(heads, rows, caption="MB a window")


def _differences(cells: Sequence[CellBytes]) -> Table:
    rows = []
    for cell in cells:
        if cell.is_baseline:
            continue
        row = [cell.cell.label]
        for name in (WRITE, READ):
            found = cell.differences.get(name)
            row += [_with_interval(found, signed=True), _signed(cell.predicted.get(name)),
                    _mb(found.smallest if found else None)]  # fmt: skip
        rows.append([*row, _with_interval(cell.differences.get(L2), signed=True),
                     count(cell.matched)])  # fmt: skip
    heads = ["Cell", "Written", "Predicted", "Seen from", "Read", "Predicted", "Seen from",
             "Through L2", "Windows"]  # fmt: skip
    return table(heads, rows, caption="MB a window, less off x off")


def _how_well(run: RunData, cells: Sequence[CellBytes]) -> str:
    facts = clock_facts(run)
    if not facts:
        return ""
    spread = max(fact["clock_spread_us"] for fact in facts)
    host = median(fact["clock_to_host_us"] for fact in facts)
    ratios = [fact["copy_ratio"] for fact in facts]
    copies = sum(fact["copies_found"] for fact in facts)
    made = sum(fact["copies_made"] for fact in facts)
    return (
        f"Clocks: {count(copies)} copies of known size ({count(made)} were made) tie "
        f"the windows to the samples of {facts[0]['sample_us']:g} us, to "
        f"+- {decimal(spread, 1)} us at worst; the host's clock put the samples "
        f"{decimal(host, 1)} us from there. Of the bytes copied, {decimal(100 * min(ratios), 2)} "
        f"to {decimal(100 * max(ratios), 2)} % were counted as read. {_cost(cells)}"
    ).rstrip()


def _cost(cells: Sequence[CellBytes]) -> str:
    costs = [cell.sampler_cost for cell in cells if cell.sampler_cost is not None]
    if not costs:
        return ""
    return (
        f"A counted window took {decimal(min(costs), 3)} to {decimal(max(costs), 3)} of a timed "
        "one's time: that is what sampling and its events cost."
    )


def _with_interval(amount: Amount | None, signed: bool = False) -> str:
    if amount is None:
        return NOT_MEASURED
    show = _signed if signed else _mb
    if amount.low is None or amount.high is None:
        return show(amount.mean)
    return f"{show(amount.mean)} [{show(amount.low)}, {show(amount.high)}]"


def _mb(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value / 1e6:,.2f}"


def _signed(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value / 1e6:+,.2f}"
