"""A run for `compare`: read from its records, or from the tables of a stored baseline.

A baseline without records gives the blocks' times from its CSV tables. Without these there are only
cell summaries, and times have no interval.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from nwor_bench.analysis.analyse import analyse
from nwor_bench.analysis.cell_data import CellData, gather_cells
from nwor_bench.errors import ConfigError, StoreError
from nwor_bench.records.csv_tables import read_table
from nwor_bench.records.header import RunHeader
from nwor_bench.records.lines import batch_key
from nwor_bench.records.run_folder import RUN_FILE, SWEEP_FILE, records_path
from nwor_bench.records.store import RunData, read_header, read_run
from nwor_bench.records.types import BatchRecord, Cell, CellResult, Phase, RunStatus, WindowRecord

CELLS_TABLE, BATCHES_TABLE, WINDOWS_TABLE = "cells.csv", "batches.csv", "windows.csv"
SUMMARIES = "cell summaries"
"""`source` of a run without blocks."""

_CELLS = TypeAdapter(list[CellResult])


@dataclass(frozen=True)
class StoredRun:
    """A run's cell summaries, and its records by cell if they were kept.

    `source` names the file that the records were read from; it is SUMMARIES if `data` is empty.
    `warnings` are sentences about the whole run.
    """

    folder: Path
    header: RunHeader
    cells: dict[Cell, CellResult]
    data: dict[Cell, CellData]
    source: str
    warnings: tuple[str, ...]

    def baseline_of(self, cell: Cell) -> CellData | None:
        """Records of off x off with the cell's pair; None if they were not kept."""
        own = (data for other, data in self.data.items() if other.pair == cell.pair)
        found = (data for data in own if data.is_baseline)
        return next(found, None)

    @property
    def pairs(self) -> set[str]:
        """Names of its pairs; a run of `nwor-bench sweep` has one."""
        return {cell.pair for cell in self.cells}

    def under_pair(self, name: str) -> "StoredRun":
        """The run with its pair renamed, so that its cells match those of another pair."""
        cells = [replace(result, pair=name) for result in self.cells.values()]
        every = [replace(data, cell=replace(data.cell, pair=name)) for data in self.data.values()]
        return replace(
            self,
            cells={result.cell: result for result in cells},
            data={data.cell: data for data in every},
        )


def load_stored(folder: Path) -> StoredRun:
    """Read a run folder or a stored baseline.

    Raises ConfigError if there is no run or it has no cells, StoreError if it is damaged or has an
    unknown format.
    """
    if not (folder / RUN_FILE).is_file() and (folder / SWEEP_FILE).is_file():
        raise ConfigError.for_field(
            "run folder",
            str(folder),
            "it holds a sweep of several runs; name one run in it, or two sweeps",
        )
    header = read_header(folder)
    if (records := records_path(folder)).is_file():
        run, source = read_run(folder), records.name
        cells: Sequence[CellResult] = analyse(run).cells
    else:
        run, source = _from_tables(folder, header)
        cells = _summaries(folder, header)
        if source != SUMMARIES:
            _require_whole(folder, run, cells)
    if not cells:
        raise ConfigError.for_field(
            "run folder", str(folder), "no cell was measured in it; name a run that has cells"
        )
    return StoredRun(
        folder=folder,
        header=header,
        cells={result.cell: result for result in cells},
        data={data.cell: data for data in gather_cells(run)},
        source=source,
        warnings=(*_status(header), *run.warnings),
    )


def _status(header: RunHeader) -> list[str]:
    status = header.status
    if status == RunStatus.COMPLETE:
        return []
    return [f"it did not end as planned (status: {status or 'unknown'})"]


def _from_tables(folder: Path, header: RunHeader) -> tuple[RunData, str]:
    """The records in the CSV tables, and the tables' names."""
    if not (folder / BATCHES_TABLE).is_file():
        return RunData(header, (), ()), SUMMARIES
    batches = read_table(folder / BATCHES_TABLE, BatchRecord)
    windows: list[WindowRecord] = []
    source = BATCHES_TABLE
    if (table := _windows_table(folder)).is_file():
        windows = list(map(_own_fallback, read_table(table, WindowRecord)))
        source = f"{BATCHES_TABLE} and {table.name}"
    return RunData(header, tuple(batches), tuple(windows)), source


def _windows_table(folder: Path) -> Path:
    """The longest table, which a baseline may keep compressed."""
    plain = folder / WINDOWS_TABLE
    return plain if plain.is_file() else folder / f"{WINDOWS_TABLE}.gz"


def _require_whole(folder: Path, run: RunData, cells: Sequence[CellResult]) -> None:
    """Raise StoreError for a truncated table, whose remaining blocks would look complete."""
    timed = Counter(batch.cell for batch in run.batches if batch.phase == Phase.TIMED)
    for cell in cells:
        found = timed[cell.cell]
        if found != cell.batches:
            raise _cut(folder / BATCHES_TABLE, found, "timed batches", cell.batches, cell.label)
    if not (table := _windows_table(folder)).is_file():
        return
    windows = Counter(map(batch_key, run.windows))
    for batch in run.batches:
        found = windows[batch_key(batch)]
        if found != batch.windows:
            place = f"batch {batch.batch}"
            raise _cut(table, found, "windows", batch.windows, place)


def _cut(path: Path, found: int, what: str, expected: int, place: str) -> StoreError:
    return StoreError.at(
        path,
        f"it has {found} of the {expected} {what} of {place}; copy the whole file, or "
        "remove it and compare without",
        found,
    )


def _own_fallback(window: WindowRecord) -> WindowRecord:
    """The window without SCV's fallback reason, which the table's column also shows."""
    reasons = (window.fallback_reason or "").split("; ")
    own = [reason for reason in reasons if reason and not reason.startswith("scv:")]
    return replace(window, fallback_reason="; ".join(own) or None)


def _summaries(folder: Path, header: RunHeader) -> Sequence[CellResult]:
    if header.cells:
        try:
            return _CELLS.validate_python(header.cells)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            field = f"{folder / RUN_FILE}: cells.{place}"
            raise StoreError.at(field, first["msg"], first["input"]) from error
    if (folder / CELLS_TABLE).is_file():
        return read_table(folder / CELLS_TABLE, CellResult)
    return []
