"""The sections that let a sceptic check a run: parity and counters."""

from collections.abc import Sequence

from nwor_bench.analysis.invariants import check_invariants, counter_checks
from nwor_bench.records.json_part import to_json
from nwor_bench.records.store import RunData
from nwor_bench.records.types import BatchRecord, CellResult, Verdict
from nwor_bench.report.document import Block, Bullets, Paragraph, Section, table
from nwor_bench.report.sections.kv_gate import kv_blocks
from nwor_bench.report.sections.local_gate import local_blocks
from nwor_bench.report.text import NOT_MEASURED, count, label, settings


def parity_section(run: RunData, cells: Sequence[CellResult]) -> Section:
    """Did every cell give the tokens of off x off, and do the counts add up?"""
    blocks: list[Block] = [
        Paragraph(
            "Each cell first generates greedily, and its tokens are compared with those of "
            "off x off, request by request. A cell that differs is INVALID and carries no time, "
            "unless every differing token is a tie: the table below says what was compared."
        ),
        table(
            ["Cell", "Parity", "First mismatch", "Compared batches", "Requests"],
            [_parity_row(cell, _batches(run, cell)) for cell in cells],
            numbers_from=3,
            caption="What the gate found",
        ),
    ]
    blocks += local_blocks(run)
    blocks += kv_blocks(run)
    facts = list(settings(to_json(run.header.parity)))
    if facts:
        blocks.append(table(["Gate", "Value"], facts, numbers_from=2, caption="The gate"))
    violations = check_invariants(run)
    if violations:
        blocks += [Paragraph("Counts that do not add up:", strong=True), Bullets(tuple(violations))]
    else:
        blocks.append(
            Paragraph(
                "The counts add up: in every window staged = committed + rejected and stage "
                "operations = staged x target layers, and every block gave all its cells the "
                "same prompts."
            )
        )
    broken = violations or any(cell.parity == Verdict.INVALID for cell in cells)
    return Section("Parity", tuple(blocks), folded=not broken)


def counter_section(run: RunData) -> Section:
    """Our counts beside vLLM's own."""
    rows = []
    for check in counter_checks(run):
        agrees = {True: "yes", False: "NO", None: NOT_MEASURED}[check.agrees]
        counts = [count(check.ours), count(check.vllm)]
        rows.append([check.cell.label, check.counter, *counts, agrees])
    note = (
        "Summed over all batches of a cell, gate and warm-up included. vLLM's counters are read "
        "from the living engine before and after each batch. Windows of requests that had "
        "already finished are left out, as vLLM leaves them out."
    )
    heads = ["Cell", "Counter", "Window records", "vLLM", "Agree"]
    counters = table(heads, rows, numbers_from=2, caption="The window records' sums beside vLLM's")
    return Section("Counters against vLLM's own", (counters, Paragraph(note)), folded=True)


def _parity_row(cell: CellResult, batches: list[BatchRecord]) -> list[str]:
    compared = [batch for batch in batches if batch.parity is not None]
    mismatch = next((b.first_mismatch for b in compared if b.first_mismatch), NOT_MEASURED)
    requests = sum(batch.requests for batch in compared)
    parity = cell.parity or "not checked"
    return [label(cell), parity, mismatch, count(len(compared)), count(requests)]


def _batches(run: RunData, cell: CellResult) -> list[BatchRecord]:
    return [batch for batch in run.batches if batch.cell == cell.cell]
