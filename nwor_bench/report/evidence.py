"""The sections that let a sceptic check a run: parity, acceptance, fallbacks, counters, bytes."""

from collections.abc import Sequence

from nwor_bench.invariants import cell_key, cell_label, check_invariants, counter_checks
from nwor_bench.records import BatchRecord, CellResult
from nwor_bench.report.document import Block, Bullets, Paragraph, Section, table
from nwor_bench.report.text import (
    NOT_MEASURED,
    count,
    decimal,
    label,
    percent,
    settings,
    size,
)
from nwor_bench.store import RunData


def parity_section(run: RunData, cells: Sequence[CellResult]) -> Section:
    """Did every cell give the tokens of off x off, and do the counts add up?"""
    blocks: list[Block] = [
        Paragraph(
            "Each cell first generates greedily, and its tokens are compared with those of "
            "off x off, request by request. A cell that differs is INVALID and carries no time."
        ),
        table(
            ["Cell", "Parity", "First mismatch", "Compared batches", "Requests"],
            [_parity_row(cell, _batches(run, cell)) for cell in cells],
            numbers_from=3,
        ),
    ]
    facts = list(settings(run.header.get("parity")))
    if facts:
        blocks.append(table(["Gate", "Value"], facts, numbers_from=2))
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
    return Section("Parity", tuple(blocks))


def acceptance_section(cells: Sequence[CellResult]) -> Section:
    """How many drafts were accepted, by their position in the draft."""
    positions = max((len(cell.acceptance_per_position) for cell in cells), default=0)
    rows = []
    for cell in cells:
        rates = [percent(rate) for rate in cell.acceptance_per_position]
        rates += [NOT_MEASURED] * (positions - len(rates))
        rows.append(
            [label(cell), percent(cell.acceptance_rate), decimal(cell.acceptance_length, 2), *rates]
        )
    heads = [f"Draft {position + 1}" for position in range(positions)]
    note = (
        "Rate: accepted over proposed draft tokens. Length: tokens that a request gains a window, "
        "the bonus token included. Draft j: accepted over proposed drafts at position j. "
        "Equal acceptance is no proof of equal output; the parity section is."
    )
    return Section(
        "Acceptance",
        (table(["Cell", "Rate", "Length", *heads], rows), Paragraph(note)),
    )


def fallback_section(cells: Sequence[CellResult]) -> Section:
    """Windows that did not run as asked, by reason."""
    rows = [row for cell in cells for row in _fallback_rows(cell)]
    blocks: list[Block] = [
        Paragraph(
            "An NWOR fallback is a window whose draft tokens were written directly; an SCV "
            "fallback is one that was not validated in the way that the mode asks for."
        )
    ]
    if rows:
        heads = ["Cell", "Kind", "Reason", "Fallbacks", "Windows"]
        blocks.append(table(heads, rows, numbers_from=3))
    else:
        blocks.append(Paragraph("No timed window fell back."))
    return Section("Fallbacks by reason", tuple(blocks))


def counter_section(run: RunData) -> Section:
    """Our counts beside vLLM's own."""
    rows = []
    for check in counter_checks(run):
        agrees = {True: "yes", False: "NO", None: NOT_MEASURED}[check.agrees]
        counts = [count(check.ours), count(check.vllm)]
        rows.append([cell_label(check.cell), check.counter, *counts, agrees])
    note = (
        "Summed over all batches of a cell, gate and warm-up included. vLLM's counters are read "
        "from the living engine before and after each batch. Windows of requests that had "
        "already finished are left out, as vLLM leaves them out."
    )
    heads = ["Cell", "Counter", "Window records", "vLLM", "Agree"]
    return Section(
        "Counters against vLLM's own", (table(heads, rows, numbers_from=2), Paragraph(note))
    )


def bytes_section(run: RunData, cells: Sequence[CellResult]) -> Section:
    """Bytes that follow from token counts, and what they are not."""
    per_token = (run.header.get("engine") or {}).get("bytes_per_token")
    each = "" if per_token is None else f" ({count(per_token)} bytes)"
    note = (
        "Computed, not measured: token counts times the bytes of one token's K and V over all "
        f"target layers{each}. Avoided are the bytes of rejected draft tokens, which were never "
        "written to the cache. No DRAM traffic was measured in this run, and staging itself "
        "moves bytes that are not counted here."
    )
    rows = [
        [label(cell), size(cell.bytes_staged), size(cell.bytes_committed), size(cell.bytes_avoided)]
        for cell in cells
    ]
    heads = ["Cell", "Staged", "Committed", "Avoided cache writes"]
    return Section("Bytes, computed from token counts", (Paragraph(note), table(heads, rows)))


def _parity_row(cell: CellResult, batches: list[BatchRecord]) -> list[str]:
    compared = [batch for batch in batches if batch.parity is not None]
    mismatch = next((b.first_mismatch for b in compared if b.first_mismatch), NOT_MEASURED)
    requests = sum(batch.requests for batch in compared)
    parity = cell.parity or "not checked"
    return [label(cell), parity, mismatch, count(len(compared)), count(requests)]


def _batches(run: RunData, cell: CellResult) -> list[BatchRecord]:
    return [batch for batch in run.batches if cell_key(batch) == cell_key(cell)]


def _fallback_rows(cell: CellResult) -> list[list[str]]:
    scv = dict(cell.scv_fallbacks)
    unexplained = (cell.scv_fallback_count or 0) - sum(scv.values())
    if unexplained > 0:
        scv["(reason not recorded)"] = unexplained
    return [
        [label(cell), kind, reason, count(times), count(cell.windows)]
        for kind, reasons in (("NWOR", cell.fallbacks), ("SCV", scv))
        for reason, times in reasons.items()
    ]
