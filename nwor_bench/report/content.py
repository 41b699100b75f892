"""What a report says, in order: the answer, cells, evidence, the run itself, the glossary."""

from collections.abc import Sequence

from nwor_bench.analysis.findings import Severity, findings, grouped
from nwor_bench.records.batch import IN_TURNS
from nwor_bench.records.engine_status import EngineStatus
from nwor_bench.records.environment import Environment
from nwor_bench.records.header import PairFacts, RunHeader
from nwor_bench.records.json_part import to_json
from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult, RunStatus, Verdict
from nwor_bench.report.document import (
    Block,
    Bullets,
    Callout,
    Definitions,
    Document,
    Headline,
    Paragraph,
    Section,
    table,
)
from nwor_bench.report.sections.acceptance import acceptance_section
from nwor_bench.report.sections.answers import questions
from nwor_bench.report.sections.blocks import block_section, block_table
from nwor_bench.report.sections.bytes import bytes_section
from nwor_bench.report.sections.cells import cell_section, first_blocks, precision_section
from nwor_bench.report.sections.dram import dram_section
from nwor_bench.report.sections.evidence import counter_section, parity_section
from nwor_bench.report.sections.fallbacks import fallback_section
from nwor_bench.report.sections.glossary import glossary
from nwor_bench.report.sections.interleaved import interleaved_section
from nwor_bench.report.sections.launches import launch_section
from nwor_bench.report.sections.limits import CPU_LIMIT, limits
from nwor_bench.report.sections.phases import phase_section
from nwor_bench.report.sections.repeat import repeat_block
from nwor_bench.report.sections.request_times import request_time_section
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
        block_section(run, cells),
        _what_ran(run),
        cell_section(cells),
        precision_section(run, cells),
        *filter(None, [interleaved_section(run, cells)]),
        window_time_section(run, cells),
        *filter(None, [request_time_section(cells)]),
        acceptance_section(cells),
        phase_section(run, cells),
        bytes_section(run, cells),
        *(section for section in (dram_section(run), launch_section(run)) if section),
        fallback_section(cells),
        _findings(run, cells),
        parity_section(run, cells),
        counter_section(run),
        Section("What the numbers do not show", (Bullets(limits(run, cells)),), folded=True),
        block_table(run, cells),
        _order(run),
        _configuration(run),
        _environment(run),
        _repeat(run),
        glossary(),
    )
    return Document(title(run.header), tuple(_lead(run, cells)), sections)


def title(header: RunHeader) -> str:
    """`nwor-bench: scenario short, models smollm2`."""
    scenario, pair = (header.scenario or {}).get("name"), (header.pair or PairFacts()).name
    return f"nwor-bench: scenario {scenario or 'unnamed'}, models {pair or 'unnamed'}"


def warnings(run: RunData) -> list[str]:
    """What is wrong with the run as a whole; empty for a complete one."""
    status = run.header.status
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
    """The first screen: the answer, its figure and table, and what weakens it; then the rest."""
    found = answer(run.header, cells)
    kind = found.badge.lower() if found.badge in set(Verdict) else "none"
    lead: list[Block] = [Headline(found.badge, found.sentence, kind)]
    lead += [Callout("Incomplete", text) for text in warnings(run)]
    lead += [*first_blocks(cells), *_weakened(run, cells)]
    if on_cpu(run.header):
        lead.append(Callout("Measured on a CPU", CPU_LIMIT))
    return [*lead, Paragraph(ORIENTATION), questions(run, cells)]


def _weakened(run: RunData, cells: Sequence[CellResult]) -> list[Block]:
    """One line for each cause that weakens the answer; notes stay under Findings."""
    groups = grouped(findings(run, cells))
    lines = tuple(f"{g.severity.upper()}: {g.line}" for g in groups if g.severity != Severity.NOTE)
    return [Paragraph("What weakens this answer:"), Bullets(lines)] if lines else []


def _what_ran(run: RunData) -> Section:
    header = run.header
    scenario, pair = header.scenario or {}, header.pair or PairFacts()
    engine, environment = header.engine or EngineStatus(), header.environment or Environment()
    gpus = joined([str(gpu.name) for gpu in environment.gpus or ()])
    facts = {
        "target": pair.target,
        "drafts by": pair.method,
        "data type": header.data_type,
        "requests at a time": scenario.get("requests"),
        "device": " ".join(filter(None, [engine.device, gpus and f"({gpus})"])) or None,
        "runner": engine.runner,
        "engine starts": engine.start_count,
        "started": header.started_at,
        "finished": header.finished_at,
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
    return Section("Findings", (note, Definitions(found)), brief=True, folded=True)


def _repeat(run: RunData) -> Section:
    return Section("To repeat this run", (repeat_block(run.header.command),), brief=True)


def _configuration(run: RunData) -> Section:
    header = run.header
    parts = {
        "scenario": header.scenario,
        "pair": to_json(header.pair),
        "spec": {k: v for k, v in (header.spec or {}).items() if k != "scenario"},  # shown above
        "engine": to_json(header.engine),
    }
    rows = [(part, *row) for part, values in parts.items() for row in settings(values)]
    caption = "What was asked for, and what the engine made of it"
    heads = ["Part", "Setting", "Value"]
    body = table(heads, rows, numbers_from=3, caption=caption)
    return Section("Configuration", (body,), folded=True)


def _environment(run: RunData) -> Section:
    rows = list(settings(to_json(run.header.environment)))
    caption = "The machine and its software; what could not be read is left out"
    body: Block = table(["What", "Value"], rows, numbers_from=2, caption=caption)
    blocks = (body if rows else Paragraph("Nothing was recorded."),)
    return Section("Environment", blocks, folded=True)


_IN_TURN = "all cells in turn, window by window"


def _order(run: RunData) -> Section:
    """The order in which the cells really ran, block by block."""
    prompts = {entry.block: entry.prompt_ids or () for entry in run.header.blocks or ()}
    groups: dict[tuple[int, str], list[tuple[int, str]]] = {}
    for batch in run.batches:
        place = (batch.order, batch.cell.label)
        groups.setdefault((batch.block, batch.phase), []).append(place)
    rows = [
        [str(block), phase, _IN_TURN if phase in IN_TURNS else
         ", ".join(name for _, name in sorted(places)),
         joined(prompts.get(block, ())) or NOT_MEASURED]
        for (block, phase), places in groups.items()
    ]  # fmt: skip
    note = "Every timed block runs each cell once on the same prompts, in an order drawn at random."
    heads = ["Block", "Phase", "Order", "Prompts"]
    order = table(heads, rows, numbers_from=4, caption="Cells in the order in which they ran")
    return Section("Order of cells in each block", (Paragraph(note), order), folded=True)
