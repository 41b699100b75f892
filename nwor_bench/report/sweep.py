"""The report of a sweep: its answer over all runs, and each run beside the others."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from nwor_bench.analysis.analyse import Analysis
from nwor_bench.analysis.findings import Finding, Severity, grouped
from nwor_bench.analysis.measured_worth import MeasuredWorth, measured_worth
from nwor_bench.records.store import RunData
from nwor_bench.records.types import AA, CellResult, NworMode, Verdict
from nwor_bench.report.answer import CPU_BADGE, MEASURED_ON_CPU, Answer
from nwor_bench.report.document import (
    Block,
    Bullets,
    Callout,
    Document,
    Paragraph,
    Section,
    Table,
    table,
)
from nwor_bench.report.run_report import answer_of
from nwor_bench.report.text import NOT_MEASURED, interval, plural, work_change
from nwor_bench.report.worth import worth_blocks
from nwor_bench.report.worth_answer import worth_answer

DONE = "done"
MIXED = "MIXED"
NOTHING = "NOTHING MEASURED"


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
    """`pending`, `done`, `failed` or `interrupted`."""

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
    measured = [run for run in runs if run.cells]
    if worths:
        return _worth_document(name, runs, worths)
    lead: list[Block] = [sweep_answer(runs).headline, *_missing(runs), _answers(runs)]
    sections: list[Section] = []
    if measured:
        lead += [Paragraph(_chance(measured)), *_weakened(measured)]
        if any(run.answer and run.answer.badge == CPU_BADGE for run in measured):
            lead.append(MEASURED_ON_CPU)
        sections.append(Section("All cells", (_ratios(runs),), brief=True))
    return Document(f"nwor-bench sweep: {name}", tuple(lead), tuple(sections))


def sweep_answer(
    runs: Sequence[SweptRun], worths: Mapping[str, MeasuredWorth] | None = None
) -> Answer:
    """How many runs have which answer, and the range of their ratios; of draft counts (`worths`,
    see `swept_worths`) which pay, by scenario."""
    if worths:
        return _worth_answer(worths)
    badges = Counter(run.answer.badge for run in runs if run.answer)
    if not badges:
        return Answer(NOTHING, f"None of {plural(len(runs), 'run')} measured anything.")
    badge = next(iter(badges)) if len(badges) == 1 else MIXED
    if Verdict.INVALID in badges:
        badge = str(Verdict.INVALID)
    counts = ", ".join(f"{answer} in {number}" for answer, number in badges.most_common())
    idle = [run for run in runs if run.answer and run.answer.exit_code]
    said = [f"{counts} of {plural(len(runs), 'run')}.", _extremes(runs)]
    said += [f"Run {run.number}: {run.answer.sentence}" for run in idle if run.answer]
    return Answer(badge, " ".join(filter(None, said)))


def swept_worths(runs: Sequence[SweptRun]) -> dict[str, MeasuredWorth]:
    """By scenario, what its runs say together, if the runs that were measured compare draft
    counts and differ only in batch size and scenario; else empty."""
    measured = [run for run in runs if run.cells and run.analysis is not None]
    alike = set(varying(measured)) <= {"requests", "scenario"}
    by_scenario: dict[str, list[Analysis]] = {}
    for run in measured:
        assert run.analysis is not None
        if not alike or run.analysis.run.header.spec.draft_counts is None:
            return {}
        by_scenario.setdefault(run.words.get("scenario", ""), []).append(run.analysis)
    return {scenario: measured_worth(analyses) for scenario, analyses in by_scenario.items()}


def _worth_answer(worths: Mapping[str, MeasuredWorth]) -> Answer:
    answers = {scenario: worth_answer(worth) for scenario, worth in worths.items()}
    if len(answers) == 1:
        return next(iter(answers.values()))
    badges = {answer.badge for answer in answers.values()}
    badge = badges.pop() if len(badges) == 1 else MIXED
    if Verdict.INVALID in (answer.badge for answer in answers.values()):
        badge = str(Verdict.INVALID)
    return Answer(badge, " ".join(f"{name}: {answer.sentence}" for name, answer in answers.items()))


def _worth_document(
    name: str,
    runs: Sequence[SweptRun],
    worths: Mapping[str, MeasuredWorth],
) -> Document:
    """One answer of all batch sizes together; the runs' own reports have fewer requests."""
    lead = [_worth_answer(worths).headline, *_missing(runs)]
    sections = []
    for scenario, measured in worths.items():
        blocks = worth_blocks(measured)
        if len(worths) == 1:
            lead += blocks
        else:
            sections.append(Section(scenario, tuple(blocks), brief=True))
    axes = ("scenario", "requests") if len(worths) > 1 else ("requests",)
    rows = [[str(run.number), label_of_run(run, axes), run.status] for run in runs]
    folders = table(["Run", "Batch size", "Status"], rows, numbers_from=3)
    sections.append(Section("Runs", (replace(folders, links=_links(runs)),)))
    return Document(f"nwor-bench worth: {name}", (*lead, *_weakened(runs)), tuple(sections))


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
    return f"The ratio to off x off lies between {ends[0]} and {ends[1]}."


def _missing(runs: Sequence[SweptRun]) -> list[Block]:
    """Runs that did not end."""
    left = [run for run in runs if run.status != DONE]
    if not left:
        return []
    errors = {run.number: f": {' '.join(run.error.split())}" for run in left if run.error}
    parts = [f"run {run.number} ({run.status}{errors.get(run.number, '')})" for run in left]
    return [Callout("Incomplete", f"{plural(len(left), 'run')} did not end: {'; '.join(parts)}.")]


def _answers(runs: Sequence[SweptRun]) -> Table:
    """One row a run: its badge, and the cell that its answer rests on."""
    axes = varying(runs)
    rows = []
    for run in runs:
        cell = run.answer.cell if run.answer else None
        rated = [NOT_MEASURED] * 3
        if cell is not None:
            rated = [cell.label, interval(cell.ratio), work_change(cell)]
        badge = run.answer.badge if run.answer else run.status
        rows.append([f"{run.number}: {label_of_run(run, axes)}", badge, *rated])
    heads = ["Run", "Answer", "Cell", "Time over off x off [95 % interval]", "GPU's work, %"]
    return replace(table(heads, rows, numbers_from=3, caption="Answers"), links=_links(runs))


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


def _chance(runs: Sequence[SweptRun]) -> str:
    number = sum(len(run.compared) for run in runs)
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
