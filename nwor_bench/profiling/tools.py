"""Find Nsight's command-line tools, and refuse early what cannot work."""

import re
import shutil
import subprocess
from pathlib import Path

from nwor_bench.errors import ConfigError

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
            f"profile {name}: {tool} is version {found[0]}, and {oldest} or newer is needed"
        )
    return found[0]


def ask(tool: Path, *arguments: str) -> str:
    """What a tool prints. Raises ToolUnavailable if it cannot be run."""
    try:
        done = subprocess.run(
            [str(tool), *arguments], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolUnavailable(f"profile: {tool} cannot be run ({error})") from error
    return done.stdout + done.stderr
