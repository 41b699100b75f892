"""Files and JSON: users' files read, JSON parsed and written, whole files synced to disk."""

import json
import os
from collections.abc import Mapping
from errno import EINVAL
from pathlib import Path
from typing import Any

from nwor_bench import __version__
from nwor_bench.errors import StoreError


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
"""Of the keys of results on stdout; it rises when one goes or changes its meaning."""


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
