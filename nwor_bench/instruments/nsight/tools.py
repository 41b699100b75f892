"""Nsight's command-line tools: find them, and run them around a sweep."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from nwor_bench.errors import ConfigError, ExitCode
from nwor_bench.instruments.nvtx_ranges import SWITCH

OLDEST = {"ncu": (2023, 1), "nsys": (2023, 4)}
"""Oldest versions with the options used here."""

PRODUCT = {"ncu": "Nsight Compute", "nsys": "Nsight Systems"}

PLACES = {
    "ncu": ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu"),
    "nsys": ("/usr/local/cuda/bin/nsys", "/opt/nvidia/nsight-systems/*/bin/nsys"),
}
"""Other places: those of NVIDIA's packages."""

ROOT = "/"

PROGRAM = (sys.executable, "-c", "from nwor_bench.cli.app import main; main()")


class ToolUnavailable(ConfigError):
    """A profiler is missing or too old; the message names the remedy."""


def find_tool(name: str) -> Path:
    """Path of `ncu` or `nsys`, in PATH or in a folder of NVIDIA's packages.

    Raises ToolUnavailable if it is not installed.
    """
    found = shutil.which(name)
    if found is not None:
        return Path(found)
    for pattern in PLACES[name]:
        installed = list(Path(ROOT).glob(pattern.lstrip("/")))
        if installed:
            return max(installed, key=_version_in)
    raise ToolUnavailable.at(
        f"profile {name}: {PRODUCT[name]}",
        f"is not installed (no {name!r} in PATH); install it with the CUDA toolkit, or put its "
        "folder into PATH",
        joint=" ",
    )


def _version_in(path: Path) -> list[int]:
    """The numbers in a path: 2025.10 is newer than 2025.9."""
    return [int(digits) for digits in re.findall(r"\d+", str(path.relative_to(ROOT)))]


def check_version(name: str, tool: Path) -> str:
    """The tool's version. Raises ToolUnavailable if it does not run or is too old."""
    answer = output_of(tool, "--version")
    found = re.search(r"(\d{4})\.(\d+)[.\d]*", answer)
    if found is None:
        raise ToolUnavailable.at(
            f"profile {name}: {tool}",
            f"does not say its version ({answer.strip()[:80]!r}); reinstall {PRODUCT[name]}",
            answer.strip(),
            joint=" ",
        )
    if (int(found[1]), int(found[2])) < OLDEST[name]:
        oldest = ".".join(map(str, OLDEST[name]))
        raise ToolUnavailable.at(
            f"profile {name}: {tool}",
            f"is version {found[0]}, and {oldest} or newer is needed; install a newer "
            f"{PRODUCT[name]}",
            found[0],
            joint=" ",
        )
    return found[0]


def output_of(tool: Path, *arguments: str) -> str:
    """Output of the tool with these arguments. Raises ToolUnavailable if it cannot be run."""
    command = [str(tool), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _cannot_run(tool, error) from error
    return done.stdout + done.stderr


_STDERR = 2
"""Its file descriptor, which a child process gets as stdout."""


def run_tool(command: Sequence[str], *, stdout_free: bool = False) -> int:
    """Run a tool on this terminal to its end; returns its exit code, or INTERRUPTED after Ctrl-C.

    What it prints goes to stderr if stdout must stay free.

    Ctrl-C also reaches the tool and its sweep, which take a while to save their results;
    `subprocess.run` would kill the tool and leave the sweep running. SIGTERM reaches only this
    process, so it is passed on to the tool as Ctrl-C.

    Raises ToolUnavailable if it cannot be run.
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
        process = subprocess.Popen(command, stdout=stdout, env={**os.environ, SWITCH: "1"})
        if stops:  # SIGTERM came before the tool had started
            process.send_signal(signal.SIGINT)
        while process.returncode is None:
            try:
                process.wait()
            except KeyboardInterrupt:
                stops.append(signal.SIGINT)
    except OSError as error:
        raise _cannot_run(Path(command[0]), error) from error
    finally:
        signal.signal(signal.SIGTERM, before)
    return ExitCode.INTERRUPTED if stops else process.returncode


def _cannot_run(tool: Path, error: Exception) -> ToolUnavailable:
    product = PRODUCT.get(tool.name, tool.name)
    return ToolUnavailable.at(
        f"profile {tool.name}: {tool}", f"cannot be run ({error}); reinstall {product}", joint=" "
    )


def without_ending(report: Path, suffix: str) -> Path:
    """The path of --report without its ending, as the profilers take it.

    Raises ConfigError for a path that names no file.
    """
    name = report.name.removesuffix(suffix)
    if name in ("", ".."):
        raise ConfigError.for_field("--report", str(report), "name a file, without its ending")
    return report.with_name(name)


def ending(report: Path, suffix: str) -> Path:
    """The report's path with an ending; a dot in the report's name is kept."""
    return report.with_name(report.name + suffix)


def make_room(*files: Path) -> None:
    """Make the report's folder, and remove earlier files, which must not be taken for the new ones.

    Raises ConfigError if that fails.
    """
    try:
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError.for_field(
            "--report", str(files[0].with_suffix("")), f"{error.strerror}: {error.filename}; name "
            "another place"
        ) from error  # fmt: skip


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
