"""A run's report files, all made from its records: run.json, three CSV tables, two documents.

Also the result as JSON for scripts; docs/json.md lists its keys.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from nwor_bench.analysis.analyse import PERCENTILES, Analysis, request_percentiles
from nwor_bench.analysis.findings.table import grouped
from nwor_bench.records.files import write_atomically
from nwor_bench.records.header import RunHeader
from nwor_bench.records.lines import batch_key
from nwor_bench.records.store import RunData, write_header
from nwor_bench.records.types import BatchRecord, CellResult, WindowRecord, columns, to_dict
from nwor_bench.report.answer import answer
from nwor_bench.report.html import render_html
from nwor_bench.report.markdown import render_markdown
from nwor_bench.report.run_report import build_document, warnings

THE_REST = "Figures, precision and a glossary are in the run folder's report.html."


def write_files(folder: Path, analysis: Analysis) -> None:
    """Make all report files of a run anew.

    Raises StoreError if they cannot be written.
    """
    run, document = analysis.run, build_document(analysis)
    write_header(folder, with_summaries(analysis))
    write_atomically(folder / "cells.csv", to_csv(CellResult, analysis.cells))
    write_atomically(folder / "batches.csv", batches_csv(run.batches))
    write_atomically(folder / "windows.csv", _windows_csv(run))
    write_atomically(folder / "report.html", render_html(document))  # first: report.md cites it
    write_atomically(folder / "report.md", render_markdown(document.shortened(THE_REST)))


def with_summaries(analysis: Analysis) -> RunHeader:
    """The header with the cells' summaries and what is wrong, if anything."""
    summaries = {
        "noise_floor": analysis.noise_floor,
        "findings": tuple(finding.to_dict() for finding in analysis.findings),
        "cells": tuple(to_dict(cell) for cell in analysis.cells),
        "split": tuple(part.to_dict() for part in analysis.splits) or None,
        "violations": tuple(violation.text for violation in analysis.violations),
        "warnings": analysis.run.warnings,
    }
    return analysis.run.header.model_copy(update=summaries)


def to_csv(record_type: type, records: Sequence[Any]) -> str:
    """Records as CSV text with their fields as columns.

    None is an empty field; lists are joined by semicolons, mappings are JSON.
    """
    return _csv(record_type, records).to_csv(index=False, lineterminator="\n")


def batches_csv(batches: Sequence[BatchRecord]) -> str:
    """All batches; percentiles of a batch's request times are the last columns."""
    frame = _csv(BatchRecord, batches).drop(columns="request_times")
    times = [request_percentiles([batch]) for batch in batches]
    for name in PERCENTILES:
        frame[name] = pd.Series([own[name] for own in times], dtype=object)
    return frame.to_csv(index=False, lineterminator="\n")


def _csv(record_type: type, records: Sequence[Any]) -> pd.DataFrame:
    names = columns(record_type)
    rows = [[_field(getattr(record, name)) for name in names] for record in records]
    # dtype=object keeps whole numbers whole if one of the column is missing.
    return pd.DataFrame(rows, columns=names, dtype=object)


def _windows_csv(run: RunData) -> str:
    """All windows, each with the phase of its batch: only those of phase "timed" make cells.csv."""
    phases = {batch_key(batch): str(batch.phase) for batch in run.batches}
    frame = _csv(WindowRecord, [_all_fallbacks(window) for window in run.windows])
    frame["phase"] = [phases.get(batch_key(window), "") for window in run.windows]
    return frame.to_csv(index=False, lineterminator="\n")


def _all_fallbacks(window: WindowRecord) -> WindowRecord:
    """The window with SCV's fallback beside NWOR's in the one column that readers look at."""
    scv = f"scv:{window.scv_fallback_reason}" if window.scv_fallback_reason else None
    reasons = [reason for reason in (window.fallback_reason, scv) if reason]
    return replace(window, fallback_reason="; ".join(reasons) or None)


def _field(value: Any) -> Any:
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True)
    if isinstance(value, tuple | list):
        return ";".join(str(item) for item in value)
    return value


def run_result(analysis: Analysis, folder: Path) -> dict[str, Any]:
    """The answer, cells and findings of a run; values that were not measured are None."""
    run, cells, every = analysis.run, analysis.cells, analysis.findings
    found = answer(run.header, cells)
    return {
        "folder": str(folder),
        "status": run.header.status,
        "answer": {
            "badge": found.badge,
            "sentence": found.sentence,
            "cell": None if found.cell is None else found.cell.label,
        },
        "cells": [{"cell": cell.label, **to_dict(cell)} for cell in cells],
        "noise_floor": analysis.noise_floor,
        "split": [part.to_dict() for part in analysis.splits],
        "causes": [
            {"severity": group.severity, "line": group.line, "findings": len(group.findings)}
            for group in grouped(every)
        ],
        "findings": [finding.to_dict() for finding in every],
        "violations": [violation.text for violation in analysis.violations],
        "warnings": list(warnings(run)),
    }
