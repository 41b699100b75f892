"""The report of a sweep: its answer over all runs, and each run beside the others."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from nwor_bench.analysis.analyse import Analysis
from nwor_bench.analysis.check import Check, check_of
from nwor_bench.analysis.findings.finding import Finding, Severity
from nwor_bench.analysis.findings.table import grouped
from nwor_bench.analysis.measured_worth import MeasuredWorth, measured_worth
from nwor_bench.records.files import DONE, LEFT_OUT
from nwor_bench.records.store import RunData
from nwor_bench.records.types import AA, CellResult, NworMode, Verdict
from nwor_bench.report.answer import FAILED_BADGE, Answer
from nwor_bench.report.check import check_answer, check_screen
from nwor_bench.report.contexts import context_answer, context_table
from nwor_bench.report.document import (
    Block,
    Bullets,
    Callout,
    Definitions,
    Document,
    Paragraph,
    Section,
    Table,
    table,
)
from nwor_bench.report.run_report import answer_of
from nwor_bench.report.text import NOT_MEASURED, interval, plural, work_change
from nwor_bench.report.worth import worth_screen, worth_section
from nwor_bench.report.worth_answer import worth_answer

MIXED = "MIXED"
NOTHING = "NOTHING MEASURED"
MAX_ROWS = 8
"""More runs are below the first screen of a summary."""


@dataclass(frozen=True)
class SweptRun:
    """A run's place in its sweep, and what it measured."""

    number: int
    """From 1, in the sweep file's order."""

    folder: str
    """The run's folder, relative to the sweep's."""

    place: Mapping[str, Any]
    """The run's value on each axis, by the axis' name; None if the axis has none."""

    words: Mapping[str, str]
    """`place` for people: `8 requests`."""

    status: str
    """`pending`, `done`, `failed`, `interrupted` or `left out`."""

    error: str | None
    """Why it failed."""

    analysis: Analysis | None
    """What its records say; None if it never started."""

    @property
    def data(self) -> RunData | None:
        """The run's records; None if it never started."""
        return None if self.analysis is None else self.analysis.run

    @property
    def cells(self) -> tuple[CellResult, ...]:
        """Summaries of its cells; empty without records."""
        return () if self.analysis is None else self.analysis.cells

    @cached_property
    def answer(self) -> Answer | None:
        """The run's own answer; None without cells."""
        if self.analysis is None or not self.cells:
            return None
        return answer_of(self.analysis)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Warnings and errors of the run."""
        if self.analysis is None or not self.cells:
            return ()
        return tuple(f for f in self.analysis.findings if f.severity != Severity.NOTE)

    @property
    def compared(self) -> tuple[CellResult, ...]:
        """Cells with a ratio, but for A/A."""
        return tuple(c for c in self.cells if c.arm != AA and c.ratio is not None)

    def cell(self, label: str) -> CellResult | None:
        """The cell of that name."""
        return next((cell for cell in self.cells if cell.label == label), None)


def varying(runs: Sequence[SweptRun]) -> tuple[str, ...]:
    """The axes on which these runs differ."""
    names = runs[0].place if runs else {}
    return tuple(name for name in names if len({repr(run.place.get(name)) for run in runs}) > 1)


def label_of_run(run: SweptRun, axes: Sequence[str]) -> str:
    """The run's words on these axes: `8 requests, 4 drafts`; all of them if none varies."""
    parts = [run.words[name] for name in axes or run.words if name in run.words]
    return ", ".join(parts) or run.folder


def labels(runs: Sequence[SweptRun]) -> list[str]:
    """Names of the compared cells of all runs, those with NWOR on first."""
    every = [cell for run in runs for cell in run.compared]
    ordered = sorted(every, key=lambda cell: cell.nwor_mode == NworMode.OFF)
    return list(dict.fromkeys(cell.label for cell in ordered))


def sweep_document(
    name: str,
    runs: Sequence[SweptRun],
    worths: Mapping[str, MeasuredWorth] | None = None,
) -> Document:
    """The whole report of a sweep.

    Args:
        worths: `swept_worths` of the runs.
    """
    if (check := swept_check(runs)) is not None:
        return Document(f"nwor-bench {name}", tuple(check_screen(check)))
    measured = [run for run in runs if run.cells]
    if worths:
        return _worth_document(name, runs, worths)
    reply = sweep_answer(runs)
    lead: list[Block] = [reply.headline, Definitions(reply.facts)]
    if reply.badge == FAILED_BADGE:
        told = (Section("Runs", tuple(_missing(runs)), brief=True),)
        return Document(f"nwor-bench sweep: {name}", tuple(lead), told)
    lead += _missing(runs)
    many = len(runs) > MAX_ROWS
    sections = [Section("Answers", (_answers(runs),), brief=True)] if many else []
    lead += [] if many else [_answers(runs)]
    if measured:
        lead += [*_weakened(measured)]
    if number := sum(len(run.compared) for run in measured):
        cells = (Paragraph(_chance(number)), _ratios(runs))
        sections.append(Section("All cells", cells, brief=True))
    return Document(f"nwor-bench sweep: {name}", tuple(lead), tuple(sections))


def sweep_answer(
    runs: Sequence[SweptRun], worths: Mapping[str, MeasuredWorth] | None = None
) -> Answer:
    """How many runs have which answer, and the range of their ratios; of draft counts (`worths`,
    see `swept_worths`) which pay, by scenario; what a check found."""
    if (check := swept_check(runs)) is not None:
        return check_answer(check)
    if worths:
        return _worth_answer(worths)
    badges = Counter(run.answer.badge for run in runs if run.answer)
    if set(badges) <= {FAILED_BADGE}:
        for run in runs:
            if run.status == "failed" and run.analysis is not None:
                return answer_of(run.analysis)
        return Answer(NOTHING, f"None of {plural(len(runs), 'run')} measured anything.")
    badge = next(iter(badges)) if len(badges) == 1 else MIXED
    if Verdict.INVALID in badges:
        badge = str(Verdict.INVALID)
    counts = ", ".join(f"{answer} in {number}" for answer, number in badges.most_common())
    idle = [run for run in runs if run.answer and run.answer.exit_code]
    extremes = _extremes(runs)
    facts = [("ratios", extremes)] if extremes else []
    facts += [(f"run {run.number}", run.answer.sentence) for run in idle if run.answer]
    text = f"{counts} of {plural(len(runs), 'run')}."
    return Answer(badge, text, facts=tuple(facts))


def swept_worths(runs: Sequence[SweptRun]) -> dict[str, MeasuredWorth]:
    """By scenario, what its runs say together, if the runs that were measured compare draft
    counts and differ only in batch size and scenario; else empty."""
    measured = [run for run in runs if run.cells and run.analysis and run.status != LEFT_OUT]
    alike = set(varying(measured)) <= {"requests", "scenario", "engines_at_once"}
    by_scenario: dict[str, list[Analysis]] = {}
    for run in measured:
        assert run.analysis is not None
        if not alike or run.analysis.worth is None:
            return {}
        by_scenario.setdefault(run.words.get("scenario", ""), []).append(run.analysis)
    out: dict[str, set[int]] = {}
    for run in (run for run in runs if run.status == LEFT_OUT):
        out.setdefault(run.words.get("scenario", ""), set()).add(run.place["requests"])
    return {name: measured_worth(own, out.get(name, ())) for name, own in by_scenario.items()}


def swept_check(runs: Sequence[SweptRun]) -> Check | None:
    """What the runs say together if they check speculation; else None."""
    begun = [run.analysis for run in runs if run.analysis is not None]
    if not begun or not all(analysis.run.header.checks_speculation for analysis in begun):
        return None
    lost = {run.place["requests"]: run.error for run in runs if run.analysis is None}
    return check_of(begun, lost) if set(varying(runs)) <= {"requests"} else None


def _worth_answer(worths: Mapping[str, MeasuredWorth]) -> Answer:
    answers = {scenario: worth_answer(worth) for scenario, worth in worths.items()}
    if len(answers) == 1:
        return next(iter(answers.values()))
    badges = {answer.badge for answer in answers.values()}
    badge = badges.pop() if len(badges) == 1 else MIXED
    if Verdict.INVALID in (answer.badge for answer in answers.values()):
        badge = str(Verdict.INVALID)
    own = tuple((name, answer.headline.line) for name, answer in answers.items())
    text, changes = context_answer(worths)
    return Answer(badge, text, facts=(*changes, *own))


def _worth_document(
    name: str,
    runs: Sequence[SweptRun],
    worths: Mapping[str, MeasuredWorth],
) -> Document:
    """One answer of all batch sizes together; the runs' own reports have fewer requests."""
    reply = _worth_answer(worths)
    lead: list[Block] = [reply.headline, *_missing(runs)]
    lead += [context_table(worths), Definitions(reply.facts)] if len(worths) > 1 else []
    sections = []
    for scenario, measured in worths.items():
        screen, whole = worth_screen(measured), worth_section(measured)
        if len(worths) == 1:
            lead, sections = [*lead, *screen], [whole]
        else:
            sections.append(Section(scenario, (*screen, *whole.blocks), brief=True))
    axes = [name for name in varying(runs) if name != "requests"] + ["requests"]
    rows = [[str(run.number), label_of_run(run, axes), run.status] for run in runs]
    folders = table(["Run", "Batch size", "Status"], rows, numbers_from=3)
    sections.append(Section("Runs", (replace(folders, links=_links(runs)),)))
    weakened = Section("What weakens it", tuple(_weakened(runs)), brief=True)
    sections += [weakened] if weakened.blocks else []
    title = "nwor-bench worth" + ("" if name == "worth" else f": {name}")  # the command's own name
    return Document(title, tuple(lead), tuple(sections))


def _extremes(runs: Sequence[SweptRun]) -> str:
    """The lowest and the highest of the ratios that the runs' answers rest on."""
    answered = [(run.answer.cell, run) for run in runs if run.answer and run.answer.cell]
    rated = [(cell.ratio.value, cell, run) for cell, run in answered if cell.ratio]
    if len(rated) < 2:
        return ""
    axes = varying(runs)
    ends = [
        f"{value:.3f} ({cell.label}, {label_of_run(run, axes)})"
        for pick in (min, max)
        for value, cell, run in [pick(rated, key=lambda entry: entry[0])]
    ]
    return f"over off x off from {ends[0]} to {ends[1]}"


def _missing(runs: Sequence[SweptRun]) -> list[Block]:
    """Runs that did not end."""
    left = [run for run in runs if run.status not in (DONE, LEFT_OUT)]
    if not left:
        return []
    errors = {run.number: f": {' '.join(run.error.split())}" for run in left if run.error}
    parts = [f"run {run.number} ({run.status}{errors.get(run.number, '')})" for run in left]
    return [Callout("Incomplete", f"{plural(len(left), 'run')} did not end: {'; '.join(parts)}.")]


def _answers(runs: Sequence[SweptRun]) -> Table:
    """One row a run: its badge, and the cell that its answer rests on, if any run has one."""
    axes = varying(runs)
    columns = 5 if any(run.answer and run.answer.cell for run in runs) else 2
    rows = []
    for run in runs:
        cell = run.answer.cell if run.answer else None
        rated = [NOT_MEASURED] * 3
        if cell is not None:
            rated = [cell.label, interval(cell.ratio), work_change(cell)]
        badge = run.answer.badge if run.answer else run.status
        rows.append([f"{run.number}: {label_of_run(run, axes)}", badge, *rated][:columns])
    heads = ["Run", "Answer", "Cell", "Time over off x off [95 % interval]", "GPU's work, %"]
    made = table(heads[:columns], rows, numbers_from=3, caption="Answers")
    return replace(made, links=_links(runs))


def _ratios(runs: Sequence[SweptRun]) -> Table:
    """Runs down, cells across."""
    axes, names = varying(runs), labels(runs)
    rows = [
        [f"{run.number}: {label_of_run(run, axes)}", *(_value(run.cell(name)) for name in names)]
        for run in runs
    ]
    return replace(table(["Run", *names], rows, caption="Ratio to off x off"), links=_links(runs))


def _links(runs: Sequence[SweptRun]) -> tuple[str, ...]:
    return tuple(f"{run.folder}/report.html" if run.cells else "" for run in runs)


def _value(cell: CellResult | None) -> str:
    if cell is None:
        return NOT_MEASURED
    verdict = str(cell.verdict)
    return verdict if cell.ratio is None else f"{verdict} {interval(cell.ratio)}"


def _chance(number: int) -> str:
    return (
        f"The intervals are each cell's own: of {plural(number, 'ratio')} without any effect about "
        f"{max(1, round(number / 20))} would exclude 1 by chance. Trust effects that several runs "
        "show."
    )


def _weakened(runs: Sequence[SweptRun]) -> list[Block]:
    """One line for each cause in all runs together, with the runs that have it."""
    lines = []
    for group in grouped([finding for run in runs for finding in run.findings]):
        kinds = {finding.kind for finding in group.findings}
        numbers = [str(run.number) for run in runs if any(f.kind in kinds for f in run.findings)]
        where = f"{'run' if len(numbers) == 1 else 'runs'} {', '.join(numbers)}"
        if 1 < len(numbers) == len(runs):
            where = "all runs"
        lines.append(f"{group.severity.upper()}: {group.line} ({where})")
    return [Paragraph("What weakens these answers:"), Bullets(tuple(lines))] if lines else []
