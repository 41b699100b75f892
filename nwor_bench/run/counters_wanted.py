"""Decide before heavy imports whether a sweep counts DRAM bytes: from the flag, the sweep file, or
the folder to resume."""

from pathlib import Path

from nwor_bench.records.store import read_header
from nwor_bench.run.run_options import RunOptions
from nwor_bench.run.sweep_folder import INDEX_FILE, SweepIndex
from nwor_bench.workload.sweep_file import load_sweep


def counters_wanted(flag: bool, options: RunOptions) -> bool:
    """True if the sweep that this command line starts or resumes reads DRAM counters.

    Args:
        flag: --dram-counters was given.
        options: have the folder to resume, or the sweep file.

    Raises:
        ConfigError: the folder holds no run, the file is missing or wrong.
        StoreError: the run or sweep in the folder is damaged or has another format.
    """
    if flag:
        return True
    if options.resume is not None:
        return _begun_with_counters(options.resume)
    return options.file is not None and load_sweep(options.file).settings.dram_counters


def _begun_with_counters(folder: Path) -> bool:
    if (folder / INDEX_FILE).is_file():
        return SweepIndex.open(folder).sweep.settings.dram_counters
    spec = read_header(folder).spec or {}  # older runs do not have the field
    return bool(spec.get("dram_counters", False))
