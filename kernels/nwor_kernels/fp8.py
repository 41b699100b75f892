"""Quantisation to fp8 (e4m3) as vLLM's fp8 KV caches have it: value / scale, saturated, rounded."""

import torch
from torch import Tensor

E4M3_MAX = 448.0
"""Largest finite e4m3fn number; larger values saturate to it, NaN stays NaN."""

E4M3_CACHE_DTYPES = (torch.uint8, torch.float8_e4m3fn)
"""Dtypes that an fp8 KV cache's tensor has: vLLM allocates bytes and views them as e4m3fn."""


def quantize_e4m3(rows: Tensor, scale: Tensor) -> Tensor:
    """Rows of K or V as an fp8 cache stores them.

    A division, not a multiplication by the reciprocal, and round to nearest even: bit for bit as
    vLLM's `reshape_and_cache_flash`.

    Args:
        rows: [num_rows, kv_heads, head_dim], any float dtype.
        scale: float32, [1] or one a head, [kv_heads].

    Returns:
        [num_rows, kv_heads, head_dim] float8_e4m3fn.
    """
    quotient = rows.float() / scale.reshape(1, -1, 1)
    return quotient.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
