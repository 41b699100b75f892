"""Let cupti-python find the CUPTI that it was built for, not PyTorch's older one.

Both libraries are called libcupti.so.13, and the one that is loaded first serves everybody:
PyTorch loads its own when it is imported. The dynamic linker reads LD_LIBRARY_PATH only when a
process starts, so the command line replaces itself once, with the newer library in front.
"""

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

DONE = "NWOR_BENCH_CUPTI"
"""Set in the replaced process, so that it happens once. Set it yourself to choose another CUPTI
through LD_LIBRARY_PATH."""

FOLDERS = ("nvidia/cu13/lib", "nvidia/cuda_cupti/lib")
"""Where NVIDIA's packages put libcupti, beside the package `cupti`."""


def cupti_folder() -> Path | None:
    """The folder of the libcupti that was installed with cupti-python; None without one."""
    spec = find_spec("cupti")
    if spec is None or spec.origin is None:
        return None
    site = Path(spec.origin).parent.parent
    folders = [site / name for name in FOLDERS]
    return next((folder for folder in folders if any(folder.glob("libcupti.so*"))), None)


def cupti_environment(environ: Mapping[str, str], folder: Path | None) -> dict[str, str] | None:
    """The environment to start again with, or None if this process may go on as it is."""
    before = environ.get("LD_LIBRARY_PATH", "")
    if folder is None or DONE in environ or str(folder) in before.split(":"):
        return None
    both = ":".join(filter(None, [str(folder), before]))
    return {**environ, "LD_LIBRARY_PATH": both, DONE: "1"}


def run_under_own_cupti() -> None:
    """Replace this process by itself with cupti-python's library in front, where needed."""
    environ = cupti_environment(os.environ, cupti_folder())
    if environ is not None:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)


def loaded_cupti() -> str | None:
    """Path of the libcupti in this process (Linux); None if there is none."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = (line.split()[-1] for line in lines if "libcupti.so" in line)
    return next(paths, None)
