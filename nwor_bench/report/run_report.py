"""The report of a run: the answer, its cells, the evidence, the run itself, the glossary."""

import re
from collections.abc import Iterator, Sequence

from nwor_bench.analysis.analyse import Analysis
from nwor_bench.analysis.check import check_of
from nwor_bench.analysis.effects import WINDOWS
from nwor_bench.analysis.findings.finding import Severity
from nwor_bench.analysis.findings.table import grouped
from nwor_bench.analysis.measured_worth import measured_worth
from nwor_bench.analysis.parity.tokens import REFERENCE
from nwor_bench.analysis.verdicts import DEFAULT_MARGIN
from nwor_bench.errors import ExitCode
from nwor_bench.records.facts import EngineStatus, to_json
from nwor_bench.records.header import RunHeader
from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult, NworMode, Phase, RunStatus, Verdict
from nwor_bench.report.answer import FAILED_BADGE, Answer, answer, on_cpu
from nwor_bench.report.cells import cell_section, first_figure, first_table
from nwor_bench.report.check import check_answer, check_screen
from nwor_bench.report.document import (
    Block,
    Bullets,
    Callout,
    Code,
    Definitions,
    Document,
    Paragraph,
    Section,
    table,
)
from nwor_bench.report.evidence import evidence_section
from nwor_bench.report.facts import facts, next_steps
from nwor_bench.report.over_time import over_time_section
from nwor_bench.report.precision import precision_section
from nwor_bench.report.text import NOT_MEASURED, joined, plural, settings, size
from nwor_bench.report.window_costs import dram_summary, phase_section, traffic_section
from nwor_bench.report.worth import worth_screen, worth_section
from nwor_bench.report.worth_answer import worth_answer
from nwor_bench.stats.multiple import SIGNIFICANCE

_OF_MANY_RUNS = ("--file", "--resume")
"""Flags whose command does not measure only this run, or is refused because the run exists."""


ENTRIES = (
    ("Window", "One verification step of speculative decoding: the model checks the draft tokens "
     "of all running requests in one forward pass."),
    ("NWOR", "No-write-on-reject. off: every draft token's K/V is written to the cache, as in "
     "stock vLLM. stage: it is kept out of the cache until the token is accepted. control: "
     "attention as in stage, writes as in off, which separates the two effects."),
    ("SCV", "Speculative cache validation decides which staged tokens were accepted. off: on the "
     "host. graph: by a kernel on the GPU, replayed as a CUDA graph. adaptive: the kernel is "
     "launched eagerly until a graph pays. As a column: whether it ran as asked."),
    ("Cell, reference", "NWOR mode x SCV mode. All cells are compared with off x off, the "
     "reference."),
    ("A/A, noise floor", "A/A is off x off a second time: its difference from off x off is noise. "
     "The noise floor (noise band) is how far its interval reaches from 1."),
    ("Block", "One set of prompts on which every cell runs once, in random order."),
    ("Time over off x off", "Geometric mean over blocks of the cell's mean window time divided by "
     "that of off x off, for windows of equal batch size and context (matched windows). 0.98 is "
     "2 % less time. The interval is Student's t on the blocks' log ratios, widened if they are "
     "autocorrelated. Without matched windows whole batches are compared (latency_ms)."),
    ("Tokens/s over off x off", "The inverse of the time's ratio for interleaved windows of cells "
     "with the same tokens and acceptance (checked by the gate), since a request needs the same "
     "windows in both. Otherwise tokens of a window (one a request, and the accepted drafts) over "
     "its time: which drafts are accepted is partly chance, so that interval is wider. TPOT over "
     "off x off is its inverse. The number beside off x off is of whole batches, with prefill."),
    ("Interleaved windows", "Cells alternate within a batch, in groups of four runs of a few "
     "windows; device_ms is the GPU's clock, wall_ms the host's. Decided by batches: whole "
     "batches disagree with the windows, or groups are too few. Carry-over: the ratio in runs of "
     "two windows over that in long runs, 1 if a mode has no effect on the windows after it."),
    ("Corrected for compared cells", "The answer's interval is valid for all cells at once "
     "(Bonferroni), so also for the best one. The intervals in tables are each cell's own."),
    ("FASTER, SLOWER", "The cell's own interval excludes 1, also after Holm's correction for the "
     "number of cells, and the ratio is farther from 1 than the noise floor."),
    ("SAME", f"The whole interval lies within {100 * DEFAULT_MARGIN:g} % of 1. An interval "
     "such as 0.992 to 0.996 fits FASTER too: interleaved windows make it FASTER, whole batches "
     "SAME."),
    ("CPU run", "Both modes run on a reference attention of nwor-bench's own, because stock's CPU "
     "cache cannot be read in part: times judge the harness, never NWOR."),
    ("AMBIGUOUS", "None of these: the run was too short or too noisy."),
    ("NOT MEASURED", "A draft count with too few groups, blocks or requests for an interval."),
    ("CHECKED", "The output was compared with that of off x off, and nothing was timed, as asked."),
    ("INEFFECTIVE", "The mode never fired, so it has no ratio."),
    ("INVALID", "The mode changed the model's output, or its counts do not add up: its times do "
     "not count."),
    ("Staged, Committed, Rejected", "Draft tokens kept out of the cache; those of them accepted "
     "and written later; those dropped. Stage operations: staged tokens x target layers."),
    ("Length", "Tokens that a request gains in a window, the bonus token included."),
    ("Smallest visible effect", "Four of five such runs would have shown an effect of this size."),
    ("p", "Chance of such a difference if there is none, by the interval's test, with Holm's "
     f"correction but for A/A; below {SIGNIFICANCE:g} counts."),
    (NOT_MEASURED, "No value, never 0: it was not measured; it does not apply (the reference has "
     "no ratio to itself); or it was not compared (an INVALID cell has no times)."),
)  # fmt: skip


def build_document(analysis: Analysis) -> Document:
    """The whole report of a run, made only from its records."""
    run = analysis.run
    by_drafts = run.header.spec.draft_counts is not None and not run.header.checks_only
    failed = not analysis.cells and run.header.status is RunStatus.FAILED
    if failed or run.header.checks_speculation:
        told = (_this_run(run), Section("To repeat this run", (_repeat(run.header.command),)))
        return Document(title(run.header), tuple(_first_screen(analysis)), told)
    sections = (
        *([worth_section(measured_worth([analysis]))] if by_drafts else []),
        cell_section(analysis.cells),
        *over_time_section(analysis),
        precision_section(analysis),
        phase_section(analysis),
        traffic_section(analysis),
        evidence_section(analysis),
        _findings(analysis),
        _this_run(run),
        Section("To repeat this run", (_repeat(run.header.command),), brief=True),
        Section("Glossary", (Definitions(ENTRIES),), folded=True),
    )
    return Document(title(run.header), tuple(_lead(analysis)), sections)


def summary(analysis: Analysis, *, verbose: bool = False) -> Document:
    """The terminal's part: the first screen, with `verbose` also the brief sections."""
    if verbose:
        return build_document(analysis).shortened()
    return Document(title(analysis.run.header), tuple(_first_screen(analysis)))


def title(header: RunHeader) -> str:
    """`nwor-bench: scenario short, models smollm2`."""
    scenario, pair = (header.scenario or {}).get("name"), header.pair.name
    return f"nwor-bench: scenario {scenario or 'unnamed'}, models {pair or 'unnamed'}"


def warnings(run: RunData) -> list[str]:
    """Problems of the run as a whole; empty for a complete one."""
    status = run.header.status
    problems = list(run.warnings)
    if status != RunStatus.COMPLETE:
        why = "".join(f"; {event['error']}" for event in run.events if "error" in event)
        ended = f"This run did not end as planned (status: {status or 'unknown'}{why})"
        problems.insert(0, f"{ended}: it measured only a part.")
    return problems


def _first_screen(analysis: Analysis) -> list[Block]:
    """The answer, what it rests on, its figure and table, and what to do next."""
    run, reply = analysis.run, answer_of(analysis)
    if run.header.checks_speculation:
        return check_screen(check_of([analysis]))
    if reply.badge == FAILED_BADGE:
        return [reply.headline, Definitions(reply.facts)]
    head = [reply.headline, *_incomplete(run)]
    if run.header.spec.draft_counts is not None:
        return [*head, *worth_screen(measured_worth([analysis]))]
    return [*head, *first_figure(run.header, analysis.cells), facts(analysis),
            *first_table(run.header, analysis.cells), next_steps(analysis)]  # fmt: skip


def _lead(analysis: Analysis) -> list[Block]:
    """The first screen, and below it everything that weakens the answer."""
    told = (_state_slots(analysis.run.header.engine), dram_summary(analysis.dram))
    saved = [Paragraph(text) for text in told if text]
    return [*_first_screen(analysis), *saved, *_weakens(analysis)]


def _state_slots(engine: EngineStatus) -> str | None:
    """What an engine with other state slots saves a request; None without one."""
    slots, reserved = engine.state_slots, engine.state_reserved_bytes
    for arm, own in (engine.arms or {}).items():
        arm_slots, less = own.get("state_slots"), own.get("state_reserved_bytes")
        if arm_slots and less and slots and reserved:
            return (
                f"A request reserves {plural(slots, 'state slot')} ({size(reserved)}) in off x off "
                f"and {arm_slots} ({size(less)}) with {arm}."
            )
    return None


def answer_of(analysis: Analysis) -> Answer:
    """The run's answer: what a check found, why it failed, whether NWOR pays, or which draft count
    does."""
    run = analysis.run
    if run.header.checks_speculation:
        return check_answer(check_of([analysis]))
    broken = any(cell.verdict == Verdict.INVALID for cell in analysis.cells)
    if run.header.status is RunStatus.FAILED and not broken:
        return _failed(run)
    if analysis.run.header.spec.draft_counts is not None:
        return worth_answer(measured_worth([analysis]))
    return answer(analysis.run.header, analysis.cells)


ENGINE_LOG = "engine.log in the run's folder"
MAX_WORDS = 20
"""Words of a headline, its badge included."""


def _failed(run: RunData) -> Answer:
    """Why a run ended with an error, and how much it had measured."""
    errors = [str(event["error"]) for event in run.events if "error" in event]
    why = " ".join((errors[-1] if errors else "The cause was not recorded.").split())
    text, *rest = re.split(r"[.;] ", why, maxsplit=1)
    if len(words := text.split(" ")) >= MAX_WORDS:
        text, rest = f"{' '.join(words[: MAX_WORDS - 2])} ...", [why]
    timed = sum(batch.phase == Phase.TIMED for batch in run.batches)
    measured = f"{plural(timed, 'batch')} until then" if timed else ""
    entries = (("what now", "".join(rest)), ("measured", measured), ("log", ENGINE_LOG))
    return Answer(FAILED_BADGE, text, facts=tuple(entry for entry in entries if entry[1]))


def exit_code_of(analysis: Analysis) -> ExitCode:
    """The exit code that a run's cells and its answer ask for, however it ended."""
    is_check = analysis.run.header.checks_speculation
    if not is_check and any(cell.verdict == Verdict.INVALID for cell in analysis.cells):
        return ExitCode.CORRECTNESS_BROKEN
    return answer_of(analysis).exit_code


def _incomplete(run: RunData) -> list[Block]:
    return [Callout("Incomplete", text) for text in warnings(run)]


def _weakens(analysis: Analysis) -> list[Block]:
    """All causes, if there are more than the one among the facts."""
    groups = [g for g in grouped(analysis.findings) if g.severity != Severity.NOTE]
    lines = tuple(f"{g.severity.upper()}: {g.line}" for g in groups)
    return [Paragraph("What weakens this answer:"), Bullets(lines)] if len(lines) > 1 else []


def _this_run(run: RunData) -> Section:
    """The run in a sentence, then every setting and the environment."""
    header = run.header
    scenario, pair = header.scenario or {}, header.pair
    engine, environment = header.engine, header.environment
    gpus = joined([str(gpu.name) for gpu in environment.gpus or ()])
    values = {
        "target": pair.target,
        "drafts by": pair.method,
        "data type": header.data_type,
        "requests at a time": scenario.get("requests"),
        "device": " ".join(filter(None, [engine.device, gpus and f"({gpus})"])) or None,
        "runner": engine.runner,
        "attention of windows": attention_of(header),
        "stages": engine.staged_parts,
        "engine starts": engine.start_count,
        "started": header.started_at,
        "finished": header.finished_at,
    }
    known = ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
    parts = {
        "scenario": header.scenario,
        "pair": to_json(header.pair),
        "spec": {k: v for k, v in header.stored_spec.items() if k != "scenario"},
        "engine": to_json(header.engine),
        "environment": to_json(header.environment),
    }
    rows = [(part, *row) for part, values in parts.items() for row in settings(values)]
    caption = "Options, the engine's settings, and the machine"
    body = table(["Part", "Setting", "Value"], rows, numbers_from=3, caption=caption)
    sentence = [Paragraph(f"{known[0].upper()}{known[1:]}.")] if known else []
    return Section("This run", (*sentence, body), folded=True)


def attention_of(header: RunHeader) -> str | None:
    """What attends windows of the run's size, if that was timed: `8x5 ours`."""
    graphs = header.engine.cuda_graphs
    scenario = header.scenario or {}
    size = f"{scenario.get('requests')}x{(scenario.get('draft_tokens') or 0) + 1}"
    how = (graphs.attention or {}).get(size) if graphs else None
    return None if how is None else f"{size} {how}"


def _repeat(command: str | None) -> Block:
    """The command without this run's folder, which exists; a sentence if none is known."""
    if not command:
        return Paragraph("The command was not recorded.")
    if re.search(rf" ({'|'.join(_OF_MANY_RUNS)})\b", command):
        return Paragraph(
            "This run's own command was not recorded: it was part of a sweep file or was resumed. "
            "Its settings are under This run."
        )
    return Code(re.sub(r" --output[ =]('[^']*'|\S+)", "", command))


def _findings(analysis: Analysis) -> Section:
    """Each finding with its remedy, the most severe first; then the limits of any such run."""
    entries = tuple((f"{f.severity.upper()}: {f.message}", f.remedy) for f in analysis.findings)
    none = Paragraph("Nothing was found that weakens the numbers.")
    shown = Bullets(limits(analysis.run, analysis.cells))
    blocks = (
        Definitions(entries) if entries else none,
        Paragraph("What the numbers do not show:"),
        shown,
    )
    return Section("Findings and limits", blocks, folded=True)


def limits(run: RunData, cells: Sequence[CellResult]) -> tuple[str, ...]:
    """A sentence or two for each thing that a reader might wrongly conclude from this run."""
    return (
        *_attention(run, cells),
        *_work(run, cells),
        "A verdict is valid for this pair, machine and load; others may differ.",
        "The gate checks its own prompts in this data type. Passing it is strong evidence of the "
        "same computation, not a proof for every input.",
    )


def _attention(run: RunData, cells: Sequence[CellResult]) -> Iterator[str]:
    """Only interleaved windows with the control separate the effects of attention and writes."""
    split = any(c.nwor_mode == NworMode.CONTROL and c.interleaved == WINDOWS for c in cells)
    staged = any(cell.nwor_mode == NworMode.STAGE and cell.ratio for cell in cells)
    if staged and not split and not on_cpu(run.header):
        yield (
            "Mode stage changes two things: drafts are not written, and attention is nwor-bench's "
            "kernel instead of the backend's. A ratio contains both effects. To compare only the "
            "attention kernels: nwor-bench kernels --kernels verify_attention."
        )


def _work(run: RunData, cells: Sequence[CellResult]) -> Iterator[str]:
    baseline = next((cell for cell in cells if cell.verdict == REFERENCE), None)
    if baseline is not None:
        unequal = [
            cell.label
            for cell in cells
            if cell.ratio is not None and cell.output_tokens != baseline.output_tokens
        ]
        if unequal:
            yield (
                f"Not the same number of output tokens as off x off: {joined(unequal)}. Their "
                "batch latencies and tokens/s compare unequal work; windows are matched one by one."
            )
    if any(batch.phase == Phase.TIMED and batch.temperature > 0 for batch in run.batches):
        yield (
            "Timed batches were sampled at a temperature above 0; parity was checked greedily "
            "and does not apply to the sampled text."
        )
