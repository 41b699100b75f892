"""nwor-bench: what happens to the KV cache in speculative decoding, measured.

Importing this package pulls in neither torch nor vLLM, nor pandas.
"""

from os import PathLike
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nwor_bench.report.load import LoadedRun, LoadedSweep

__version__ = "0.2.0"


def load(folder: str | PathLike[str]) -> "LoadedRun | LoadedSweep":
    """Read a run or sweep folder: typed records, and its tables as pandas frames (docs/runs.md).

    Raises ConfigError if it holds no run, StoreError if the run is damaged, has no records, or is
    of another version.
    """
    from pathlib import Path

    from nwor_bench.report.load import load_folder

    return load_folder(Path(folder))
