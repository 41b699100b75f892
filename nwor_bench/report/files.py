"""A run's report files, all made from its records: run.json, three CSV tables, two documents.

Also the result as JSON for scripts; docs/json.md lists its keys.
"""

from pathlib import Path
from typing import Any

import pandas as pd

from nwor_bench.analysis.analyse import Analysis
from nwor_bench.analysis.findings import grouped
from nwor_bench.records.files import write_atomically
from nwor_bench.records.header import RunHeader
from nwor_bench.records.store import write_header
from nwor_bench.records.types import to_dict
from nwor_bench.report.html import render_html
from nwor_bench.report.load import TABLES
from nwor_bench.report.markdown import render_markdown
from nwor_bench.report.run_report import answer_of, build_document, warnings

THE_REST = "Figures, precision and a glossary are in the run folder's report.html."


def write_files(folder: Path, analysis: Analysis) -> None:
    """Make all report files of a run anew.

    Raises StoreError if they cannot be written.
    """
    document = build_document(analysis)
    write_header(folder, with_summaries(analysis))
    for table, rows in TABLES.items():
        write_atomically(folder / f"{table}.csv", to_csv(rows(analysis)))
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


def to_csv(frame: pd.DataFrame) -> str:
    """A table as CSV text; None is an empty field."""
    return frame.to_csv(index=False, lineterminator="\n")


def run_result(analysis: Analysis, folder: Path) -> dict[str, Any]:
    """The answer, cells and findings of a run; values that were not measured are None."""
    run, cells, every = analysis.run, analysis.cells, analysis.findings
    found = answer_of(analysis)
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
