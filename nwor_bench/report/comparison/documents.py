"""A comparison of two runs, or of two sweeps, as a document for a page or a pull request."""

from dataclasses import replace

from nwor_bench.analysis.comparing.change_verdicts import CellChange, ChangeVerdict
from nwor_bench.analysis.comparing.compare import Comparison
from nwor_bench.analysis.comparing.stored_run import StoredRun
from nwor_bench.analysis.comparing.sweeps import RunChange, SweepComparison
from nwor_bench.records.environment import Environment, GitState
from nwor_bench.report.comparison import text as words
from nwor_bench.report.comparison.figure import change_figure
from nwor_bench.report.comparison.notes import notes
from nwor_bench.report.document import (
    Block,
    Bullets,
    Document,
    Headline,
    Paragraph,
    Section,
    Table,
    table,
)
from nwor_bench.report.shading import shade_of
from nwor_bench.report.text import NOT_MEASURED, plural

TITLE = "nwor-bench compare"

_KINDS = {
    ChangeVerdict.REGRESSION: "slower",
    ChangeVerdict.IMPROVEMENT: "faster",
    ChangeVerdict.SAME: "same",
}
"""The colour of a verdict."""


def comparison_document(comparison: Comparison) -> Document:
    """Two runs: the headline and the changes first, then both runs' values and notes."""
    sections = (
        Section("Changes", _changes(comparison)),
        Section(
            f"BASE{words.ARROW}NEW",
            (table(words.VALUE_HEADERS, words.value_rows(comparison), numbers_from=1),),
        ),
        Section("Notes", (Bullets(tuple(notes(comparison))),)),
    )
    lead = (
        Paragraph(words.headline(comparison), strong=True),
        Paragraph(f"BASE {_origin(comparison.base)}. NEW {_origin(comparison.new)}."),
    )
    return Document(TITLE, lead, sections)


def comparison_page(comparison: Comparison) -> Document:
    """The same with a badge and the figure, for HTML."""
    document = comparison_document(comparison)
    figure = change_figure(comparison)
    origin = document.lead[1]
    lead = (_headline(_verdict(comparison), words.headline(comparison)), origin)
    return replace(document, lead=(*lead, *([figure] if figure else [])))


def sweep_comparison_document(comparison: SweepComparison) -> Document:
    """Two sweeps: the headline, runs x cells shaded by change, then each run by itself."""
    lead: list[Block] = [
        _headline(sweep_verdict(comparison), sweep_headline(comparison)),
        Paragraph(f"BASE is {comparison.base.name}. NEW is {comparison.new.name}."),
        _grid(comparison),
        Paragraph(
            "Each change is corrected for the cells of its own run, not for the number of runs: "
            "repeat a change that one run alone shows."
        ),
    ]
    return Document(TITLE, tuple(lead), tuple(map(_run_section, comparison.runs)))


def sweep_verdict(comparison: SweepComparison) -> ChangeVerdict:
    """The worst verdict of the runs."""
    found = {run.outcome for run in comparison.runs}
    return next(outcome for outcome in ChangeVerdict if outcome in found)


def sweep_headline(comparison: SweepComparison) -> str:
    """How many runs have which verdict, and which are in one sweep alone."""
    parts = [
        f"{outcome} in {len(own)}"
        for outcome in ChangeVerdict
        if (own := comparison.having(outcome))
    ]
    text = f"{', '.join(parts)} of {plural(len(comparison.runs), 'run')} that both have."
    for side, names in (("BASE", comparison.only_in_base), ("NEW", comparison.only_in_new)):
        if names:
            text += f" Only in {side}: {'; '.join(names)}."
    return text


def worst_cell(run: RunChange) -> CellChange:
    """The cell that the run's verdict comes from: of several the one that changed most."""

    def away(cell: CellChange) -> float:
        change = words.deciding(cell, run.comparison)
        return 0.0 if change is None else abs(change.ratio - 1)

    return max(run.comparison.having(run.outcome), key=away)


def _headline(verdict: ChangeVerdict, text: str) -> Headline:
    return Headline(str(verdict), text, _KINDS.get(verdict, "none"))


def _verdict(comparison: Comparison) -> ChangeVerdict:
    return RunChange("", comparison).outcome


def _changes(comparison: Comparison) -> tuple[Block, ...]:
    return (
        table(words.CHANGE_HEADERS, words.change_rows(comparison), numbers_from=2),
        Bullets(tuple(words.reasons(comparison))),
        Paragraph(words.how_decided(comparison)),
    )


def _grid(comparison: SweepComparison) -> Table:
    """Runs down, cells across."""
    labels = list(
        dict.fromkeys(
            words.name_of(cell, run.comparison)
            for run in comparison.runs
            for cell in run.comparison.cells
            if cell.outcome is not ChangeVerdict.NOT_COMPARED
        )
    )
    rows, shades = [], []
    for run in comparison.runs:
        own = {words.name_of(cell, run.comparison): cell for cell in run.comparison.cells}
        cells = [own.get(label) for label in labels]
        rows.append([run.name, *(_value(cell, run.comparison) for cell in cells)])
        shades.append(("", *(_shade(cell, run.comparison) for cell in cells)))
    caption = "Change from BASE to NEW. Shaded: IMPROVEMENT blue, REGRESSION orange, SAME green"
    made = table(["Run", *labels], rows, caption=caption)
    return replace(made, shades=tuple(shades))


def _value(cell: CellChange | None, comparison: Comparison) -> str:
    if cell is None:
        return NOT_MEASURED
    change = words.deciding(cell, comparison)
    return str(cell.outcome) if change is None else words.change_text(change)


def _shade(cell: CellChange | None, comparison: Comparison) -> str:
    if cell is None or cell.outcome not in _KINDS:
        return ""
    side = _KINDS[cell.outcome]
    change = words.deciding(cell, comparison)
    return side if side == "same" else shade_of(side, change.ratio if change else None)


def _run_section(run: RunChange) -> Section:
    comparison = run.comparison
    blocks = (
        Paragraph(words.headline(comparison), strong=True),
        *_changes(comparison),
        Bullets(tuple(notes(comparison))),
    )
    return Section(f"{run.name}: {run.outcome}", blocks, folded=True)


def _origin(run: StoredRun) -> str:
    environment = run.header.environment or Environment()
    parts = [f"is {run.folder.name}"]
    for name, value in (
        ("begun", run.header.started_at),
        ("nwor-bench", (environment.packages or {}).get("nwor-bench")),
        ("git", (environment.git or GitState()).revision),
    ):
        if value is not None:
            parts.append(f"{name} {value}")
    return ", ".join(parts)
