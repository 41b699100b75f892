"""Will this sweep count DRAM bytes? Told before anything heavy is imported: by the flag, by the
sweep file, or by what a run or sweep to go on with was begun with."""

from pathlib import Path

from nwor_bench.records.store import read_header
from nwor_bench.run.sweep_index import INDEX_FILE, SweepIndex
from nwor_bench.workload.sweep_file import load_sweep


def counters_wanted(flag: bool, resume: str | None, file: str | None) -> bool:
    """Whether the sweep that this command line begins, or goes on with, reads DRAM counters.

    Args:
        flag: --dram-counters was given.
        resume: the folder of --resume: a run's or a sweep's.
        file: the sweep file of --file.

    Raises:
        ConfigError: the folder holds no run, the file is missing or wrong.
        StoreError: what the folder holds is damaged or of another format.
    """
    if flag:
        return True
    if resume is not None:
        return _begun_with_counters(Path(resume))
    return file is not None and load_sweep(Path(file)).settings.dram_counters


def _begun_with_counters(folder: Path) -> bool:
    if (folder / INDEX_FILE).is_file():
        return SweepIndex.open(folder).sweep.settings.dram_counters
    spec = read_header(folder).spec or {}  # older runs do not have the field
    return bool(spec.get("dram_counters", False))
