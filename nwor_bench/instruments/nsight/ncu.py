"""Nsight Compute around a sweep: its command line, and its report window by window.

Each chosen window is measured as one range, with application-range replay: the sweep runs once per
counter pass, with an eager engine. Kernel replay would serialise the kernels of a window; range
replay within one run refuses `cuGraphLaunch`.

The module `ncu_report` comes with the tool and reads reports of its own version and of older ones.
`load_module` looks for it in PYTHONPATH, then in the tool's package, then in the newest installed
package: `ncu` is often a script in /usr/local/cuda/bin that starts a tool in another folder.

If SciPy or PyTorch was loaded before the module, reading a report ends the process (std::bad_cast;
seen with 2024.1's module). Read reports in a process of their own, as `nwor-bench profile ncu`
does.
"""

import csv
import importlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from nwor_bench.errors import ConfigError, ExitCode
from nwor_bench.instruments.nsight import tools
from nwor_bench.instruments.nsight.tools import (
    PROGRAM,
    check_is_sweep,
    ending,
    make_room,
    run_tool,
)
from nwor_bench.instruments.nvtx_ranges import DOMAIN
from nwor_bench.records.run_folder import RUN_FILE, RUNS
from nwor_bench.records.store import RunData
from nwor_bench.records.types import Phase

METRICS = {
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "l2_read_sectors": "lts__t_sectors_op_read.sum",
    "l2_write_sectors": "lts__t_sectors_op_write.sum",
    "gpu_ns": "gpu__time_duration.sum",
}
"""Column names, and NVIDIA's names of their metrics."""

REPORT, TABLE = ".ncu-rep", ".windows.csv"
"""Endings of a report, and of the table made from it."""


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
        *("--metrics", ",".join(METRICS.values())),
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


def run_profile(
    command: Sequence[str], report: Path, *, stdout_free: bool = False
) -> tuple[Path, Path | None]:
    """Profile a sweep; returns its report, and the folder of its last run if it made one.

    Removes an earlier report first. Raises KeyboardInterrupt after Ctrl-C, ConfigError if there is
    no report.
    """
    written, earlier = ending(report, REPORT), run_folders()
    make_room(written, ending(report, TABLE))
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
    return written, max(run_folders() - earlier, default=None)  # names begin with the time


def run_folders() -> set[Path]:
    """Run folders in the default place of a sweep without --output."""
    return {path.parent for path in RUNS.glob(f"*/{RUN_FILE}")}


MODULE = "ncu_report"

PACKAGES = (
    "opt/nvidia/nsight-compute/*",
    "usr/local/cuda/nsight-compute-*",
    "usr/local/cuda-*/nsight-compute-*",
    "usr/lib/nsight-compute",
)
"""Other places: Nsight Compute by itself, in any toolkit, and Debian's package."""

BYTE_UNITS = {"byte": 1, "Kbyte": 10**3, "Mbyte": 10**6, "Gbyte": 10**9, "Tbyte": 10**12}
TIME_UNITS = {
    **{"ns": 1, "nsecond": 1, "us": 10**3, "usecond": 10**3, "ms": 10**6, "msecond": 10**6},
    **{"s": 10**9, "second": 10**9},
}
SECONDS = ("s", "second")
PLAIN_UNITS = {"": 1, "sector": 1}
UNITS = {
    "dram_read_bytes": BYTE_UNITS,
    "dram_write_bytes": BYTE_UNITS,
    "l2_read_sectors": PLAIN_UNITS,
    "l2_write_sectors": PLAIN_UNITS,
    "gpu_ns": TIME_UNITS,
}
"""Names of each column's possible units, and their size in the column's own unit."""

LONGEST_WINDOW_S = 1000
"""Longer than any window. 2024.1's module names the ns of a report of 2025.3 "second"."""


@dataclass(frozen=True)
class NcuWindow:
    """One measured window.

    Attributes:
        place: number in the report, from 1.
        cell: label such as `stage x graph`; None if unknown.
        batch, window: numbers as in batches.csv and windows.csv, from the NVTX ranges' payloads;
            None if the report lacks them.
        values: counts by column; None for a counter that the report lacks.
    """

    place: int
    cell: str | None
    batch: int | None
    window: int | None
    values: dict[str, float | None]

    def row(self) -> dict[str, Any]:
        """The values as one flat row."""
        which = {"place": self.place, "cell": self.cell, "batch": self.batch}
        return {**which, "window": self.window, **self.values}


def read_report(path: Path, module: Any, cells: Mapping[int, str]) -> list[NcuWindow]:
    """The windows of a report, in the order in which they ran.

    Args:
        path: the .ncu-rep file.
        module: NVIDIA's `ncu_report`.
        cells: each batch's cell, by batch number (see `cells_of`); empty without a run folder.

    Raises ConfigError for a report that cannot be read, is empty, or has an unknown unit.
    """
    try:
        report = module.load_report(str(path))
    except Exception as error:  # the module's own error types
        raise ConfigError.at(
            f"profile ncu: {path}",
            f"is no report that ncu_report can read ({error}); put the "
            "extras/python of the Nsight Compute that wrote it into PYTHONPATH",
            joint=" ",
        ) from error
    results = [action for number in range(len(report)) for action in report[number]]
    if not results:
        raise ConfigError.at(
            f"profile ncu: {path}",
            "holds no window; write a smaller --skip, or more --batches",
            joint=" ",
        )
    windows = []
    for place, action in enumerate(results, start=1):
        batch, window = _payload(action, "batch"), _payload(action, "window")
        cell = None if batch is None else cells.get(batch)
        values = {name: _value(path, action, name) for name in METRICS}
        windows.append(NcuWindow(place, cell, batch, window, values))
    return windows


def _value(path: Path, action: Any, name: str) -> float | None:
    """A metric in the column's unit; None if the report lacks it."""
    metric = action.metric_by_name(METRICS[name])
    if metric is None or metric.value() is None:
        return None
    unit = str(metric.unit())
    if unit not in UNITS[name]:
        known = ", ".join(repr(one) for one in UNITS[name])
        raise ConfigError.at(
            f"profile ncu: {path}: {METRICS[name]}",
            f"is in {unit!r}, and only {known} are known",
            unit,
            joint=" ",
        )
    value, scale = float(metric.value()), UNITS[name][unit]
    if UNITS[name] is TIME_UNITS and unit in SECONDS and value >= LONGEST_WINDOW_S:
        scale = TIME_UNITS["ns"]
    return value * scale


def _payload(action: Any, name: str) -> int | None:
    """Payload of our range `name` around a result; None if there is none."""
    state = action.nvtx_state()
    if state is None:
        return None
    for number in state:
        domain = state.domain_by_id(number)
        if domain is None or domain.name() != DOMAIN:
            continue
        for depth in range(len(domain.push_pop_ranges())):
            found = domain.push_pop_range(depth)
            if name in (found.name(), found.message()) and found.has_attributes():
                return int(found.payload_as_uint64())
    return None


def cells_of(run: RunData) -> dict[int, str]:
    """Cell label of each batch (such as `stage x graph`), by its number in batches.csv."""
    return {b.batch: b.cell.label for b in run.batches}


def warmup_warning(windows: Sequence[NcuWindow], run: RunData) -> str | None:
    """A warning if some measured windows ran before the first timed batch; else None."""
    first = min((batch.batch for batch in run.batches if batch.phase == Phase.TIMED), default=0)
    early = [window for window in windows if window.batch is not None and window.batch < first]
    if not early:
        return None
    before = sum(batch.windows for batch in run.batches if batch.batch < first)
    return (
        f"{len(early)} of {len(windows)} windows belong to warm-up and gate. To leave them out use "
        f"--skip {before}, with --warmup equal to --max-warmup so that warm-up has the same length"
    )


def write_table(path: Path, windows: Sequence[NcuWindow]) -> None:
    """Write the windows as CSV; None becomes an empty field.

    Raises ConfigError if the file cannot be written.
    """
    rows = [window.row() for window in windows]
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise ConfigError.at(
            f"profile: {path}",
            f"cannot be written ({error.strerror}); copy the report to a writable "
            "folder, and --read it there",
            joint=" ",
        ) from error


def load_module(ncu: Path | None) -> ModuleType:
    """`ncu_report` from PYTHONPATH, or from the package of the tool `ncu` (None: no tool).

    Raises ConfigError if none loads.
    """
    try:
        return importlib.import_module(MODULE)
    except ImportError as error:
        failures = [str(error)]
    for folder in module_folders(ncu):
        sys.path.insert(0, str(folder))
        try:
            return importlib.import_module(MODULE)
        except ImportError as error:
            failures.append(f"{folder}: {error}")
        finally:
            sys.path.remove(str(folder))
    raise ConfigError.at(
        f"profile ncu: the module {MODULE}",
        f"does not load ({'; '.join(failures)}); it is in "
        "extras/python of Nsight Compute: put that folder into PYTHONPATH",
        joint=" ",
    )


def module_folders(ncu: Path | None) -> list[Path]:
    """Folders with the module: the tool's own package, then installed ones, newest first."""
    packages = [folder for pattern in PACKAGES for folder in Path(tools.ROOT).glob(pattern)]
    packages.sort(key=_numbers, reverse=True)
    if ncu is not None:  # `ncu` itself, or target/linux-...-x64/ncu
        tool = ncu.resolve().parent
        packages = [tool, tool.parent.parent, *packages]
    folders = dict.fromkeys(each.resolve() / "extras" / "python" for each in packages)
    return [folder for folder in folders if (folder / f"{MODULE}.py").is_file()]


def _numbers(folder: Path) -> list[int]:
    """The numbers in a folder's name, so that 2025.10.0 is newer than 2025.9.1."""
    return [int(digits) for digits in re.findall(r"\d+", folder.name)]
