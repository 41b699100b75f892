"""Files that users name: where one is, and its text."""

import os
from pathlib import Path


def home_path(text: str | Path) -> Path:
    """The path with a home folder for `~`; `~name` stays as it is where nobody has that name."""
    return Path(os.path.expanduser(text))  # noqa: PTH111, as Path.expanduser raises RuntimeError


def read_text(path: Path) -> str:
    """The text of a user's file; a byte order mark at its beginning is left out.

    Raises OSError, and ValueError for bytes that are not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8 text; save it as UTF-8") from error
