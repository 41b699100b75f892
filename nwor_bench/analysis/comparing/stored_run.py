"""A run for `compare`, read from its folder."""

from dataclasses import dataclass, replace
from pathlib import Path

from nwor_bench.analysis.analyse import analyse
from nwor_bench.analysis.cell_data import CellData
from nwor_bench.analysis.worth import Measured
from nwor_bench.errors import ConfigError
from nwor_bench.records.files import (
    KEPT_RECORDS_FILE,
    RECORDS_FILE,
    RUN_FILE,
    SWEEP_FILE,
    records_path,
)
from nwor_bench.records.header import RunHeader
from nwor_bench.records.store import read_header, read_run
from nwor_bench.records.types import Cell, CellResult, RunStatus


@dataclass(frozen=True)
class StoredRun:
    """A run's cell summaries, and its records by cell.

    `warnings` are sentences about the whole run.
    """

    folder: Path
    header: RunHeader
    cells: dict[Cell, CellResult]
    data: dict[Cell, CellData]
    warnings: tuple[str, ...]
    counts: Measured | None = None
    """What its draft counts are worked out from; None for a run that compares modes."""

    def baseline_of(self, cell: Cell) -> CellData | None:
        """Records of off x off with the cell's pair; None if it did not run."""
        own = (data for other, data in self.data.items() if other.pair == cell.pair)
        return next((data for data in own if data.is_baseline), None)

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


def is_sweep(folder: Path) -> bool:
    """True for the folder of a sweep of several runs."""
    return not (folder / RUN_FILE).is_file() and (folder / SWEEP_FILE).is_file()


def load_stored_runs(folder: Path) -> dict[str, StoredRun]:
    """The runs of a sweep of draft counts by their place on its axes; those that never started are
    left out.

    Raises ConfigError for a sweep of modes, whose runs have an answer each; and as `load_stored`.
    """
    folders = sorted(path.parent for path in folder.glob(f"*/{RUN_FILE}"))
    found = {own.name.partition("-")[2] or own.name: load_stored(own) for own in folders}
    if not all(run.counts is not None for run in found.values()):
        remedy = "it holds a sweep of several runs; compare its run folders one by one"
        raise ConfigError.for_field("run folder", str(folder), remedy)
    return found


def load_stored(folder: Path) -> StoredRun:
    """Read a run folder, or a stored baseline: run.json and the records.

    Raises ConfigError if there is no run, it has no records or no cells, StoreError if it is
    damaged or has an unknown format.
    """
    if is_sweep(folder):
        remedy = "it holds a sweep of several runs; compare its run folders one by one"
        raise ConfigError.for_field("run folder", str(folder), remedy)
    header, records = read_header(folder), records_path(folder)
    if not records.is_file():
        raise ConfigError.for_field(
            "run folder",
            str(folder),
            f"it has no {RECORDS_FILE}; copy it (or {KEPT_RECORDS_FILE}) beside {RUN_FILE}",
        )
    found = analyse(read_run(folder))
    if not found.cells:
        raise ConfigError.for_field(
            "run folder", str(folder), "no cell was measured in it; name a run that has cells"
        )
    status = header.status
    unfinished = f"it did not end as planned (status: {status or 'unknown'})"
    return StoredRun(
        folder=folder,
        header=header,
        cells={result.cell: result for result in found.cells},
        data={data.cell: data for data in found.gathered},
        counts=None if found.worth is None else found.measured,
        warnings=(*([] if status == RunStatus.COMPLETE else [unfinished]), *found.run.warnings),
    )
