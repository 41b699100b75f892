"""Run Nsight Systems around a sweep, and turn its report into an SQLite export."""

from collections.abc import Sequence
from pathlib import Path

from nwor_bench.errors import ConfigError, ExitCode
from nwor_bench.instruments.nsight.nsys_command import export_command
from nwor_bench.instruments.nsight.report_files import ending, make_room
from nwor_bench.instruments.nsight.tools import PRODUCT, find_tool, run_tool
from nwor_bench.instruments.nvtx_ranges import DOMAIN

REPORT, RAW, EXPORT = ".nsys-rep", ".qdstrm", ".sqlite"
"""Endings of a report, of what is left where none could be made of it, and of an export."""

IMPORT = (
    "its importer (QdstrmImporter, in the folder host-linux-x64) is not installed here or failed. "
    "Where Nsight Systems is complete, of this version or newer, write `QdstrmImporter -i {raw}` "
    "and then `nwor-bench profile nsys --read {report}`"
)

PERMIT = (
    ". --gpu-metrics needs a GPU that it knows and the permission for counters: leave it out, run "
    "as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
)


def run_profile(command: Sequence[str], report: Path, capture: str) -> int:
    """Profile a sweep; the exit code is the sweep's own, and there is a report.

    What lies at `report` from earlier is removed first, so that it is not taken for this run's.

    Raises KeyboardInterrupt if Ctrl-C came before there was a report; ConfigError if no report
    came of it otherwise, with the reason as far as it can be told.
    """
    make_room(report, REPORT, RAW, EXPORT)
    code = run_tool(command)
    if not ending(report, REPORT).is_file():
        if code == ExitCode.INTERRUPTED:
            raise KeyboardInterrupt
        counters = any(part.startswith("--gpu-metrics") for part in command)
        reason = _why_no_report(code, report, capture)
        raise ConfigError(f"profile nsys: {reason}{PERMIT if counters else ''}")
    return code


def _why_no_report(code: int, report: Path, capture: str) -> str:
    raw = ending(report, RAW)
    if raw.is_file():
        remedy = IMPORT.format(raw=raw, report=ending(report, REPORT))
        return f"{PRODUCT['nsys']} left {raw} and made no report of it: {remedy}"
    if code:
        return (
            f"no report: {PRODUCT['nsys']} or the sweep in it ended with exit code {code}; the "
            "messages above say why"
        )
    return (
        f"nothing was captured: the sweep ended without a range {capture}@{DOMAIN} that "
        f"{PRODUCT['nsys']} saw; `nwor-bench doctor` says whether NVTX works here"
    )


def export_of(source: Path) -> Path:
    """The SQLite export at a path, or that of a report, made anew beside it.

    Raises ConfigError if there is none, or the export fails.
    """
    if not source.is_file():
        raise ConfigError(f"profile nsys: {source}: there is no such file")
    if source.suffix == RAW:
        remedy = IMPORT.format(raw=source, report=source.with_suffix(REPORT))
        raise ConfigError(f"profile nsys: {source} is no report yet: {remedy}")
    if source.suffix != REPORT:
        return source
    export = source.with_suffix(EXPORT)
    code = run_tool(export_command(find_tool("nsys"), source, export))
    if code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise ConfigError(
            f"profile nsys: {source} was not exported (exit code {code}); the messages above say "
            "why. A report is read by the version that wrote it, or a newer one"
        )
    return export
