"""Run Nsight Compute around a sweep. Its report is read by `ncu --import` or its own window.

Each chosen window is measured as one range, with application-range replay: the sweep runs once per
counter pass, with an eager engine. Kernel replay would serialise the kernels of a window; range
replay within one run refuses `cuGraphLaunch`.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from nwor_bench.errors import ConfigError, ExitCode
from nwor_bench.instruments.nsight.tools import (
    PROGRAM,
    check_is_sweep,
    ending,
    make_room,
    run_tool,
)
from nwor_bench.instruments.nvtx_ranges import DOMAIN

METRICS = (
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_sectors_op_read.sum",
    "lts__t_sectors_op_write.sum",
    "gpu__time_duration.sum",
)

REPORT = ".ncu-rep"
"""Ending of a report."""


def ncu_command(
    ncu: Path, sweep: Sequence[str], report: Path, windows: int, skip: int
) -> list[str]:
    """`ncu ... python ... sweep ...`: windows `skip` + 1 to `skip` + `windows` of the sweep.

    Args:
        ncu: the tool.
        sweep: arguments of `nwor-bench`, beginning with "sweep".
        report: the report's path without its ending.
        windows: how many windows to measure.
        skip: windows to skip first (warm-up and gate).

    Raises ConfigError for a sweep that cannot be replayed.
    """
    check_is_sweep(
        sweep, ("--output", "--resume", "--file"), "the sweep is run once a pass, each in a folder "
        "of its own under runs/; leave it out"
    )  # fmt: skip
    for flag, value, least in (("--windows", windows, 1), ("--skip", skip, 0)):
        if value < least:
            raise ConfigError.for_field(flag, value, f"write {least} or more")
    return [
        str(ncu),
        *("--target-processes", "all", "--replay-mode", "app-range"),
        *("--nvtx", "--nvtx-include", f"{DOMAIN}@window/"),
        *("--range-filter", f"::{numbers_regex(skip + 1, skip + windows)}"),
        *("--cache-control", "none", "--clock-control", "none"),
        *("--metrics", ",".join(METRICS)),
        *("--export", str(report), "--force-overwrite"),
        *PROGRAM,
        *sweep,
    ]


def numbers_regex(first: int, last: int) -> str:
    """The whole numbers from `first` to `last`, both at least 1, as a regular expression.

    `--range-filter` matches a range's whole number against a regular expression, where `[101-140]`
    would be a class of single characters. Only character classes and alternatives are used, as in
    ncu's help: 8 to 112 is `[8-9]|[1-9][0-9]|10[0-9]|11[0-2]`.
    """
    parts = []
    while first <= last:
        size, free = 1, 0  # any values in the last `free` digits: `size` numbers
        while first % (10 * size) == 0 and first + 10 * size - 1 <= last:
            size, free = 10 * size, free + 1
        head, digit = divmod(first // size, 10)
        digits = min((last + 1 - first) // size, 10 - digit)
        own = str(digit) if digits == 1 else f"[{digit}-{digit + digits - 1}]"
        parts.append(f"{head or ''}{own}{'[0-9]' * free}")
        first += digits * size
    return "|".join(parts)


def graph_warning(sweep: Sequence[str]) -> str | None:
    """A warning if the sweep's engine would replay CUDA graphs, which ncu may refuse; else None."""
    for place, part in enumerate(sweep):
        if part.startswith("--engine-args"):
            text = part.partition("=")[2] or (sweep[place + 1] if place + 1 < len(sweep) else "{}")
            try:
                if json.loads(text).get("enforce_eager"):
                    return None
            except (ValueError, AttributeError):
                return None  # the sweep itself refuses such JSON
    return (
        "ncu measures windows of an eager engine: add "
        "--engine-args '{\"enforce_eager\": true}' to the sweep. For windows under CUDA graphs "
        "use sweep --counters dram."
    )


def values_command(report: Path) -> list[str]:
    """Command line that prints the counters of each window as CSV, in bytes and ns."""
    return ["ncu", "--import", str(report), "--page", "raw", "--csv", "--print-units", "base"]


def run_profile(command: Sequence[str], report: Path, *, stdout_free: bool = False) -> Path:
    """Profile a sweep; returns the report.

    Removes an earlier report first. Raises KeyboardInterrupt after Ctrl-C, ConfigError if there is
    no report.
    """
    written = ending(report, REPORT)
    make_room(written)
    code = run_tool(command, stdout_free=stdout_free)
    if code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if code or not written.is_file():
        what = f"ended with exit code {code}" if code else "wrote no report"
        raise ConfigError.at(
            "profile ncu",
            f"it {what}; its messages above say why. Without permission for the "
            "counters run as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0",
        )
    return written
