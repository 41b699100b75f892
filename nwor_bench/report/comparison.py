"""A comparison of two runs or of two sweeps, as a document and as JSON."""

from dataclasses import asdict
from typing import Any

from nwor_bench.analysis.comparing.change_estimates import Change
from nwor_bench.analysis.comparing.change_verdicts import CellChange, ChangeVerdict
from nwor_bench.analysis.comparing.compare import Comparison
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
    Headline,
    Paragraph,
    Section,
    Table,
    table,
)
from nwor_bench.report.text import NOT_MEASURED, decimal, percent, plural

COMPARISON_FORMAT_VERSION = 1

TITLE = "nwor-bench compare"

CHANGE_HEADERS = ("Cell", "Change", "Ratio to off, NEW / BASE", "Time, NEW / BASE")
VALUE_HEADERS = ("Cell", "Window ms", "Tokens/s", "Accepted", "Parity")
ARROW = " → "
"""Between BASE's value and NEW's."""

_KINDS = {
    ChangeVerdict.REGRESSION: "slower",
    ChangeVerdict.IMPROVEMENT: "faster",
    ChangeVerdict.SAME: "same",
}
"""The colour of a verdict."""


def comparison_document(comparison: Comparison) -> Document:
    """Two runs: the headline, the changes, both runs' values, notes."""
    verdict = RunChange("", comparison).outcome
    if comparison.too_noisy and verdict is not ChangeVerdict.REGRESSION:
        verdict = ChangeVerdict.AMBIGUOUS
    lead: list[Block] = [
        _headline(verdict, words.headline(comparison)),
        Paragraph(f"BASE {_origin(comparison.base)}. NEW {_origin(comparison.new)}."),
    ]
    sections = (
        Section("Changes", _changes(comparison), brief=True),
        Section(f"BASE{ARROW}NEW", (_values(comparison),), brief=True),
        Section("Notes", (Bullets(tuple(words.notes(comparison))),), brief=True),
    )
    return Document(TITLE, tuple(lead), sections)


def sweep_comparison_document(comparison: SweepComparison) -> Document:
    """Two sweeps: the headline, each run's worst change, then each run by itself."""
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
    return Document(TITLE, tuple(lead), tuple(map(_run_section, comparison.runs)))


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
    rows = [
        [words.name_of(cell, comparison), str(cell.outcome), words.change_text(cell.ratio),
         words.change_text(cell.time)]
        for cell in comparison.cells
    ]  # fmt: skip
    return (
        table(CHANGE_HEADERS, rows, numbers_from=2),
        Bullets(tuple(words.reasons(comparison))),
        Paragraph(words.how_decided(comparison)),
    )


def _values(comparison: Comparison) -> Table:
    """BASE's and NEW's values of each cell."""
    rows = []
    for cell in comparison.cells:
        sides = (cell.base, cell.new)
        before, after = ((side.parity or "unchecked") if side else NOT_MEASURED for side in sides)
        rows.append([
            words.name_of(cell, comparison),
            ARROW.join(decimal(side.window_ms_mean if side else None, 2) for side in sides),
            ARROW.join(_rate(side.tokens_per_s if side else None) for side in sides),
            ARROW.join(percent(side.acceptance_rate if side else None) for side in sides),
            before if before == after else f"{before}{ARROW}{after}",
        ])  # fmt: skip
    return table(VALUE_HEADERS, rows)


def _rate(tokens_per_s: float | None) -> str:
    return decimal(tokens_per_s, 0 if (tokens_per_s or 0) >= 1000 else 1)


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
    interval = change.interval
    return {
        "measure": change.measure,
        "ratio": change.ratio,
        "low": None if interval is None else interval.low,
        "high": None if interval is None else interval.high,
        "p_value": None if interval is None else interval.p_value,
        "paired": change.paired,
        "base_blocks": change.base_blocks,
        "new_blocks": change.new_blocks,
        "why_no_interval": change.why_open,
    }
