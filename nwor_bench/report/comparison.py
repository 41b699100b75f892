"""A comparison of two runs, as a document and as JSON."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from nwor_bench.analysis.comparing.change_estimates import Change
from nwor_bench.analysis.comparing.change_verdicts import CellChange, ChangeVerdict
from nwor_bench.analysis.comparing.compare import WORST_FIRST, Comparison
from nwor_bench.analysis.comparing.stored_run import StoredRun
from nwor_bench.errors import worst_of
from nwor_bench.records.facts import GitState
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
from nwor_bench.report.text import NOT_MEASURED, decimal, percent

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
    verdict = comparison.outcome
    lead: list[Block] = [
        Headline(str(verdict), words.headline(comparison), _KINDS.get(verdict, "none")),
        _origins(comparison),
    ]
    sections = (
        Section("Changes", _changes(comparison), brief=True),
        Section(f"BASE{ARROW}NEW", (_values(comparison),), brief=True),
        Section("Notes", (Bullets(tuple(words.notes(comparison))),), brief=True),
    )
    return Document(TITLE, tuple(lead), sections)


def comparisons_document(comparisons: Mapping[str, Comparison]) -> Document:
    """Two sweeps: the headline of all their runs, then each run's changes, values and notes."""
    outcomes = {each.outcome for each in comparisons.values()}
    verdict = next(outcome for outcome in WORST_FIRST if outcome in outcomes)
    sections = [
        Section(
            place,
            (
                _origins(own),
                *_changes(own),
                _values(own),
                Bullets(tuple(words.notes(own))),
            ),
            brief=True,
        )
        for place, own in comparisons.items()
    ]
    told = words.headline_of_all(comparisons)
    headline = Headline(str(verdict), told, _KINDS.get(verdict, "none"))
    return Document(TITLE, (headline,), tuple(sections))


def comparison_json(comparison: Comparison, *, strict: bool) -> str:
    """Everything as JSON; values that were not measured are null."""
    own = _told(comparison, strict=strict)
    return json_document({"comparison_version": COMPARISON_FORMAT_VERSION, **own})


def comparisons_json(comparisons: Mapping[str, Comparison], *, strict: bool) -> str:
    """The comparisons of two sweeps' runs as JSON, by place."""
    code = worst_of(own.exit_code(strict=strict) for own in comparisons.values())
    return json_document({
        "comparison_version": COMPARISON_FORMAT_VERSION,
        "exit_code": int(code),
        "runs": {place: _told(own, strict=strict) for place, own in comparisons.items()},
    })  # fmt: skip


def _told(comparison: Comparison, *, strict: bool) -> dict[str, Any]:
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


def _changes(comparison: Comparison) -> tuple[Block, ...]:
    by_work = any(cell.work for cell in comparison.cells)
    rows = [
        [words.name_of(cell, comparison), str(cell.outcome), words.change_text(cell.ratio),
         words.change_text(cell.time), *([words.change_text(cell.work)] if by_work else [])]
        for cell in comparison.cells
    ]  # fmt: skip
    heads = list(CHANGE_HEADERS)
    if comparison.by_drafts:
        heads[2] = "Time per token over k = 0, NEW / BASE"
    heads += ["GPU's work to off, NEW / BASE"] if by_work else []
    return (
        table(heads, rows, numbers_from=2),
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


def _origins(comparison: Comparison) -> Paragraph:
    return Paragraph(f"BASE {_origin(comparison.base)}. NEW {_origin(comparison.new)}.")


def _origin(run: StoredRun) -> str:
    environment = run.header.environment
    parts = [f"is {run.folder.name}"]
    for name, value in (
        ("begun", run.header.started_at),
        ("nwor-bench", (environment.packages or {}).get("nwor-bench")),
        ("git", ((environment.git or GitState()).revision or "")[:12] or None),
    ):
        if value is not None:
            parts.append(f"{name} {value}")
    return ", ".join(parts)


def _run(run: StoredRun) -> dict[str, Any]:
    return {
        "folder": str(run.folder),
        "started_at": run.header.started_at,
        "status": run.header.status,
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
        "work_change": _change(cell.work),
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
