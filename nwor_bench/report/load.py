"""Stored runs for notebooks and scripts: typed records, and the rows of their CSV files as frames.

`nwor_bench.load` is the way in. The report writes the same frames as CSV files.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd

from nwor_bench.analysis.analyse import PERCENTILES, Analysis, analyse, request_percentiles
from nwor_bench.analysis.findings.finding import Finding
from nwor_bench.analysis.findings.table import grouped
from nwor_bench.errors import ConfigError
from nwor_bench.records.files import RUN_FILE, write_atomically
from nwor_bench.records.header import RunHeader
from nwor_bench.records.lines import batch_key
from nwor_bench.records.store import read_run, write_header
from nwor_bench.records.types import BatchRecord, CellResult, WindowRecord, columns, to_dict
from nwor_bench.report.html import escape, render_html
from nwor_bench.report.markdown import render_markdown
from nwor_bench.report.run_report import answer_of, build_document, title, warnings

CsvTable = Literal["cells", "batches", "windows"]
"""A CSV file of a run folder, without its suffix."""


SweepTable = Literal["worth", "summary"]
"""A CSV file of a sweep folder, without its suffix; `worth` only of draft counts."""

_SHOWN = ("scenario", "requests", "method", "drafts", "nwor_mode", "scv_mode", "arm", "verdict",
          "ratio_to_off", "ratio_ci_low", "ratio_ci_high", "ratio", "low", "high", "tokens_per_s",
          "parity", "folder")  # fmt: skip
"""Columns of a table that a notebook shows, if they are not empty."""


@dataclass(frozen=True, repr=False)
class LoadedRun:
    """A stored run and what its records say."""

    analysis: Analysis

    def __repr__(self) -> str:
        counts = (
            f"{len(self.cells)} cells, {len(self.batches)} batches, {len(self.windows)} windows"
        )
        return f"<{title(self.header)}: {answer_of(self.analysis).badge}; {counts}>"

    def _repr_html_(self) -> str:
        """The answer and the cells, in a notebook."""
        cells = self.frame("cells").drop(columns="requests")  # a sum over batches, no batch size
        return _in_notebook(answer_of(self.analysis).headline.line, cells)

    @property
    def header(self) -> RunHeader:
        """run.json: status, configuration, environment, gate."""
        return self.analysis.run.header

    @property
    def cells(self) -> tuple[CellResult, ...]:
        """One summary per cell, off x off first."""
        return self.analysis.cells

    @property
    def batches(self) -> tuple[BatchRecord, ...]:
        """All batches, warm-up and gate included: `phase` says which."""
        return self.analysis.run.batches

    @property
    def windows(self) -> tuple[WindowRecord, ...]:
        """The windows of these batches."""
        return self.analysis.run.windows

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What weakens the numbers, the severest first."""
        return self.analysis.findings

    def frame(self, table: CsvTable) -> pd.DataFrame:
        """The rows of cells.csv, batches.csv or windows.csv. A value not measured is missing (NA).

        Raises ConfigError for another name.
        """
        if table not in TABLES:
            raise ConfigError.unknown("table", table, TABLES)
        return TABLES[table](self.analysis).convert_dtypes()


@dataclass(frozen=True)
class LoadedSweep:
    """A folder of runs, such as that of `nwor-bench worth`."""

    folder: Path

    @cached_property
    def runs(self) -> tuple[LoadedRun, ...]:
        """The folder's runs, in the order of their folders' names."""
        folders = sorted(path.parent for path in self.folder.glob(f"*/{RUN_FILE}"))
        return tuple(LoadedRun(analyse(read_run(folder))) for folder in folders)

    def frame(self, table: SweepTable) -> pd.DataFrame:
        """The rows of worth.csv or summary.csv. A value not measured is missing (NA).

        Raises ConfigError if the folder has no such file.
        """
        if table not in self._tables:
            raise ConfigError.unknown("table", table, self._tables)
        return pd.read_csv(self.folder / f"{table}.csv").convert_dtypes()

    @property
    def _tables(self) -> list[SweepTable]:
        every: tuple[SweepTable, ...] = get_args(SweepTable)
        return [table for table in every if (self.folder / f"{table}.csv").is_file()]

    def _repr_html_(self) -> str:
        """The first of its tables, in a notebook."""
        frame = self.frame(self._tables[0]) if self._tables else pd.DataFrame()
        return _in_notebook(str(self.folder), frame)


def _in_notebook(heading: str, frame: pd.DataFrame) -> str:
    columns = [name for name in _SHOWN if name in frame and frame[name].notna().any()]
    shown = frame[columns].astype(object).fillna("")
    table = shown.to_html(index=False, float_format="{:.4g}".format)
    return f"<p><b>{escape(heading)}</b></p>{table}"


def load_folder(folder: Path) -> LoadedRun | LoadedSweep:
    """Read the folder of a run, or of several.

    Raises ConfigError if it holds no run, StoreError if the run is damaged, has no records, or is
    of another version.
    """
    if not (folder / RUN_FILE).is_file() and any(folder.glob(f"*/{RUN_FILE}")):
        return LoadedSweep(folder)
    return LoadedRun(analyse(read_run(folder)))


def frame_of(record_type: type, records: Sequence[Any]) -> pd.DataFrame:
    """Records as rows with their fields as columns.

    Lists are joined by semicolons, mappings are JSON.
    """
    names = columns(record_type)
    rows = [[_field(getattr(record, name)) for name in names] for record in records]
    # dtype=object keeps whole numbers whole if one of the column is missing.
    return pd.DataFrame(rows, columns=names, dtype=object)


def _batches(analysis: Analysis) -> pd.DataFrame:
    """All batches; percentiles of a batch's request times are the last columns."""
    batches = analysis.run.batches
    frame = frame_of(BatchRecord, batches).drop(
        columns=["request_times", "request_acceptance", "request_tokens"]
    )
    times = [request_percentiles([batch]) for batch in batches]
    for name in PERCENTILES:
        frame[name] = pd.Series([percentiles[name] for percentiles in times], dtype=object)
    return frame


def _windows(analysis: Analysis) -> pd.DataFrame:
    """All windows, each with the phase of its batch; later columns stand behind that."""
    run = analysis.run
    phases = {batch_key(batch): str(batch.phase) for batch in run.batches}
    frame = frame_of(WindowRecord, [_all_fallbacks(window) for window in run.windows])
    frame["phase"] = [phases.get(batch_key(window), "") for window in run.windows]
    frame["path"] = frame.pop("path")
    return frame


TABLES: Mapping[str, Callable[[Analysis], pd.DataFrame]] = {
    "cells": lambda analysis: frame_of(CellResult, analysis.cells),
    "batches": _batches,
    "windows": _windows,
}
"""How each table is made."""


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


REPORT_PAGE = "report.html"
THE_REST = "Figures, precision and a glossary are in the run folder's report.html."


def write_files(folder: Path, analysis: Analysis) -> None:
    """Make all report files of a run anew.

    Raises StoreError if they cannot be written.
    """
    document = build_document(analysis)
    write_header(folder, with_summaries(analysis))
    for table, rows in TABLES.items():
        write_atomically(folder / f"{table}.csv", to_csv(rows(analysis)))
    write_atomically(folder / REPORT_PAGE, render_html(document))  # first: report.md cites it
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
    headline = answer_of(analysis)
    return {
        "folder": str(folder),
        "status": run.header.status,
        "answer": {
            "badge": headline.badge,
            "sentence": headline.sentence,
            "cell": None if headline.cell is None else headline.cell.label,
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
