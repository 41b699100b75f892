"""Checks of what this machine can measure: software, GPU, memory, profilers."""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import entry_points
from pathlib import Path

from nwor_bench.engine.memory import GIB, RUNTIME_BYTES
from nwor_bench.errors import BenchError, UnsupportedVllmError
from nwor_bench.instruments import environment
from nwor_bench.instruments.device import free_memory, is_cpu_build
from nwor_bench.instruments.environment import installed
from nwor_bench.instruments.nsight import NCU, NSYS, Profiler, ToolUnavailable, find_tool
from nwor_bench.instruments.versions import (
    REMEDY,
    require_supported_vllm,
    supported,
    untried_version,
    vllm_version,
)
from nwor_bench.records.facts import GpuFacts

PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN = "nwor_bench"

Gpus = Sequence[GpuFacts]
"""GPUs as listed by `environment.collect()`."""

DRIVER_PARAMETERS = Path("/proc/driver/nvidia/params")
PROCESS_STATUS = Path("/proc/self/status")
CAP_SYS_ADMIN = 21
"""Bit of the capability that the driver asks for (linux/capability.h)."""

PERMIT = (
    "run as root, start the container with --cap-add=SYS_ADMIN, or load the driver with "
    "NVreg_RestrictProfilingToAdminUsers=0"
)


class State(StrEnum):
    """Result of a check."""

    OK = "ok"
    MISSING = "missing"
    """Not installed or not present."""
    WRONG = "wrong"
    """Present, but not usable."""


@dataclass(frozen=True)
class Check:
    """One check, and what to do if it failed."""

    name: str
    state: State
    found: str
    """The finding, in words."""
    remedy: str = ""
    """Empty if nothing is to be done."""
    needed: bool = False
    """True if a sweep cannot run without it."""

    def __post_init__(self) -> None:
        if self.state is not State.OK and not self.remedy:
            raise ValueError(f"{self.name} is {self.state} and has no remedy")


def what_and_remedy(message: str) -> tuple[str, str]:
    """An error message split at its semicolon: what is wrong, and what to do ('' if not given)."""
    what, _, remedy = message.partition("; ")
    return what, remedy


def can_sweep(checks: Iterable[Check]) -> bool:
    """True if every check that a sweep needs is ok."""
    return all(check.state is State.OK for check in checks if check.needed)


def examine(check_hooks: Callable[[], Check] | None = None) -> list[Check]:
    """All checks; those that a sweep needs come first.

    Args:
        check_hooks: starts a tiny engine and tries the hooks on it; None skips this check.
    """
    facts = environment.collect()
    gpus = facts.gpus or ()
    checks = [
        check_vllm(),
        check_torch(bool(gpus)),
        check_plugin(),
        check_gpu(gpus, facts.gpu_note),
        check_memory(),
    ]
    if check_hooks is not None:
        if can_sweep(checks):
            checks.append(check_hooks())
        else:
            what = "not tried: an engine needs a check above that failed"
            checks.append(Check("hooks", State.MISSING, what, "see above", needed=True))
    return [*checks, check_counters(bool(gpus)), check_nsight(NCU), check_nsight(NSYS)]


def check_vllm() -> Check:
    """Whether a vLLM version that the plugin supports is installed."""
    try:
        found = require_supported_vllm()
    except UnsupportedVllmError:
        found = vllm_version() or ""
        state = State.WRONG if found else State.MISSING
        what = f"{found}, but the plugin supports {supported()}" if found else "not installed"
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
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        remedy = f"unset VLLM_PLUGINS, or add {PLUGIN} to it"
        return Check("plugin", State.WRONG, f"VLLM_PLUGINS={allowed} leaves it out", remedy)
    point = next(iter(points))
    try:
        point.load()
    except (ImportError, AttributeError, BenchError) as error:
        remedy = "install again: pip install --no-deps -e . in the checkout"
        return Check("plugin", State.WRONG, f"{point.value} does not load: {error}", remedy)
    return Check("plugin", State.OK, f"{point.value}, found by vLLM")


def check_gpu(gpus: Gpus, note: str | None) -> Check:
    """The GPUs; vLLM's CUDA build needs one, its CPU build does not."""
    if not gpus:
        if is_cpu_build():
            remedy = "run on a machine with an NVIDIA GPU: CPU timings say nothing about NWOR"
            return Check("GPU", State.MISSING, note or "none", remedy)
        remedy = "install the driver, start the container with --gpus all, or make venv DEVICE=cpu"
        return Check("GPU", State.MISSING, note or "none", remedy, needed=True)
    first = gpus[0]
    many = "" if len(gpus) == 1 else f"{len(gpus)} x "
    memory = first.memory_total_bytes
    size = "" if memory is None else f", {memory / GIB:.0f} GiB"
    what = (
        f"{many}{first.name}{size}, compute capability {first.compute_capability}, "
        f"driver {first.driver}"
    )
    if is_cpu_build():
        remedy = "install vLLM's CUDA build to use it: make clean venv DEVICE=cuda"
        return Check("GPU", State.WRONG, f"{what}; vLLM's CPU build does not use it", remedy)
    return Check("GPU", State.OK, what, needed=True)


def check_memory() -> Check:
    """Free memory for vLLM itself; weights and KV cache depend on the models."""
    free = free_memory()
    least = RUNTIME_BYTES[free.where]
    place = "GPU" if free.where == "gpu" else "host"
    what = (
        f"{free.num_bytes / GIB:.1f} GiB free on the {place}; vLLM itself takes about "
        f"{least / GIB:.1f}, plus weights and KV cache"
    )
    if free.num_bytes < least:
        remedy = "end other processes, or use a machine with more memory"
        return Check("memory", State.WRONG, what, remedy, needed=True)
    return Check("memory", State.OK, what, needed=True)


def check_counters(has_gpu: bool) -> Check:
    """Whether this user may read the GPU's hardware counters, and CUPTI is there to do so."""
    name = "counters"
    if not has_gpu:
        return Check(name, State.MISSING, "no GPU", "see GPU")
    try:
        restricted = "RmProfilingAdminOnly: 1" in DRIVER_PARAMETERS.read_text()
        status = PROCESS_STATUS.read_text()
    except OSError as error:
        what = f"the driver does not say who may read counters ({error.strerror})"
        return Check(name, State.MISSING, what, f"if a profiler is refused: {PERMIT}")
    if restricted and not _is_admin(status):
        return Check(name, State.WRONG, "for administrators only", PERMIT)
    if installed("cupti-python") is None:
        remedy = "pip install 'nwor-bench[counters]'; without it there is no --counters dram"
        return Check(name, State.MISSING, "the package cupti-python is not installed", remedy)
    who = "for administrators only, and this process is one" if restricted else "for every user"
    return Check(name, State.OK, f"{who}; cupti-python {installed('cupti-python')}")


def _is_admin(status: str) -> bool:
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> CAP_SYS_ADMIN & 1)


def check_nsight(profiler: Profiler) -> Check:
    """Whether `ncu` or `nsys` is installed, runs, and is new enough."""
    try:
        path, found = find_tool(profiler)
    except ToolUnavailable as error:
        what, remedy = what_and_remedy(re.sub(r"^profile[^:]*: ", "", str(error)))
        state = State.MISSING if "is not installed" in what else State.WRONG
        return Check(profiler.name, state, what, remedy)
    return Check(profiler.name, State.OK, f"{profiler.product} {found}, {path}")
