"""Files: users' files, JSON, whole files synced to disk, and a run's folder with its lock."""

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from errno import EINVAL, ENOTDIR
from os import strerror
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nwor_bench import __version__
from nwor_bench.errors import ConfigError, StoreError


def home_path(text: str | Path) -> Path:
    """The path with a home folder for `~`; `~name` stays as it is if nobody has that name."""
    return Path(os.path.expanduser(text))  # noqa: PTH111, as Path.expanduser raises RuntimeError


def read_text(path: Path) -> str:
    """The text of a user's file; a byte order mark at its beginning is left out.

    Raises OSError, and ValueError for bytes that are not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8 text; save it as UTF-8") from error


RESULT_VERSION = 1
"""Version of the keys of results on stdout; it rises when one goes or changes its meaning."""


def parse_json(text: str | bytes) -> Any:
    """The parsed value of the text.

    Raises ValueError for text that is not JSON, and for JSON nested deeper than Python's parser
    goes, of which `json.loads` makes a RecursionError.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def document(content: Any) -> str:
    """An indented JSON document that ends with a newline; it has no NaN."""
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def result_document(content: Mapping[str, Any]) -> str:
    """A command's result as JSON, headed by its version and ours."""
    return document({"result_version": RESULT_VERSION, "nwor_bench": __version__, **content})


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content in one step. Raises StoreError if the disk refuses it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StoreError.at(path, f"cannot be written ({error.strerror})") from error


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk: a file's own fsync does not sync its name.

    Ignores a file system without fsync for folders (EINVAL). Raises OSError for other failures.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != EINVAL:
            raise
    finally:
        os.close(descriptor)


RUNS = Path("runs")
"""Where a run's folder is made if no other is named."""

RUN_FILE = "run.json"
SWEEP_FILE = "sweep.json"
"""The index of a folder of several runs."""
DONE, LEFT_OUT = "done", "left out"
"""Statuses of its runs; `left out`: the time budget had no room for the batch size."""
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

    Raises ConfigError if another process is writing it, StoreError if nobody may.
    """
    path = folder / RECORDS_FILE
    try:
        records = path.open("ab")
    except OSError as error:
        raise StoreError.at(path, f"cannot be written ({error.strerror})") from error
    with records as file:
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
        goes_on = f"write nwor-bench sweep --resume {folder}"
        other = "an empty one" if what.startswith("files") else goes_on
        remedy = f"it already holds {what}; name a new folder, or {other}"
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
