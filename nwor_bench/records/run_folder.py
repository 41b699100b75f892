"""A run's folder: names of its files, its default place, and the lock of its writer."""

import fcntl
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from errno import ENOTDIR
from os import strerror
from pathlib import Path
from tempfile import TemporaryDirectory

from nwor_bench.errors import ConfigError

RUNS = Path("runs")
"""Where a run's folder is made if no other is named."""

RUN_FILE = "run.json"
SWEEP_FILE = "sweep.json"
"""The index of a folder of several runs."""
RECORDS_FILE = "records.jsonl"
KEPT_RECORDS_FILE = "records.jsonl.gz"
"""Compressed records of an archived run, which can be read but not resumed."""


def default_folder(root: Path, scenario: str, pair: str, now: datetime) -> Path:
    """`root/<UTC time>-<scenario>-<pair>`, with names made safe for a file system."""
    time = now.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
    names = [re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") for name in (scenario, pair)]
    return root / "-".join([time, *(name for name in names if name)])


def records_path(folder: Path) -> Path:
    """Path of the run's records: the compressed file if there is no other."""
    plain, kept = folder / RECORDS_FILE, folder / KEPT_RECORDS_FILE
    return kept if kept.is_file() and not plain.is_file() else plain


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Lock this run against other writers; the lock ends with its process.

    Raises ConfigError if another process is writing it.
    """
    with (folder / RECORDS_FILE).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError.for_field(
                "run folder", str(folder), "another process is writing it; wait until that ends"
            ) from error
        yield


def check_output(folder: Path) -> None:
    """Check early that a run can be written to the folder; leaves nothing behind.

    Raises ConfigError if the folder holds anything, or a file is in its way.
    """
    try:
        held = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:  # a name too long, a folder that may not be looked into
        raise not_writable(folder, error) from error
    if held:
        known = {SWEEP_FILE: "a sweep", RUN_FILE: "a run", RECORDS_FILE: "a run"}
        what = next((known[name] for name in known if name in held), f"files ({held[0]})")
        remedy = f"it already holds {what}; name a new folder, or an empty one"
        raise ConfigError.for_field("--output", str(folder), remedy)
    if not nearest.is_dir():
        cause = NotADirectoryError(ENOTDIR, strerror(ENOTDIR))
        raise not_writable(folder, cause) from cause
    try:
        TemporaryDirectory(dir=nearest, prefix=".nwor-").cleanup()
    except OSError as error:
        raise not_writable(folder, error) from error


def not_writable(folder: Path, error: OSError) -> ConfigError:
    """The error to raise when `folder` cannot take a run."""
    return ConfigError.for_field(
        "--output", str(folder), f"it cannot be written ({error.strerror}); name another folder"
    )
