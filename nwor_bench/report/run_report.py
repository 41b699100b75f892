"""The report of a run: the answer, its cells, the evidence, the run itself, the glossary."""

import shlex

from nwor_bench.analysis.analyse import Analysis
from nwor_bench.analysis.findings.table import Severity, grouped
from nwor_bench.records.facts import EngineStatus, Environment, to_json
from nwor_bench.records.header import PairFacts, RunHeader
from nwor_bench.records.store import RunData
from nwor_bench.records.types import RunStatus
from nwor_bench.report.answer import CPU_LIMIT, answer, on_cpu, questions
from nwor_bench.report.cells import cell_section, first_blocks
from nwor_bench.report.document import (
    Block,
    Bullets,
    Callout,
    Code,
    Document,
    Paragraph,
    Section,
    table,
)
from nwor_bench.report.evidence import evidence_section
from nwor_bench.report.limits import findings_section, glossary
from nwor_bench.report.precision import interleaved_section, precision_section
from nwor_bench.report.text import joined, settings
from nwor_bench.report.window_costs import dram_summary, phase_section, traffic_section

_OF_MANY_RUNS = ("--file", "--resume")
"""Flags whose command does not measure only this run, or is refused because the run exists."""


def build_document(analysis: Analysis) -> Document:
    """The whole report of a run, made only from its records."""
    run, interleaved = analysis.run, interleaved_section(analysis)
    sections = (
        cell_section(analysis.cells),
        *([interleaved] if interleaved else []),
        precision_section(analysis),
        phase_section(analysis),
        traffic_section(analysis),
        evidence_section(analysis),
        findings_section(analysis),
        _this_run(run),
        Section("To repeat this run", (_repeat(run.header.command),), brief=True),
        glossary(),
    )
    return Document(title(run.header), tuple(_lead(analysis)), sections)


def summary(analysis: Analysis, *, verbose: bool = False) -> Document:
    """The terminal's part: the lead; with `verbose` also the brief sections."""
    if verbose:
        return build_document(analysis).shortened()
    more = Paragraph("Details: report.html, or `nwor-bench report -v`.")
    return Document(title(analysis.run.header), (*_lead(analysis), more))


def title(header: RunHeader) -> str:
    """`nwor-bench: scenario short, models smollm2`."""
    scenario, pair = (header.scenario or {}).get("name"), (header.pair or PairFacts()).name
    return f"nwor-bench: scenario {scenario or 'unnamed'}, models {pair or 'unnamed'}"


def warnings(run: RunData) -> list[str]:
    """Problems of the run as a whole; empty for a complete one."""
    status = run.header.status
    found = list(run.warnings)
    if status != RunStatus.COMPLETE:
        why = "".join(f"; {event['error']}" for event in run.events if "error" in event)
        found.insert(
            0,
            f"This run did not end as planned (status: {status or 'unknown'}{why}): the numbers "
            "cover only what was measured until then.",
        )
    return found


def _lead(analysis: Analysis) -> list[Block]:
    """The first screen: the answer, its figure and table, what weakens it, the questions."""
    run, cells = analysis.run, analysis.cells
    lead: list[Block] = [answer(run.header, cells).headline]
    lead += [Callout("Incomplete", text) for text in warnings(run)]
    lead += first_blocks(cells)
    if on_cpu(run.header):
        lead.append(Callout("Measured on a CPU", CPU_LIMIT))
    counted = dram_summary(analysis.dram)
    lead += [Paragraph(counted)] if counted else []
    groups = [g for g in grouped(analysis.findings) if g.severity != Severity.NOTE]
    if groups:
        lines = tuple(f"{g.severity.upper()}: {g.line}" for g in groups)
        lead += [Paragraph("What weakens this answer:"), Bullets(lines)]
    return [*lead, questions(analysis)]


def _this_run(run: RunData) -> Section:
    """The run in a sentence, then every setting and the environment."""
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
    known = ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
    parts = {
        "scenario": header.scenario,
        "pair": to_json(header.pair),
        "spec": {k: v for k, v in (header.spec or {}).items() if k != "scenario"},
        "engine": to_json(header.engine),
        "environment": to_json(header.environment),
    }
    rows = [(part, *row) for part, values in parts.items() for row in settings(values)]
    caption = "Options, the engine's settings, and the machine"
    body = table(["Part", "Setting", "Value"], rows, numbers_from=3, caption=caption)
    sentence = [Paragraph(f"{known[0].upper()}{known[1:]}.")] if known else []
    return Section("This run", (*sentence, body), folded=True)


def _repeat(command: str | None) -> Block:
    """The command without this run's folder, which exists; a sentence if none is known."""
    if not command:
        return Paragraph("The command was not recorded.")
    words = _split(command)
    if any(word.split("=")[0] in _OF_MANY_RUNS for word in words):
        return Paragraph(
            "This run's own command was not recorded: it was part of a sweep file or was resumed. "
            "Its settings are under This run."
        )
    return Code(_without_output(words) if "--output" in command else command)


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # not a command line that nwor-bench wrote
        return [command]


def _without_output(words: list[str]) -> str:
    kept, skip = [], False
    for word in words:
        if not skip and word.split("=")[0] != "--output":
            kept.append(word)
        skip = word == "--output"
    return shlex.join(kept)
