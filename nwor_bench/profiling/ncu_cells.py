"""Which cell a window of a report is of: the report holds its batch's number, the run the rest."""

from pathlib import Path

from nwor_bench.records import label_of
from nwor_bench.store import RUN_FILE, RUNS, read_run


def run_folders() -> set[Path]:
    """The runs that lie where a sweep without --output puts its own."""
    return {path.parent for path in RUNS.glob(f"*/{RUN_FILE}")}


def cells_of(run: Path) -> dict[int, str]:
    """The cell of each batch by its number in batches.csv, as `stage x graph`.

    Raises ConfigError if there is no run, StoreError if it is damaged or of another version.
    """
    batches = read_run(run).batches
    return {batch.batch: label_of(batch.nwor_mode, batch.scv_mode, batch.arm) for batch in batches}
