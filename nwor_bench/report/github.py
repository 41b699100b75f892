"""Reports in the summary of a GitHub Actions job."""

import os
from pathlib import Path

from nwor_bench.errors import ConfigError

VARIABLE = "GITHUB_STEP_SUMMARY"
FLAG = "--github-summary"
LIMIT_BYTES = 1024 * 1024
"""What GitHub shows of a step's summary; a longer one is refused whole."""

_CUT = "\n\n(Cut here: a step's summary holds 1 MiB. The report's file has the rest.)\n"


def github_summary_file() -> Path:
    """The file that GitHub Actions shows as the step's summary; made if it is not there yet.

    Raises ConfigError if the variable is not set (not in a GitHub Actions job), or what it names
    cannot be written.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        raise ConfigError.at(
            FLAG,
            f"the environment variable {VARIABLE} is not set. GitHub Actions sets it in "
            f"each step; elsewhere set {VARIABLE} to a file's path, or leave the flag out.",
        )
    try:
        Path(path).open("a").close()
    except OSError as error:
        raise ConfigError.for_field(
            VARIABLE, path, f"it cannot be written ({error.strerror}); name a file that can be"
        ) from error
    return Path(path)


def append_github_summary(markdown: str) -> None:
    """Add a report to the step's summary, cut at a line's end where it would be too long.

    Raises ConfigError if GITHUB_STEP_SUMMARY is not set or its file cannot be written.
    """
    path = github_summary_file()
    with path.open("a", encoding="utf-8", newline="\n") as file:
        file.write(_fitting(markdown, LIMIT_BYTES - path.stat().st_size))


def _fitting(markdown: str, room: int) -> str:
    text = markdown.rstrip("\n") + "\n\n"
    if len(text.encode()) <= room:
        return text
    keep = max(0, room - len(_CUT.encode()))
    kept = text.encode()[:keep].decode(errors="ignore")
    return (kept.rpartition("\n")[0] + _CUT) if keep else ""
