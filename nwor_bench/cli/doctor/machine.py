"""Checks of GPU, driver, clocks and memory."""

from collections.abc import Sequence

from nwor_bench.cli.doctor.check import Check, State
from nwor_bench.cli.doctor.software import is_cpu_build
from nwor_bench.engine.memory import GIB, RUNTIME_BYTES
from nwor_bench.instruments.conditions import throttle_names
from nwor_bench.instruments.device import free_memory
from nwor_bench.records.environment import GpuFacts

Gpus = Sequence[GpuFacts]
"""GPUs as listed by `environment.collect()`."""


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
    what = f"{many}{first.name}{size}, compute capability {first.compute_capability}"
    if is_cpu_build():
        remedy = "install vLLM's CUDA build to use it: make clean venv DEVICE=cuda"
        return Check("GPU", State.WRONG, f"{what}; vLLM's CPU build does not use it", remedy)
    return Check("GPU", State.OK, what, needed=True)


def check_driver(gpus: Gpus) -> Check:
    """The driver's version; PyTorch's check shows which CUDA it supports."""
    if not gpus:
        return Check("driver", State.MISSING, "no GPU to drive", "see GPU")
    return Check("driver", State.OK, str(gpus[0].driver))


def check_clocks(gpus: Gpus, governor: str | None) -> Check:
    """Whether the GPU's clocks are throttled; without a GPU the CPU governor."""
    if not gpus:
        return _check_governor(governor)
    first = gpus[0]
    if first.sm_clock_mhz is None:
        remedy = "nothing to do; reports will show no clocks"
        return Check("clocks", State.MISSING, "this GPU does not report its clocks", remedy)
    what = f"SM {first.sm_clock_mhz} of {first.sm_clock_max_mhz} MHz"
    held = sorted({name for gpu in gpus for name in throttle_names(gpu.throttle_reasons)})
    if held:
        remedy = "let it cool or raise its power limit; timings are slow and noisy until then"
        return Check("clocks", State.WRONG, f"{what}, throttled: {', '.join(held)}", remedy)
    return Check("clocks", State.OK, f"{what}, not throttled")


def _check_governor(governor: str | None) -> Check:
    if governor is None:
        what = "the machine does not report its CPU governor (often a virtual machine)"
        return Check("clocks", State.MISSING, what, "nothing to do; add blocks if times are noisy")
    if governor != "performance":
        remedy = "cpupower frequency-set -g performance (root)"
        return Check("clocks", State.WRONG, f"CPU governor {governor}", remedy)
    return Check("clocks", State.OK, "CPU governor performance")


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
