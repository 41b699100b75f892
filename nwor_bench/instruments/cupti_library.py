"""Make cupti-python use its own CUPTI instead of PyTorch's older one.

Both libraries are called libcupti.so.13, a process loads only one of them, and importing PyTorch
loads PyTorch's. The dynamic linker reads LD_LIBRARY_PATH only when a process starts, so the command
line restarts itself once with the newer library in front.
"""

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

DONE = "NWOR_BENCH_CUPTI"
"""Set in the restarted process, so that it restarts once. Set it yourself to choose another CUPTI
through LD_LIBRARY_PATH."""

FOLDERS = ("nvidia/cu13/lib", "nvidia/cuda_cupti/lib")
"""Folders of libcupti in NVIDIA's packages, relative to site-packages."""


def cupti_folder() -> Path | None:
    """Folder of the libcupti that was installed with cupti-python; None if there is none."""
    spec = find_spec("cupti")
    if spec is None or spec.origin is None:
        return None
    site = Path(spec.origin).parent.parent
    folders = [site / name for name in FOLDERS]
    return next((folder for folder in folders if any(folder.glob("libcupti.so*"))), None)


def cupti_environment(environ: Mapping[str, str], folder: Path | None) -> dict[str, str] | None:
    """The environment for a restart; None if no restart is needed."""
    before = environ.get("LD_LIBRARY_PATH", "")
    if folder is None or DONE in environ or str(folder) in before.split(":"):
        return None
    both = ":".join(filter(None, [str(folder), before]))
    return {**environ, "LD_LIBRARY_PATH": both, DONE: "1"}


def run_under_own_cupti() -> None:
    """Restart this process with cupti-python's library in front, if needed."""
    environ = cupti_environment(os.environ, cupti_folder())
    if environ is not None:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)


def loaded_cupti() -> str | None:
    """Path of the libcupti loaded in this process (Linux); None if there is none."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = (line.split()[-1] for line in lines if "libcupti.so" in line)
    return next(paths, None)
