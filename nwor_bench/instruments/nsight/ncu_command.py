"""The command line of Nsight Compute around a sweep: DRAM and L2 counters of chosen windows.

Each chosen window is measured as a whole (a range), the sweep being run once a pass. Kernel
replay would count kernels one by one with everything else held still, which is not what a window
does; range replay within one run refuses `cuGraphLaunch`. With application-range replay a window
of an eager engine is measured right.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from nwor_bench.errors import ConfigError
from nwor_bench.instruments.nvtx_ranges import DOMAIN

METRICS = {
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "l2_read_sectors": "lts__t_sectors_op_read.sum",
    "l2_write_sectors": "lts__t_sectors_op_write.sum",
    "gpu_ns": "gpu__time_duration.sum",
}
"""Names of the columns, and NVIDIA's of what is collected for them."""

REPORT = ".ncu-rep"
"""Ending of a report."""

PROGRAM = (sys.executable, "-c", "from nwor_bench.cli.app import main; main()")


def ncu_command(
    ncu: Path, sweep: Sequence[str], report: Path, windows: int, skip: int
) -> list[str]:
    """`ncu ... python ... sweep ...`: windows `skip` + 1 to `skip` + `windows` of the sweep.

    Args:
        ncu: the tool.
        sweep: what follows `nwor-bench`, "sweep" first.
        report: the report's path without its ending.
        windows: how many to measure.
        skip: windows before them, warm-up's and the gate's.

    Raises ConfigError for what cannot be replayed.
    """
    check_sweep(sweep)
    for flag, value, least in (("--windows", windows, 1), ("--skip", skip, 0)):
        if value < least:
            raise ConfigError.for_field(flag, value, f"write {least} or more")
    return [
        str(ncu),
        *("--target-processes", "all", "--replay-mode", "app-range"),
        *("--nvtx", "--nvtx-include", f"{DOMAIN}@window/"),
        *("--range-filter", f"::{numbers_regex(skip + 1, skip + windows)}"),
        *("--cache-control", "none", "--clock-control", "none"),
        *("--metrics", ",".join(METRICS.values())),
        *("--export", str(report), "--force-overwrite"),
        *PROGRAM,
        *with_ranges(sweep),
    ]


def numbers_regex(first: int, last: int) -> str:
    """The whole numbers from `first` to `last`, both at least 1, as a regular expression.

    `--range-filter` matches a range's whole number against one: `[101-140]` is there a class of
    three characters, and takes ranges 0, 1 and 4. Of the syntax only what ncu's help shows is used,
    classes and alternatives: 8 to 112 is `[8-9]|[1-9][0-9]|10[0-9]|11[0-2]`.
    """
    parts = []
    while first <= last:
        size, free = 1, 0  # the last `free` digits may be any: `size` numbers
        while first % (10 * size) == 0 and first + 10 * size - 1 <= last:
            size, free = 10 * size, free + 1
        head, digit = divmod(first // size, 10)
        digits = min((last + 1 - first) // size, 10 - digit)
        own = str(digit) if digits == 1 else f"[{digit}-{digit + digits - 1}]"
        parts.append(f"{head or ''}{own}{'[0-9]' * free}")
        first += digits * size
    return "|".join(parts)


def with_ranges(sweep: Sequence[str]) -> list[str]:
    """The sweep with its NVTX ranges on, whatever the profiler leaves in the environment."""
    return [*sweep] if "--nvtx" in sweep else [*sweep, "--nvtx"]


def check_is_sweep(command: Sequence[str]) -> None:
    """Refuse what is no sweep."""
    if not command or command[0] != "sweep":
        raise ConfigError.for_field(
            "profile",
            " ".join(command),
            "write `-- sweep` and its flags, e.g. `-- sweep --pair tiny`",
        )


def check_sweep(sweep: Sequence[str]) -> None:
    """Refuse what is no sweep, and a run folder that a second pass could not write."""
    check_is_sweep(sweep)
    for name in ("--output", "--resume", "--file"):
        if any(part == name or part.startswith(f"{name}=") for part in sweep):
            raise ConfigError.for_field(
                "profile", name, "the sweep is run once a pass, each in a folder of its own under "
                "runs/; leave it out",
            )  # fmt: skip


def graph_warning(sweep: Sequence[str]) -> str | None:
    """A sentence if the sweep's engine would replay CUDA graphs, whose windows ncu may refuse."""
    for place, part in enumerate(sweep):
        if part.startswith("--engine-args"):
            text = part.partition("=")[2] or (sweep[place + 1] if place + 1 < len(sweep) else "{}")
            try:
                if json.loads(text).get("enforce_eager"):
                    return None
            except (ValueError, AttributeError):
                return None  # the sweep itself refuses it, with the reason
    return (
        "ncu measures windows of an eager engine: add "
        "--engine-args '{\"enforce_eager\": true}' to the sweep. For windows under CUDA graphs "
        "use sweep --dram-counters."
    )
