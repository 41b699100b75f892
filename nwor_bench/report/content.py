"""What a report says, in order: verdict, what ran, cells, evidence, environment, limits."""

from collections.abc import Sequence
from typing import Any

from nwor_bench.advice import findings
from nwor_bench.invariants import cell_key, cell_label
from nwor_bench.records import CellResult, RunStatus
from nwor_bench.report.document import (
    Block,
    Bullets,
    Callout,
    Code,
    Document,
    IntervalChart,
    Paragraph,
    Section,
    table,
)
from nwor_bench.report.evidence import (
    acceptance_section,
    bytes_section,
    counter_section,
    fallback_section,
    parity_section,
)
from nwor_bench.report.limits import CPU_LIMIT, limits
from nwor_bench.report.phases import phase_section
from nwor_bench.report.text import (
    NOT_MEASURED,
    count,
    decimal,
    joined,
    label,
    p_value,
    percent,
    plural,
    ratio,
    settings,
)
from nwor_bench.report.verdicts import on_cpu, verdict_sentence
from nwor_bench.stats import DEFAULT_MARGIN
from nwor_bench.store import RunData


def build_document(run: RunData, cells: Sequence[CellResult]) -> Document:
    """The whole report of a run, from its records and nothing else."""
    sections = [_what_ran(run), _cells(run, cells), _ruler(run, cells), parity_section(run, cells)]
    sections += [acceptance_section(cells), fallback_section(cells), counter_section(run)]
    sections += [section for section in (phase_section(run),) if section]
    sections += [bytes_section(run, cells), _configuration(run), _environment(run), _order(run)]
    sections.append(Section("What the numbers do not show", (Bullets(limits(run, cells)),)))
    return Document(title(run.header), tuple(_lead(run, cells)), tuple(sections))


def title(header: dict[str, Any]) -> str:
    """`nwor-bench: short on smollm2`."""
    scenario, pair = ((header.get(part) or {}).get("name") for part in ("scenario", "pair"))
    return f"nwor-bench: {scenario or 'a run'} on {pair or 'an unnamed pair'}"


def warnings(run: RunData) -> list[str]:
    """What is wrong with the run as a whole; empty for a complete one."""
    status = run.header.get("status")
    found = list(run.warnings)
    if status != RunStatus.COMPLETE:
        why = "".join(f"; {event['error']}" for event in run.events if "error" in event)
        found.insert(
            0,
            f"This run did not end as planned (status: {status or 'unknown'}{why}): the numbers "
            "rest on what was measured until then.",
        )
    return found


def _lead(run: RunData, cells: Sequence[CellResult]) -> list[Block]:
    lead: list[Block] = [Callout("Incomplete", text) for text in warnings(run)]
    lead.append(Paragraph(verdict_sentence(run.header, cells), strong=True))
    if on_cpu(run.header):
        lead.append(Callout("Measured on a CPU", CPU_LIMIT))
    return lead


def _what_ran(run: RunData) -> Section:
    header = run.header
    pair, engine = header.get("pair") or {}, header.get("engine") or {}
    facts = {
        "target": pair.get("target"),
        "drafts by": pair.get("method"),
        "data type": pair.get("dtype"),
        "device": engine.get("device"),
        "runner": engine.get("runner"),
        "engine starts": engine.get("start_count"),
        "started": header.get("started_at"),
        "finished": header.get("finished_at"),
    }
    known = [f"{name} {value}" for name, value in facts.items() if value is not None]
    blocks: list[Block] = [Code(str(header["command"]))] if header.get("command") else []
    if known:
        sentence = ", ".join(known)
        blocks.append(Paragraph(f"{sentence[0].upper()}{sentence[1:]}."))
    return Section("What ran", tuple(blocks))


def _cells(run: RunData, cells: Sequence[CellResult]) -> Section:
    times = table(
        ["Cell", "Verdict", "Time over off x off [95 % interval]", "p50 ms", "p95 ms",
         "Window ms", "Tokens/s", "Batches"],
        [
            [label(c), c.verdict, ratio(c), decimal(c.latency_ms_p50), decimal(c.latency_ms_p95),
             decimal(c.window_ms_mean, 2), decimal(c.tokens_per_s), count(c.batches)]
            for c in cells
        ],
        numbers_from=2,
    )  # fmt: skip
    tokens = table(
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
    )  # fmt: skip
    blocks: list[Block] = [times]
    if any(cell.ratio_to_off is not None for cell in cells):
        blocks.append(IntervalChart(tuple(cells), DEFAULT_MARGIN))
    blocks += [Paragraph(_how_to_read()), tokens]
    reasons = [f"{label(c)} ({c.verdict}): {c.reason.rstrip('.')}." for c in cells if c.reason]
    if reasons:
        blocks.append(Bullets(tuple(reasons)))
    return Section("Cells", tuple(blocks))


def _ruler(run: RunData, cells: Sequence[CellResult]) -> Section:
    """How fine the run could measure, and what weakens it."""
    compared = [cell for cell in cells if cell.ratio_to_off is not None]
    rows = [
        [label(c), c.compared or NOT_MEASURED, count(c.matched_windows),
         count(c.unmatched_windows), percent(c.half_width, 2), percent(c.smallest_effect, 2),
         p_value(c.p_value_holm if c.p_value_holm is not None else c.p_value),
         p_value(c.wilcoxon_p_holm if c.wilcoxon_p_holm is not None else c.wilcoxon_p),
         ", ".join(map(str, c.outlier_blocks)) or NOT_MEASURED]
        for c in compared
    ]  # fmt: skip
    heads = ["Cell", "Compared", "Matched windows", "Left out", "Interval +-",
             "Smallest effect to be seen", "p", "p (Wilcoxon)", "Outlying blocks"]  # fmt: skip
    note = (
        "The A/A arm's row is the noise floor. p belongs to the interval, p (Wilcoxon) to the "
        "signed rank test on the blocks; both are corrected for the number of cells (Holm), but "
        "for the A/A arm's. The smallest effect to be seen would have been called in four of "
        "five such runs. Outlying blocks count like the others."
    )
    blocks: list[Block] = [table(heads, rows, numbers_from=2), Paragraph(note)] if rows else []
    facts = _warm_up_and_stop(run)
    if facts:
        blocks.append(Paragraph(facts))
    found = findings(run, cells)
    blocks.append(
        Bullets(tuple(f"{f.severity.upper()}: {f.message} {f.remedy}" for f in found))
        if found
        else Paragraph("Nothing was found that weakens the numbers.")
    )
    return Section("How fine the ruler was", tuple(blocks))


def _warm_up_and_stop(run: RunData) -> str:
    warmup, stopped = run.header.get("warmup") or {}, run.header.get("stopped")
    parts = []
    if warmup:
        unsteady = warmup.get("not_steady")
        how = f"not steady ({unsteady})" if unsteady else "steady (no trend, spread within 10 %)"
        parts.append(f"Warm-up took {plural(warmup['batches'], 'batch')}; then times were {how}.")
    if stopped:
        parts.append(f"Blocks ended by {stopped}.")
    return " ".join(parts)


def _how_to_read() -> str:
    return (
        "The ratio is the geometric mean over blocks of a cell's mean window time over that of "
        "off x off on the same prompts, windows of equal batch size and context matched: above 1 "
        "is slower. Its interval is Student's t on the blocks' log ratios, widened where they "
        "are autocorrelated. SAME: the whole interval lies within "
        f"{100 * DEFAULT_MARGIN:g} % of 1. "
        "FASTER and SLOWER: it excludes 1, does so after Holm's correction for the number of "
        "cells, and the ratio is farther from 1 than the noise floor. AMBIGUOUS: all else. "
        "off x off (A/A) is off x off once more, run and compared like any other cell: what it "
        f"differs by is noise. {NOT_MEASURED} stands where nothing was measured."
    )


def _configuration(run: RunData) -> Section:
    parts = ("scenario", "pair", "spec", "engine")
    values = {part: run.header.get(part) or {} for part in parts}
    values["spec"] = {k: v for k, v in values["spec"].items() if k != "scenario"}  # shown above
    rows = [(part, *row) for part in parts for row in settings(values[part])]
    return Section("Configuration", (table(["Part", "Setting", "Value"], rows, numbers_from=3),))


def _environment(run: RunData) -> Section:
    rows = list(settings(run.header.get("environment")))
    note = Paragraph("What could not be read is left out.")
    body: tuple[Block, ...] = (table(["What", "Value"], rows, numbers_from=2), note)
    return Section("Environment", body if rows else (Paragraph("Nothing was recorded."),))


def _order(run: RunData) -> Section:
    """The order in which the cells really ran, block by block."""
    prompts = {b.get("block"): b.get("prompt_ids", []) for b in run.header.get("blocks") or []}
    groups: dict[tuple[int, str], list[tuple[int, str]]] = {}
    for batch in run.batches:
        place = (batch.order, cell_label(cell_key(batch)))
        groups.setdefault((batch.block, batch.phase), []).append(place)
    rows = [
        [str(block), phase, ", ".join(name for _, name in sorted(places)),
         joined([str(prompt) for prompt in prompts.get(block, [])]) or NOT_MEASURED]
        for (block, phase), places in groups.items()
    ]  # fmt: skip
    note = "Every timed block runs each cell once on the same prompts, in an order drawn at random."
    heads = ["Block", "Phase", "Order", "Prompts"]
    return Section(
        "Order of cells in each block", (Paragraph(note), table(heads, rows, numbers_from=4))
    )
