"""Peers: vLLM's cache write, FlashAttention 3 and a plain copy, as bound calls.

Views are made beforehand, so that only the peer's own kernels are timed. This is the only module of
the microbenchmarks that imports vLLM.
"""

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nwor_bench.microbench.cases import COPY
from nwor_bench.microbench.inputs import count_sets
from nwor_bench.microbench.rows import Call, Implementation, RefusedError


def bind_stock_write(
    key: Tensor, value: Tensor, cache: Tensor, slots: Tensor, scale: Tensor
) -> Call:
    """`reshape_and_cache_flash` (CUDA), as vLLM's FlashAttention backend calls it, for one layer.

    Args:
        key, value: [tokens, kv_heads, head_dim].
        cache: [blocks, kv_heads, block_size, 2 * head_dim]; uint8 holds fp8.
        slots: [tokens] int64.
        scale: [1] float32, of both K and V; used for fp8 caches.

    Raises RefusedError if vLLM or its CUDA kernels are not installed.
    """
    write, kind = _stock_write(), "fp8" if cache.dtype == torch.uint8 else "auto"
    to = torch.split(cache.transpose(1, 2), key.shape[-1], dim=-1)
    return lambda: write(key, value, *to, slots, kind, scale, scale)


@cache
def _stock_write() -> Callable[..., None]:
    """vLLM's write, without importing vLLM. A CPU build has no such library."""
    found = importlib.util.find_spec("vllm")
    if found is None:
        raise RefusedError("vLLM is not installed")
    for folder in found.submodule_search_locations or []:
        for library in sorted(Path(folder).glob("_C_stable_libtorch*.so")):
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    try:
        return torch.ops._C_cache_ops.reshape_and_cache_flash.default
    except AttributeError as error:
        raise RefusedError("this vLLM was built without CUDA kernels") from error


@cache
def flash_attention() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """vLLM's `flash_attn_varlen_func` and `get_scheduler_metadata`."""
    try:
        from vllm.vllm_flash_attn.flash_attn_interface import (
            flash_attn_varlen_func,
            get_scheduler_metadata,
        )
    except ImportError as error:
        raise RefusedError(f"vLLM's FlashAttention does not import: {error}") from error
    return flash_attn_varlen_func, get_scheduler_metadata


MOST_COPIED = 256 << 20
"""Most bytes in one copy. On an H200 graph copies of 513 MiB and more reached 2.77 TB/s instead of
4.2; eager copies did not slow down."""


def make_copy(bytes_moved: int, sets: int, device: torch.device) -> Implementation:
    """A plain copy, with one call per set of buffers or more.

    Args:
        bytes_moved: bytes that it reads and writes together, half of them each.
    """
    size = max(1, bytes_moved // 2)
    sets = max(sets, count_sets(bytes_moved))
    pairs = [
        (
            torch.randint(256, (size,), dtype=torch.uint8, device=device),
            torch.zeros(size, dtype=torch.uint8, device=device),
        )
        for _ in range(sets)
    ]

    calls = [_copying(*pair) for pair in pairs]

    def check() -> str:
        source, target = pairs[0]
        target.copy_(~source)
        calls[0]()
        return "" if torch.equal(source, target) else "the copy differs from its source"

    parts = -(-size // MOST_COPIED)
    return Implementation(COPY, parts, 2 * size, calls, check)


def _copying(source: Tensor, target: Tensor) -> Call:
    """A copy, in parts of at most MOST_COPIED bytes."""
    if source.numel() <= MOST_COPIED:
        return lambda: target.copy_(source)
    parts = list(
        zip(torch.split(target, MOST_COPIED), torch.split(source, MOST_COPIED), strict=True)
    )

    def copy_parts() -> None:
        for to, part in parts:
            to.copy_(part)

    return copy_parts
