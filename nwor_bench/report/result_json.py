"""A run's result as JSON for scripts. docs/json.md lists the keys."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nwor_bench.analysis.aggregate import noise_floor
from nwor_bench.analysis.findings import findings, grouped
from nwor_bench.analysis.interleaved.split import splits_of
from nwor_bench.analysis.invariants import check_invariants
from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult, to_dict
from nwor_bench.report.content import warnings
from nwor_bench.report.sections.verdicts import answer


def run_result(run: RunData, cells: Sequence[CellResult], folder: Path) -> dict[str, Any]:
    """The answer, cells and findings of a run; values that were not measured are None."""
    found = answer(run.header, cells)
    every = findings(run, cells)
    return {
        "folder": str(folder),
        "status": run.header.status,
        "answer": {
            "badge": found.badge,
            "sentence": found.sentence,
            "cell": None if found.cell is None else found.cell.label,
        },
        "cells": [{"cell": cell.label, **to_dict(cell)} for cell in cells],
        "noise_floor": noise_floor(cells),
        "split": [part.to_dict() for part in splits_of(run, cells)],
        "causes": [
            {"severity": group.severity, "line": group.line, "findings": len(group.findings)}
            for group in grouped(every)
        ],
        "findings": [finding.to_dict() for finding in every],
        "violations": list(check_invariants(run)),
        "warnings": list(warnings(run)),
    }
