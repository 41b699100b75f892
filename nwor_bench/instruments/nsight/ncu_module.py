"""NVIDIA's module `ncu_report`, found beside the tool that it came with.

PYTHONPATH goes first. Else it is looked for in the package that the tool belongs to: `ncu` is often
a script in /usr/local/cuda/bin that starts the one in another folder. Where SciPy or PyTorch was
loaded before it, reading a report ends the process (std::bad_cast; seen with 2024.1's module): read
in a process of its own, as `nwor-bench profile ncu` does.
"""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from nwor_bench.errors import ConfigError
from nwor_bench.instruments.nsight import tools

MODULE = "ncu_report"

BESIDE = "nsight-compute-*"
"""Packages beside the toolkit's bin."""

PACKAGES = (
    "opt/nvidia/nsight-compute/*",
    f"usr/local/cuda/{BESIDE}",
    f"usr/local/cuda-*/{BESIDE}",
    "usr/lib/nsight-compute",
)
"""Where they lie else: by themselves, in any toolkit, and Debian's."""


def load_module(ncu: Path | None) -> ModuleType:
    """`ncu_report` from PYTHONPATH, or from the package that `ncu` (None: no tool) belongs to.

    Raises ConfigError with the remedy if none loads.
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
    raise ConfigError(
        f"profile ncu: the module {MODULE} does not load ({'; '.join(failures)}); it is in "
        "extras/python of Nsight Compute: put that folder into PYTHONPATH"
    )


def module_folders(ncu: Path | None) -> list[Path]:
    """Folders that hold the module: of the tool's own package, of its version, the newest."""
    folders = dict.fromkeys(package / "extras" / "python" for package in _packages(ncu))
    return [folder for folder in folders if (folder / f"{MODULE}.py").is_file()]


def _packages(ncu: Path | None) -> Iterator[Path]:
    found = [folder for pattern in PACKAGES for folder in Path(tools.ROOT).glob(pattern)]
    version = None
    if ncu is not None:
        tool = ncu.resolve().parent
        yield from (tool, tool.parent.parent)  # `ncu` itself, and target/linux-...-x64/ncu
        found += tool.parent.glob(BESIDE)
        version = _version_of(ncu)
    found.sort(key=lambda folder: (_numbers(folder) == version, _numbers(folder)), reverse=True)
    yield from (folder.resolve() for folder in found)


def _version_of(ncu: Path) -> list[int] | None:
    """2025.3.1 of "Version 2025.3.1.0 (build ...)", as the package's folder is called."""
    found = re.search(r"(\d{4})\.(\d+)\.(\d+)", tools.ask(ncu, "--version"))
    return None if found is None else [int(number) for number in found.groups()]


def _numbers(folder: Path) -> list[int]:
    """The numbers in a folder's own name: 2025.10.0 is newer than 2025.9.1."""
    return [int(digits) for digits in re.findall(r"\d+", folder.name)]
