"""Run Nsight Systems around a sweep. Its report is read by `nsys stats` or its own window."""

from collections.abc import Sequence
from pathlib import Path

from nwor_bench.errors import ConfigError, ExitCode
from nwor_bench.instruments.nsight.tools import (
    PRODUCT,
    PROGRAM,
    check_is_sweep,
    ending,
    make_room,
    run_tool,
)
from nwor_bench.instruments.nvtx_ranges import DOMAIN

REPORT = ".nsys-rep"
"""Ending of a report."""


def nsys_command(nsys: Path, sweep: Sequence[str], report: Path, capture: str) -> list[str]:
    """`nsys profile ... python ... sweep ...`, capturing one range of the sweep.

    Args:
        nsys: the tool.
        sweep: arguments of `nwor-bench`, beginning with "sweep".
        report: the report's path without its ending.
        capture: the range whose first instance is captured: sweep, block, cell or batch.

    Raises ConfigError unless the command is a sweep of one new run.
    """
    check_is_sweep(
        sweep, ("--resume", "--file"), "one range of one new run is captured; write that run's own "
        "flags"
    )  # fmt: skip
    return [
        *(str(nsys), "profile"),
        *("--trace", "cuda,nvtx", "--cuda-graph-trace", "node"),
        *("--capture-range", "nvtx", "--nvtx-capture", f"{capture}@{DOMAIN}"),
        *("--capture-range-end", "stop", "--kill", "none"),
        *("--sample", "none", "--cpuctxsw", "none"),
        *("--output", str(report), "--force-overwrite", "true"),
        *PROGRAM,
        *sweep,
    ]


def stats_command(report: Path) -> list[str]:
    """Command line that sums GPU time by NVTX range."""
    return ["nsys", "stats", "--report", "nvtx_gpu_proj_sum", str(report)]


def run_profile(
    command: Sequence[str], report: Path, capture: str, *, stdout_free: bool = False
) -> tuple[int, Path]:
    """Profile a sweep; returns the sweep's exit code and the report.

    Removes an earlier report first. Without a report it raises KeyboardInterrupt after Ctrl-C, else
    ConfigError with the reason as far as known.
    """
    written = ending(report, REPORT)
    make_room(written)
    code = run_tool(command, stdout_free=stdout_free)
    if written.is_file():
        return code, written
    if code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        reason = (
            f"no report: {PRODUCT['nsys']} or the sweep in it ended with exit code {code}; the "
            "messages above say why"
        )
    else:
        reason = (
            f"nothing was captured: the sweep ended without a range {capture}@{DOMAIN} that "
            f"{PRODUCT['nsys']} saw; `nwor-bench doctor` says whether NVTX works here"
        )
    raise ConfigError.at("profile nsys", reason)
