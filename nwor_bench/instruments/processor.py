"""Which data type this machine's processor computes fast: asked where no GPU decides."""

import os
from collections.abc import Mapping
from pathlib import Path

from nwor_bench.instruments.device_memory import uses_gpu

CPU_INFO = Path("/proc/cpuinfo")

_BF16_FLAGS = frozenset(("avx512_bf16", "amx_bf16", "bf16"))
"""Any of these multiplies bf16 natively; the last is Arm's."""

_ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Cap oneDNN's instruction set: how a lesser processor is simulated."""

_ISAS_WITHOUT_BF16 = frozenset(
    ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
)
"""oneDNN's names for instruction sets on which it emulates bf16 products."""


def no_native_bf16(cpu_info: str, environ: Mapping[str, str]) -> str | None:
    """Why bf16 is slow on this processor; None where it is native.

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
    """Why a pair of this dtype runs in float32 here; None where its own dtype stays."""
    if pair_dtype not in ("auto", "bfloat16") or uses_gpu():
        return None
    reason = _no_native_bf16_here()
    return None if reason is None else f"dtype float32: {reason}; --dtype overrides"


def bf16_is_slow() -> bool:
    """True if this machine's processor has no native bf16."""
    return _no_native_bf16_here() is not None


def _no_native_bf16_here() -> str | None:
    try:
        cpu_info = CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None  # nothing is known of this processor
    return no_native_bf16(cpu_info, os.environ)
