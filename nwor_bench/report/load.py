"""A stored run for notebooks and scripts: typed records, and the rows of its CSV files as frames.

`nwor_bench.load` is the way in. The report writes the same frames as CSV files.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from nwor_bench.analysis.analyse import PERCENTILES, Analysis, analyse, request_percentiles
from nwor_bench.analysis.findings import Finding
from nwor_bench.errors import ConfigError
from nwor_bench.records.header import RunHeader
from nwor_bench.records.lines import batch_key
from nwor_bench.records.store import read_run
from nwor_bench.records.types import BatchRecord, CellResult, WindowRecord, columns

Table = Literal["cells", "batches", "windows"]
"""A CSV file of a run folder, without its suffix."""


@dataclass(frozen=True)
class LoadedRun:
    """A stored run and what its records say."""

    analysis: Analysis

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

    def frame(self, table: Table) -> pd.DataFrame:
        """The rows of cells.csv, batches.csv or windows.csv. A value not measured is missing (NA).

        Raises ConfigError for another name.
        """
        if table not in TABLES:
            raise ConfigError.unknown("table", table, TABLES)
        return TABLES[table](self.analysis).convert_dtypes()


def load_run(folder: Path) -> LoadedRun:
    """Read a run folder.

    Raises ConfigError if it holds no run, StoreError if the run is damaged, has no records, or is
    of another version.
    """
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
        frame[name] = pd.Series([own[name] for own in times], dtype=object)
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
