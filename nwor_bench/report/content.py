"""What a report says, in order: the answer, cells, evidence, the run itself, the glossary."""

from collections.abc import Sequence
from typing import Any

from nwor_bench.analysis.findings import findings
from nwor_bench.analysis.invariants import cell_key, cell_label
from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult, RunStatus, Verdict
from nwor_bench.report.document import (
    Block,
    Bullets,
    Callout,
    Code,
    Definitions,
    Document,
    Headline,
    Paragraph,
    Section,
    table,
)
from nwor_bench.report.sections.acceptance import acceptance_section
from nwor_bench.report.sections.answers import questions
from nwor_bench.report.sections.bytes import bytes_section
from nwor_bench.report.sections.cells import cell_section, precision_section
from nwor_bench.report.sections.dram import dram_section
from nwor_bench.report.sections.evidence import counter_section, parity_section
from nwor_bench.report.sections.fallbacks import fallback_section
from nwor_bench.report.sections.glossary import glossary
from nwor_bench.report.sections.launches import launch_section
from nwor_bench.report.sections.limits import CPU_LIMIT, limits
from nwor_bench.report.sections.phases import phase_section
from nwor_bench.report.sections.verdicts import answer, on_cpu
from nwor_bench.report.sections.window_times import window_time_section
from nwor_bench.report.text import NOT_MEASURED, joined, settings

ORIENTATION = (
    "NWOR is an option for serving language models with vLLM: it keeps the data of guessed tokens "
    "out of the model's cache until they turn out right. Its settings have names like stage x "
    "graph; off x off is serving without it."
)
BACKGROUND = (
    "A language model can be made faster by guessing several tokens ahead (drafts) and letting the "
    "model check them all in one step, a window. Stock vLLM writes the K/V data of every draft "
    "into its cache, rejected ones too. NWOR (no-write-on-reject) writes only those that the model "
    "accepted; SCV says who decides which ones these are, the host or a kernel. This page shows "
    "what that did to one pair of models on one machine. Each cell is an NWOR mode x an SCV mode, "
    "and off x off has neither. The glossary at the end explains every word and column."
)


def build_document(run: RunData, cells: Sequence[CellResult]) -> Document:
    """The whole report of a run, from its records and nothing else."""
    sections = (
        _what_ran(run),
        cell_section(cells),
        precision_section(run, cells),
        window_time_section(run, cells),
        acceptance_section(cells),
        phase_section(run, cells),
        bytes_section(run, cells),
        *(section for section in (dram_section(run), launch_section(run)) if section),
        fallback_section(cells),
        _findings(run, cells),
        parity_section(run, cells),
        counter_section(run),
        Section("What the numbers do not show", (Bullets(limits(run, cells)),)),
        _order(run),
        _configuration(run),
        _environment(run),
        _repeat(run),
        glossary(),
    )
    return Document(title(run.header), tuple(_lead(run, cells)), sections)


def title(header: dict[str, Any]) -> str:
    """`nwor-bench: scenario short, models smollm2`."""
    scenario, pair = ((header.get(part) or {}).get("name") for part in ("scenario", "pair"))
    return f"nwor-bench: scenario {scenario or 'unnamed'}, models {pair or 'unnamed'}"


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
    found = answer(run.header, cells)
    kind = found.badge.lower() if found.badge in set(Verdict) else "none"
    lead: list[Block] = [Headline(found.badge, found.sentence, kind), Paragraph(ORIENTATION)]
    lead += [Callout("Incomplete", text) for text in warnings(run)]
    if on_cpu(run.header):
        lead.append(Callout("Measured on a CPU", CPU_LIMIT))
    lead.append(questions(run, cells))
    return lead


def _what_ran(run: RunData) -> Section:
    header = run.header
    scenario, pair = header.get("scenario") or {}, header.get("pair") or {}
    engine, environment = header.get("engine") or {}, header.get("environment") or {}
    gpus = joined([str(gpu.get("name")) for gpu in environment.get("gpus") or []])
    facts = {
        "target": pair.get("target"),
        "drafts by": pair.get("method"),
        "data type": pair.get("dtype"),
        "requests at a time": scenario.get("requests"),
        "device": " ".join(filter(None, [engine.get("device"), gpus and f"({gpus})"])) or None,
        "runner": engine.get("runner"),
        "engine starts": engine.get("start_count"),
        "started": header.get("started_at"),
        "finished": header.get("finished_at"),
    }
    known = [f"{name} {value}" for name, value in facts.items() if value is not None]
    blocks: list[Block] = [Paragraph(BACKGROUND)]
    if known:
        sentence = ", ".join(known)
        blocks.append(Paragraph(f"{sentence[0].upper()}{sentence[1:]}."))
    return Section("What ran", tuple(blocks))


def _findings(run: RunData, cells: Sequence[CellResult]) -> Section:
    found = tuple((f"{f.severity.upper()}: {f.message}", f.remedy) for f in findings(run, cells))
    if not found:
        nothing = Paragraph("Nothing was found that weakens the numbers.")
        return Section("Findings", (nothing,), brief=True)
    note = Paragraph("What weakens the numbers, the severest first, each with what to do about it.")
    return Section("Findings", (note, Definitions(found)), brief=True)


def _repeat(run: RunData) -> Section:
    command = run.header.get("command")
    body: Block = Code(str(command)) if command else Paragraph("The command was not recorded.")
    return Section("To repeat this run", (body,), brief=True)


def _configuration(run: RunData) -> Section:
    parts = ("scenario", "pair", "spec", "engine")
    values = {part: run.header.get(part) or {} for part in parts}
    values["spec"] = {k: v for k, v in values["spec"].items() if k != "scenario"}  # shown above
    rows = [(part, *row) for part in parts for row in settings(values[part])]
    caption = "What was asked for, and what the engine made of it"
    heads = ["Part", "Setting", "Value"]
    return Section("Configuration", (table(heads, rows, numbers_from=3, caption=caption),))


def _environment(run: RunData) -> Section:
    rows = list(settings(run.header.get("environment")))
    caption = "The machine and its software; what could not be read is left out"
    body: Block = table(["What", "Value"], rows, numbers_from=2, caption=caption)
    return Section("Environment", (body if rows else Paragraph("Nothing was recorded."),))


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
    order = table(heads, rows, numbers_from=4, caption="Cells in the order in which they ran")
    return Section("Order of cells in each block", (Paragraph(note), order))
