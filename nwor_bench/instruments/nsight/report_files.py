"""Where a profiler's report lies. Nothing of an earlier run is left there to be taken for it."""

from pathlib import Path

from nwor_bench.errors import ConfigError

TABLE = ".windows.csv"
"""Ending of the table that is made of a report: longer, so as not to replace somebody's own."""


def without_ending(report: Path, suffix: str) -> Path:
    """The path of --report as the profilers are told it, whether its ending was written or not.

    Raises ConfigError for a path that names no file.
    """
    name = report.name.removesuffix(suffix)
    if name in ("", ".."):
        raise ConfigError.for_field("--report", str(report), "name a file, without its ending")
    return report.with_name(name)


def ending(report: Path, suffix: str) -> Path:
    """The report's path with an ending; a dot in its name is no ending of its own."""
    return report.with_name(report.name + suffix)


def make_room(report: Path, *suffixes: str) -> None:
    """Make the report's folder; remove what lies there with these endings, and an earlier table.

    Raises ConfigError where that is not possible, before anything is profiled.
    """
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
        for suffix in (*suffixes, TABLE):
            ending(report, suffix).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError.for_field(
            "--report", str(report), f"{error.strerror}: {error.filename}; name another place"
        ) from error
