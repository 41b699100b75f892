"""A sweep folder's runs for `compare`, by their place on the axes."""

from pathlib import Path

from nwor_bench.analysis.comparing.stored_run import StoredRun, load_stored
from nwor_bench.analysis.comparing.sweeps import SEPARATOR
from nwor_bench.errors import ConfigError
from nwor_bench.records.run_folder import RUN_FILE
from nwor_bench.run.sweep_folder import FAILED, SweepIndex
from nwor_bench.run.sweep_summary import words_of


def load_sweep_runs(folder: Path) -> dict[str, StoredRun]:
    """The runs that were measured, in the order of their numbers.

    Raises StoreError for a damaged index or run.
    """
    index = SweepIndex.open(folder)
    index.check_readable()
    runs: dict[str, StoredRun] = {}
    for entry in index.content["runs"]:
        own = folder / entry["folder"]
        if entry["status"] == FAILED or not (own / RUN_FILE).is_file():
            continue
        try:
            stored = load_stored(own)
        except ConfigError:  # cut before its first batch
            continue
        name = SEPARATOR.join(words_of(entry).values())
        # Pairs in different folders may have files of one name.
        runs[f"{name}{SEPARATOR}{entry['pair']}" if name in runs else name] = stored
    return runs
