"""A comparison of two runs or of two sweeps, as a document and as JSON."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from nwor_bench.analysis.comparing.change_estimates import Change
from nwor_bench.analysis.comparing.change_verdicts import CellChange, ChangeVerdict
from nwor_bench.analysis.comparing.compare import Comparison
from nwor_bench.analysis.comparing.preconditions import DecideBy
from nwor_bench.analysis.comparing.stored_run import StoredRun
from nwor_bench.analysis.comparing.sweeps import RunChange, SweepComparison
from nwor_bench.records.facts import Environment, GitState
from nwor_bench.records.files import document as json_document
from nwor_bench.records.types import to_dict
from nwor_bench.report import comparison_text as words
from nwor_bench.report.document import (
    Block,
    Bullets,
    Document,
    Figure,
    Headline,
    Paragraph,
    Section,
    Table,
    table,
)
from nwor_bench.report.figures import REST, ROW, Mark, forest, legend, ratio_axis
from nwor_bench.report.text import NOT_MEASURED, plural, shade_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

COMPARISON_FORMAT_VERSION = 1

TITLE = "nwor-bench compare"

_KINDS = {
    ChangeVerdict.REGRESSION: "slower",
    ChangeVerdict.IMPROVEMENT: "faster",
    ChangeVerdict.SAME: "same",
}
"""The colour of a verdict."""

_MARKS = {
    ChangeVerdict.REGRESSION: (">", "slower"),
    ChangeVerdict.IMPROVEMENT: ("<", "faster"),
    ChangeVerdict.SAME: ("o", "same"),
    ChangeVerdict.AMBIGUOUS: ("D", "ambiguous"),
    ChangeVerdict.NOT_COMPARED: ("|", "soft"),
}
"""Marker and colour of each verdict, readable without the colour."""


def comparison_document(comparison: Comparison) -> Document:
    """Two runs: the headline and its figure, the changes, both runs' values, notes."""
    figure = _figure(comparison)
    verdict = RunChange("", comparison).outcome
    lead: list[Block] = [
        _headline(verdict, words.headline(comparison)),
        Paragraph(f"BASE {_origin(comparison.base)}. NEW {_origin(comparison.new)}."),
        *([figure] if figure else []),
    ]
    values = table(words.VALUE_HEADERS, words.value_rows(comparison), numbers_from=1)
    sections = (
        Section("Changes", _changes(comparison), brief=True),
        Section(f"BASE{words.ARROW}NEW", (values,), brief=True),
        Section("Notes", (Bullets(tuple(words.notes(comparison))),), brief=True),
    )
    return Document(TITLE, tuple(lead), sections)


def sweep_comparison_document(comparison: SweepComparison) -> Document:
    """Two sweeps: the headline, each run's worst change, all cells, then each run by itself."""
    lead: list[Block] = [
        _headline(sweep_verdict(comparison), sweep_headline(comparison)),
        Paragraph(f"BASE is {comparison.base.name}. NEW is {comparison.new.name}."),
        _worst(comparison),
        Paragraph(
            "Each row has the cell that changed most among the worst. Changes are corrected for "
            "the cells of their own run, not for the number of runs: repeat a change that only one "
            "run shows."
        ),
    ]
    cells = Section("All cells", (_grid(comparison),))
    return Document(TITLE, tuple(lead), (cells, *map(_run_section, comparison.runs)))


def sweep_verdict(comparison: SweepComparison) -> ChangeVerdict:
    """The worst verdict of the runs."""
    found = {run.outcome for run in comparison.runs}
    return next(outcome for outcome in ChangeVerdict if outcome in found)


def sweep_headline(comparison: SweepComparison) -> str:
    """How many runs have which verdict, and which are in only one sweep."""
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


def comparison_json(comparison: Comparison, *, strict: bool) -> str:
    """Everything as JSON; values that were not measured are null."""
    content = _content(comparison, strict=strict)
    return json_document({"comparison_version": COMPARISON_FORMAT_VERSION, **content})


def sweep_comparison_json(comparison: SweepComparison, *, strict: bool) -> str:
    """Everything as JSON; values that were not measured are null."""
    runs = [
        {"name": run.name, "outcome": str(run.outcome), **_content(run.comparison, strict=strict)}
        for run in comparison.runs
    ]
    return json_document({
        "comparison_version": COMPARISON_FORMAT_VERSION,
        "headline": sweep_headline(comparison),
        "exit_code": int(comparison.exit_code(strict=strict)),
        "base": {"folder": str(comparison.base)},
        "new": {"folder": str(comparison.new)},
        "runs": runs,
        "only_in_base": list(comparison.only_in_base),
        "only_in_new": list(comparison.only_in_new),
    })  # fmt: skip


def _headline(verdict: ChangeVerdict, text: str) -> Headline:
    return Headline(str(verdict), text, _KINDS.get(verdict, "none"))


def _changes(comparison: Comparison) -> tuple[Block, ...]:
    return (
        table(words.CHANGE_HEADERS, words.change_rows(comparison), numbers_from=2),
        Bullets(tuple(words.reasons(comparison))),
        Paragraph(words.how_decided(comparison)),
    )


def _figure(comparison: Comparison) -> Figure | None:
    """The deciding changes on one axis, with threshold and noise; None without any."""
    found = [
        (words.name_of(cell, comparison), cell, change)
        for cell in comparison.cells
        if (change := words.deciding(cell, comparison))
    ]
    if not found:
        return None
    what = "ratio to off x off" if comparison.decide_by is DecideBy.RATIO else "time"
    marks = [
        Mark(name, change.ratio, *_ends(change), str(outcome), *look)
        for outcome, look in _MARKS.items()
        for name, cell, change in found
        if cell.outcome is outcome
    ]

    def draw(canvas: "Canvas") -> None:
        axes = canvas.subplots()
        ratio_axis(axes, f"{what}, NEW / BASE", comparison.noise_floor, comparison.threshold)
        forest(axes, [name for name, _, _ in found], marks)
        legend(canvas, axes)

    parts = (f"{name} {words.change_text(change)}, {cell.outcome}" for name, cell, change in found)
    return Figure(
        name="changes",
        caption=(
            f"Each cell's {what} in NEW over that in BASE, with its 95 % interval: right of 1 is "
            "worse. Dotted: the threshold. Shaded: the change of the A/A arm, which is chance."
        ),
        alternative=f"Change of the {what} from BASE to NEW. {'; '.join(parts)}.",
        draw=draw,
        height=ROW * len(found) + REST,
    )


def _ends(change: Change) -> tuple[float | None, float | None]:
    interval = change.interval
    return (None, None) if interval is None else (interval.low, interval.high)


def _worst(comparison: SweepComparison) -> Table:
    rows = []
    for run in comparison.runs:
        cell = _worst_cell(run)
        change = words.deciding(cell, run.comparison)
        name = words.name_of(cell, run.comparison)
        rows.append([run.name, str(run.outcome), name, words.change_text(change)])
    return table(["Run", "Change", "Changed cell", "NEW / BASE"], rows, numbers_from=3)


def _worst_cell(run: RunChange) -> CellChange:
    """The cell that decides the run's verdict: of several the one that changed most."""

    def away(cell: CellChange) -> float:
        change = words.deciding(cell, run.comparison)
        return 0.0 if change is None else abs(change.ratio - 1)

    return max(run.comparison.having(run.outcome), key=away)


def _grid(comparison: SweepComparison) -> Table:
    """Runs down, cells across, shaded by change."""
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
    return replace(table(["Run", *labels], rows, caption=caption), shades=tuple(shades))


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
    blocks = (
        Paragraph(words.headline(run.comparison), strong=True),
        *_changes(run.comparison),
        Bullets(tuple(words.notes(run.comparison))),
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


def _content(comparison: Comparison, *, strict: bool) -> dict[str, Any]:
    """The comparison's keys without their version."""
    return {
        "headline": words.headline(comparison),
        "exit_code": int(comparison.exit_code(strict=strict)),
        "decide_by": str(comparison.decide_by),
        "threshold": comparison.threshold,
        "noise_floor": comparison.noise_floor,
        "base": _run(comparison.base),
        "new": _run(comparison.new),
        "forced_differences": [asdict(difference) for difference in comparison.forced],
        "other_differences": [asdict(difference) for difference in comparison.others],
        "cells": [_cell(cell) for cell in comparison.cells],
        "notes": words.notes(comparison),
    }


def _run(run: StoredRun) -> dict[str, Any]:
    return {
        "folder": str(run.folder),
        "started_at": run.header.started_at,
        "status": run.header.status,
        "read_from": run.source,
        "warnings": list(run.warnings),
    }


def _cell(cell: CellChange) -> dict[str, Any]:
    return {
        **cell.cell.names,
        "outcome": str(cell.outcome),
        "reason": cell.reason,
        "p_value_holm": cell.p_value_holm,
        "ratio_change": _change(cell.ratio),
        "time_change": _change(cell.time),
        "base": None if cell.base is None else to_dict(cell.base),
        "new": None if cell.new is None else to_dict(cell.new),
    }


def _change(change: Change | None) -> dict[str, Any] | None:
    if change is None:
        return None
    interval, (low, high) = change.interval, _ends(change)
    return {
        "measure": change.measure,
        "ratio": change.ratio,
        "low": low,
        "high": high,
        "p_value": None if interval is None else interval.p_value,
        "paired": change.paired,
        "base_blocks": change.base_blocks,
        "new_blocks": change.new_blocks,
        "base_windows": change.base_windows,
        "new_windows": change.new_windows,
        "base_untimed_windows": change.base_untimed,
        "new_untimed_windows": change.new_untimed,
        "why_no_interval": change.why_open,
    }
