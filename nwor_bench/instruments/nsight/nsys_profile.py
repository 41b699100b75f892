"""Run Nsight Systems around a sweep, and export its report to SQLite."""

from collections.abc import Sequence
from pathlib import Path

from nwor_bench.errors import ConfigError, ExitCode
from nwor_bench.instruments.nsight.tools import (
    PRODUCT,
    PROGRAM,
    check_is_sweep,
    ending,
    find_tool,
    make_room,
    run_tool,
)
from nwor_bench.instruments.nvtx_ranges import DOMAIN

REPORT, EXPORT = ".nsys-rep", ".sqlite"
"""Endings of a report and of an export."""

METRICS = ("--gpu-metrics-devices", "cuda-visible")
"""Options that sample GPU metrics too (versions from 2024)."""

PERMIT = (
    ". --gpu-metrics needs a version from 2024, a supported GPU and permission to read "
    "counters: leave it out, run as root, or load the driver with "
    "NVreg_RestrictProfilingToAdminUsers=0"
)


def nsys_command(
    nsys: Path, sweep: Sequence[str], report: Path, capture: str, gpu_metrics: bool = False
) -> list[str]:
    """`nsys profile ... python ... sweep ...`, capturing one range of the sweep.

    Args:
        nsys: the tool.
        sweep: arguments of `nwor-bench`, beginning with "sweep".
        report: the report's path without its ending.
        capture: the range whose first instance is captured: sweep, block, cell or batch.
        gpu_metrics: sample GPU metrics too.

    Raises ConfigError unless the command is a sweep of one new run.
    """
    check_is_sweep(sweep)
    for name in ("--resume", "--file"):
        if any(part == name or part.startswith(f"{name}=") for part in sweep):
            raise ConfigError.for_field(
                "profile", name, "one range of one new run is captured; write that run's own flags"
            )
    return [
        *(str(nsys), "profile"),
        *("--trace", "cuda,nvtx", "--cuda-graph-trace", "node"),
        *("--capture-range", "nvtx", "--nvtx-capture", f"{capture}@{DOMAIN}"),
        *("--capture-range-end", "stop", "--kill", "none"),
        *("--sample", "none", "--cpuctxsw", "none"),
        *(METRICS if gpu_metrics else ()),
        *("--output", str(report), "--force-overwrite", "true"),
        *PROGRAM,
        *sweep,
    ]


def export_command(nsys: Path, report: Path, target: Path) -> list[str]:
    """Command line of `nsys export` from a report to SQLite."""
    return [
        *(str(nsys), "export", "--type", "sqlite", "--force-overwrite", "true", "--quiet", "true"),
        *("--output", str(target), str(report)),
    ]


def run_profile(
    command: Sequence[str], report: Path, capture: str, *, stdout_free: bool = False
) -> int:
    """Profile a sweep and write its report; returns the sweep's exit code.

    Removes an earlier report first. Without a report it raises KeyboardInterrupt after Ctrl-C, else
    ConfigError with the reason as far as known.
    """
    make_room(report, REPORT, EXPORT)
    code = run_tool(command, stdout_free=stdout_free)
    if not ending(report, REPORT).is_file():
        if code == ExitCode.INTERRUPTED:
            raise KeyboardInterrupt
        counters = any(part.startswith("--gpu-metrics") for part in command)
        reason = _why_no_report(code, capture)
        raise ConfigError.at("profile nsys", f"{reason}{PERMIT if counters else ''}")
    return code


def _why_no_report(code: int, capture: str) -> str:
    if code:
        return (
            f"no report: {PRODUCT['nsys']} or the sweep in it ended with exit code {code}; the "
            "messages above say why"
        )
    return (
        f"nothing was captured: the sweep ended without a range {capture}@{DOMAIN} that "
        f"{PRODUCT['nsys']} saw; `nwor-bench doctor` says whether NVTX works here"
    )


def export_of(source: Path, *, stdout_free: bool = False) -> Path:
    """The SQLite export at `source`; of a report, a new export beside it.

    Raises ConfigError if `source` does not exist or the export fails.
    """
    if not source.is_file():
        raise ConfigError.at(f"profile nsys: {source}", "there is no such file")
    if source.suffix != REPORT:
        return source
    export = source.with_suffix(EXPORT)
    command = export_command(find_tool("nsys"), source, export)
    code = run_tool(command, stdout_free=stdout_free)
    if code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise ConfigError.at(
            f"profile nsys: {source}",
            f"was not exported (exit code {code}); the messages above say "
            "why. A report is read by the version that wrote it, or a newer one",
            joint=" ",
        )
    return export
