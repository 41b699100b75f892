"""Writes that are on the disk, whole, when they return."""

import os
from errno import EINVAL
from pathlib import Path

from nwor_bench.errors import StoreError


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
