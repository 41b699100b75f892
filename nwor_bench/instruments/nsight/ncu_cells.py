"""Which cell a window of a report is of: the report holds its batch's number, the run the rest."""

from collections.abc import Sequence
from pathlib import Path

from nwor_bench.instruments.nsight.ncu_read import NcuWindow
from nwor_bench.records.store import RUN_FILE, RUNS, RunData
from nwor_bench.records.types import Phase


def run_folders() -> set[Path]:
    """The runs that lie where a sweep without --output puts its own."""
    return {path.parent for path in RUNS.glob(f"*/{RUN_FILE}")}


def cells_of(run: RunData) -> dict[int, str]:
    """The cell of each batch by its number in batches.csv, as `stage x graph`."""
    return {b.batch: b.cell.label for b in run.batches}


def warmup_warning(windows: Sequence[NcuWindow], run: RunData) -> str | None:
    """A sentence if some of the measured windows ran before the first timed batch."""
    first = min((batch.batch for batch in run.batches if batch.phase == Phase.TIMED), default=0)
    early = [window for window in windows if window.batch is not None and window.batch < first]
    if not early:
        return None
    before = sum(batch.windows for batch in run.batches if batch.batch < first)
    return (
        f"{len(early)} of {len(windows)} windows are of warm-up and gate; a --skip of {before} "
        "leaves them out where warm-up takes as many batches again (write --warmup and "
        "--max-warmup alike)"
    )
