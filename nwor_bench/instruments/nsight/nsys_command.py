"""The command lines of Nsight Systems around a sweep, and of its export to SQLite."""

from collections.abc import Sequence
from pathlib import Path

from nwor_bench.errors import ConfigError
from nwor_bench.instruments.nsight.ncu_command import PROGRAM, check_is_sweep, with_ranges
from nwor_bench.instruments.nvtx_ranges import DOMAIN

METRICS_NOW = ("--gpu-metrics-devices", "cuda-visible")
METRICS_ONCE = ("--gpu-metrics-device", "all")
"""How the GPU's metrics are asked for: in newer versions, and in older ones (seen: 2023.4)."""


def nsys_command(
    nsys: Path, sweep: Sequence[str], report: Path, capture: str, metrics: Sequence[str] = ()
) -> list[str]:
    """`nsys profile ... python ... sweep ...`, capturing one range of the sweep.

    Args:
        nsys: the tool.
        sweep: what follows `nwor-bench`, "sweep" first.
        report: the report's path without its ending.
        capture: the range whose first instance is captured: sweep, block, cell or batch.
        metrics: options that sample the GPU's metrics too (see `metrics_options`).

    Raises ConfigError for what is no sweep, or none of which a range is sure to come.
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
        *metrics,
        *("--output", str(report), "--force-overwrite", "true"),
        *PROGRAM,
        *with_ranges(sweep),
    ]


def metrics_options(help_text: str) -> tuple[str, str]:
    """How the version with this `nsys profile --help` is asked for metrics of all GPUs in use."""
    return METRICS_NOW if METRICS_NOW[0] in help_text else METRICS_ONCE


def export_command(nsys: Path, report: Path, target: Path) -> list[str]:
    """`nsys export` of a report to SQLite."""
    return [
        *(str(nsys), "export", "--type", "sqlite", "--force-overwrite", "true", "--quiet", "true"),
        *("--output", str(target), str(report)),
    ]
