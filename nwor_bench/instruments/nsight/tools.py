"""Find Nsight's command-line tools, refuse early what cannot work, and run them."""

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

OLDEST = {"ncu": (2023, 1), "nsys": (2023, 4)}
"""Oldest versions that know the options that are used here."""

PRODUCT = {"ncu": "Nsight Compute", "nsys": "Nsight Systems"}

PLACES = {
    "ncu": ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu"),
    "nsys": ("/usr/local/cuda/bin/nsys", "/opt/nvidia/nsight-systems/*/bin/nsys"),
}
"""Where NVIDIA's packages put them, if they are not in PATH."""

ROOT = "/"


class ToolUnavailable(ConfigError):
    """A profiler is missing or too old: the message says what to install."""


def find_tool(name: str) -> Path:
    """Path of `ncu` or `nsys`. Raises ToolUnavailable with the remedy if there is none."""
    found = look_for_tool(name)
    if found is None:
        raise ToolUnavailable(
            f"profile {name}: {PRODUCT[name]} is not installed (no {name!r} in PATH); install it "
            "with the CUDA toolkit, or put its folder into PATH"
        )
    return found


def look_for_tool(name: str) -> Path | None:
    """Path of `ncu` or `nsys`: in PATH, or where NVIDIA's packages put it; else None."""
    found = shutil.which(name)
    if found is not None:
        return Path(found)
    for pattern in PLACES[name]:
        installed = list(Path(ROOT).glob(pattern.lstrip("/")))
        if installed:
            return max(installed, key=_version_in)
    return None


def _version_in(path: Path) -> list[int]:
    """The numbers in a path: 2025.10 is newer than 2025.9."""
    return [int(digits) for digits in re.findall(r"\d+", str(path.relative_to(ROOT)))]


def check_version(name: str, tool: Path) -> str:
    """The tool's version. Raises ToolUnavailable if it does not run or is too old."""
    answer = ask(tool, "--version")
    found = re.search(r"(\d{4})\.(\d+)[.\d]*", answer)
    if found is None:
        raise ToolUnavailable(
            f"profile {name}: {tool} does not say its version ({answer.strip()[:80]!r}); "
            f"install {PRODUCT[name]} anew"
        )
    if (int(found[1]), int(found[2])) < OLDEST[name]:
        oldest = ".".join(map(str, OLDEST[name]))
        raise ToolUnavailable(
            f"profile {name}: {tool} is version {found[0]}, and {oldest} or newer is needed; "
            f"install a newer {PRODUCT[name]}"
        )
    return found[0]


def ask(tool: Path, *arguments: str) -> str:
    """What a tool prints. Raises ToolUnavailable if it cannot be run."""
    command = [str(tool), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _cannot_run(tool, error) from error
    return done.stdout + done.stderr


def run_tool(command: Sequence[str]) -> int:
    """Run a tool on this terminal to its end; its exit code, or INTERRUPTED after Ctrl-C.

    Ctrl-C reaches the tool and the sweep in it too. Both keep what they have, which takes a while:
    `subprocess.run` would kill the tool meanwhile and leave its sweep running. SIGTERM reaches this
    process alone, and is handed on to the tool as Ctrl-C.

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
        process = subprocess.Popen(command)
        if stops:  # before there was anybody to hand it to
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
    return ToolUnavailable(
        f"profile {tool.name}: {tool} cannot be run ({error}); install {product} anew"
    )
