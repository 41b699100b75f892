"""The command lines of Nsight Systems around a sweep, and of its export to SQLite."""

from collections.abc import Sequence
from pathlib import Path

from nwor_bench.profiling.ncu_command import PROGRAM, check_sweep, with_ranges
from nwor_bench.profiling.nvtx_ranges import DOMAIN


def nsys_command(
    nsys: Path, sweep: Sequence[str], report: Path, capture: str, gpu_metrics: bool
) -> list[str]:
    """`nsys profile ... python ... sweep ...`, capturing one range of the sweep.

    Args:
        nsys: the tool.
        sweep: what follows `nwor-bench`, "sweep" first.
        report: the report's path without its ending.
        capture: the range whose first instance is captured: sweep, cell or batch.
        gpu_metrics: sample the GPU's metrics too, which needs the permission for counters.

    Raises ConfigError for what is no sweep.
    """
    check_sweep(sweep)
    metrics = ("--gpu-metrics-devices", "cuda-visible") if gpu_metrics else ()
    return [
        *(str(nsys), "profile"),
        *("--trace", "cuda,nvtx", "--cuda-graph-trace", "node"),
        *("--capture-range", "nvtx", "--nvtx-capture", f"{capture}@{DOMAIN}"),
        *("--capture-range-end", "stop", "--kill", "none"),
        *("--sample", "none", "--cpuctxsw", "none"),
        *metrics,
        *("--output", str(report), "--force-overwrite", "true"),
        *PROGRAM,
        *with_ranges(sweep),
    ]


def export_command(nsys: Path, report: Path, target: Path) -> list[str]:
    """`nsys export` of a report to SQLite."""
    return [
        *(str(nsys), "export", "--type", "sqlite", "--force-overwrite", "true"),
        *("--output", str(target), str(report)),
    ]
