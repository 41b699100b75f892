"""Nsight Systems (`nsys`) and Nsight Compute (`ncu`) around a sweep. Their own tools read reports.

`ncu` measures each chosen window as one range, with application-range replay: the sweep runs once
per counter pass, with an eager engine. Kernel replay would serialise the kernels of a window; range
replay within one run refuses `cuGraphLaunch`.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from nwor_bench.errors import ConfigError, ExitCode
from nwor_bench.instruments.nvtx_ranges import DOMAIN, NVTX_VARIABLE


@dataclass(frozen=True)
class Profiler:
    """One of the two command-line tools."""

    name: str
    product: str
    oldest: tuple[int, int]
    """Oldest version with the options used here."""
    reads: tuple[str, ...]
    """Command line that prints its report, without the report."""
    read_key: str
    """The report's key in JSON."""
    no_report: str
    """What to check if it ended without a report."""

    def report_file(self, report: Path) -> Path:
        """The report of a path without an ending; a dot in the path's name is kept."""
        return report.with_name(f"{report.name}.{self.name}-rep")


NCU = Profiler(
    "ncu", "Nsight Compute", (2023, 1),
    ("ncu", "--page", "raw", "--csv", "--print-units", "base", "--import"), "values",
    "Without permission for the counters run as root, or load the driver with "
    "NVreg_RestrictProfilingToAdminUsers=0",
)  # fmt: skip
NSYS = Profiler(
    "nsys", "Nsight Systems", (2023, 4),
    ("nsys", "stats", "--report", "nvtx_gpu_proj_sum"), "stats",
    f"If the sweep ended well, nothing was captured: Nsight Systems saw no range @{DOMAIN} of the "
    "kind in --capture; `nwor-bench doctor` says whether NVTX works here",
)  # fmt: skip

METRICS = (
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_sectors_op_read.sum",
    "lts__t_sectors_op_write.sum",
    "gpu__time_duration.sum",
)

EXTRA_PLACE = "/usr/local/cuda/bin"
"""The CUDA toolkit's folder, searched after PATH."""

PROGRAM = (sys.executable, "-c", "from nwor_bench.cli.app import main; main()")

_STDERR = 2
"""File descriptor of stderr, which a child process gets as stdout."""


class ToolUnavailable(ConfigError):
    """A profiler is missing or too old; the message names the remedy."""


def ncu_options(report: Path, windows: int, skip: int) -> list[str]:
    """Options of ncu for windows `skip` + 1 to `skip` + `windows` of a sweep.

    Raises ConfigError for numbers out of range.
    """
    for flag, value, least in (("--windows", windows, 1), ("--skip", skip, 0)):
        if value < least:
            raise ConfigError.for_field(flag, value, f"write {least} or more")
    return [
        *("--target-processes", "all", "--replay-mode", "app-range"),
        *("--nvtx", "--nvtx-include", f"{DOMAIN}@window/"),
        *("--range-filter", f"::{numbers_regex(skip + 1, skip + windows)}"),
        *("--cache-control", "none", "--clock-control", "none"),
        *("--metrics", ",".join(METRICS)),
        *("--export", str(report), "--force-overwrite"),
    ]


def nsys_options(report: Path, capture: str) -> list[str]:
    """Options of nsys; `capture` is the range whose first instance is captured."""
    return [
        "profile",
        *("--trace", "cuda,nvtx", "--cuda-graph-trace", "node"),
        *("--capture-range", "nvtx", "--nvtx-capture", f"{capture}@{DOMAIN}"),
        *("--capture-range-end", "stop", "--kill", "none"),
        *("--sample", "none", "--cpuctxsw", "none"),
        *("--output", str(report), "--force-overwrite", "true"),
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
        last_digit = str(digit) if digits == 1 else f"[{digit}-{digit + digits - 1}]"
        parts.append(f"{head or ''}{last_digit}{'[0-9]' * free}")
        first += digits * size
    return "|".join(parts)


def check_is_sweep(command: Sequence[str], refused: Sequence[str], remedy: str) -> None:
    """Raise ConfigError unless the command is a sweep without the refused options."""
    if not command or command[0] != "sweep":
        raise ConfigError.for_field(
            "profile",
            " ".join(command),
            "write `-- sweep` and its flags, e.g. `-- sweep --pair tiny`",
        )
    for name in refused:
        if any(part == name or part.startswith(f"{name}=") for part in command):
            raise ConfigError.for_field("profile", name, remedy)


def in_eager_mode(command: Sequence[str]) -> list[str]:
    """The sweep with an eager engine, which ncu's range replay needs.

    Raises ConfigError if its own --engine-args lack enforce_eager.
    """
    if not any(part.startswith("--engine-args") for part in command):
        return [*command, "--engine-args", '{"enforce_eager": true}']
    if "enforce_eager" not in " ".join(command):
        remedy = (
            'ncu measures an eager engine: add "enforce_eager": true to it; for windows under CUDA '
            "graphs use sweep --counters dram"
        )
        raise ConfigError.for_field("profile", "--engine-args", remedy)
    return list(command)


def without_ending(profiler: Profiler, report: Path) -> Path:
    """The path of --report without its ending, as the profilers take it.

    Raises ConfigError for a path that names no file.
    """
    name = report.name.removesuffix(f".{profiler.name}-rep")
    if name in ("", ".."):
        raise ConfigError.for_field("--report", str(report), "name a file, without its ending")
    return report.with_name(name)


def find_tool(profiler: Profiler) -> tuple[Path, str]:
    """Path and version of the tool.

    Raises ToolUnavailable if it is not installed, does not run or is too old.
    """
    name, product = profiler.name, profiler.product
    tool = shutil.which(name, path=f"{os.environ.get('PATH', '')}{os.pathsep}{EXTRA_PLACE}")
    if tool is None:
        raise ToolUnavailable.at(
            f"profile {name}: {product}",
            f"is not installed (no {name!r} in PATH); install it with the CUDA toolkit, or put its "
            "folder into PATH",
            joint=" ",
        )
    try:
        done = subprocess.run(
            [tool, "--version"], capture_output=True, text=True, errors="replace", timeout=60,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _unusable(profiler, tool, f"cannot be run ({error})", str(error)) from error
    answer = (done.stdout + done.stderr).strip()
    match = re.search(r"(\d{4})\.(\d+)[.\d]*", answer)
    if match is None:
        raise _unusable(profiler, tool, f"does not say its version ({answer[:80]!r})", answer)
    if (int(match[1]), int(match[2])) < profiler.oldest:
        oldest = ".".join(map(str, profiler.oldest))
        what = f"is version {match[0]}, and {oldest} or newer is needed"
        raise _unusable(profiler, tool, what, match[0])
    return Path(tool), match[0]


def _unusable(profiler: Profiler, tool: str, what: str, value: str) -> ToolUnavailable:
    remedy = f"{what}; install a newer {profiler.product}"
    return ToolUnavailable.at(f"profile {profiler.name}: {tool}", remedy, value, joint=" ")


def run_profile(
    profiler: Profiler, command: Sequence[str], report: Path, *, stdout_free: bool = False
) -> tuple[int, Path]:
    """Profile a sweep; returns the tool's exit code, which is the sweep's, and the report.

    Removes an earlier report first, which must not be taken for this run's. Without a report it
    raises KeyboardInterrupt after Ctrl-C, else ConfigError.
    """
    written = profiler.report_file(report)
    try:
        written.parent.mkdir(parents=True, exist_ok=True)
        written.unlink(missing_ok=True)
    except OSError as error:
        remedy = f"{error.strerror}: {error.filename}; name another place"
        raise ConfigError.for_field("--report", str(report), remedy) from error
    code = _run(command, stdout_free=stdout_free)
    if written.is_file():
        return code, written
    if code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    raise ConfigError.at(
        f"profile {profiler.name}",
        f"no report: it or the sweep in it ended with exit code {code}, and the messages above may "
        f"say why. {profiler.no_report}",
    )


def _run(command: Sequence[str], *, stdout_free: bool) -> int:
    """Run a tool on this terminal to its end; returns its exit code, or INTERRUPTED after Ctrl-C.

    What it prints goes to stderr if stdout must stay free.

    Ctrl-C also reaches the tool and its sweep, which take a while to save their results;
    `subprocess.run` would kill the tool and leave the sweep running. SIGTERM reaches only this
    process, so it is passed on to the tool as Ctrl-C.
    """
    print(shlex.join(command), file=sys.stderr, flush=True)
    process: subprocess.Popen[bytes] | None = None
    stops: list[int] = []

    def hand_on(number: int, _frame: FrameType | None) -> None:
        stops.append(number)
        if process is not None:
            process.send_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, hand_on)
    try:
        stdout = _STDERR if stdout_free else None
        process = subprocess.Popen(command, stdout=stdout, env={**os.environ, NVTX_VARIABLE: "1"})
        if stops:  # SIGTERM came before the tool had started
            process.send_signal(signal.SIGINT)
        while process.returncode is None:
            try:
                process.wait()
            except KeyboardInterrupt:
                stops.append(signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)
    return ExitCode.INTERRUPTED if stops else process.returncode
