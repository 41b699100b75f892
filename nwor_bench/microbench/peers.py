"""Peers: other cache writes, FlashAttention 3, an empty kernel and a plain copy, as bound calls.

Views, index tensors and int32 copies are made beforehand, so that only the peer's own kernels are
timed. This is the only module of the microbenchmarks that imports vLLM.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from nwor_bench.microbench.cases import COPY, EMPTY, Shape
from nwor_bench.microbench.inputs import count_sets
from nwor_bench.microbench.rows import Call, Implementation, RefusedError, Status
from nwor_kernels.fp8 import quantize_e4m3
from nwor_kernels.launch import Launch

Bind = Callable[[Tensor, Tensor, Tensor, Any], Call]


@dataclass(frozen=True)
class Writer:
    """Writes K/V into one layer's paged cache.

    Attributes:
        launches: kernels that a write launches.
        prepare: slots [tokens] int64 -> the indices that `bind` takes.
        bind: key and value [tokens, kv_heads, head_dim], the layer's cache, and the indices from
            `prepare` -> the write.
    """

    launches: int
    prepare: Callable[[Tensor], Any]
    bind: Bind


def make_writer(name: str, shape: Shape, cache_dtype: str, scale: Tensor) -> Writer:
    """The writer of that peer. Raises RefusedError if it is not installed or lacks this case.

    Args:
        scale: [1] float32, of both K and V; used for fp8 caches.
    """
    make = {
        "vllm_cuda": _vllm_cuda,
        "vllm_triton": _vllm_triton,
        "flashinfer": _flashinfer,
        "torch_index_copy": _index_copy,
    }[name]
    return make(shape, cache_dtype, scale)


def _halves(cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """K and V of a cache as [blocks, block_size, kv_heads, head_dim]."""
    key, value = torch.split(cache.transpose(1, 2), head_dim, dim=-1)
    return key, value


def _vllm_cuda(shape: Shape, cache_dtype: str, scale: Tensor) -> Writer:
    return _vllm_writer(_cuda_write(), shape, cache_dtype, scale)


def _vllm_triton(shape: Shape, cache_dtype: str, scale: Tensor) -> Writer:
    return _vllm_writer(_triton_write(), shape, cache_dtype, scale)


def _vllm_writer(
    write: Callable[..., None], shape: Shape, cache_dtype: str, scale: Tensor
) -> Writer:
    """Writer around either of vLLM's two writes, which take the same arguments."""
    kind = "fp8" if cache_dtype == "fp8" else "auto"

    def bind(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> Call:
        to = _halves(cache, shape.head_dim)
        return lambda: write(key, value, *to, slots, kind, scale, scale)

    return Writer(1, lambda slots: slots, bind)


def _flashinfer(shape: Shape, cache_dtype: str, scale: Tensor) -> Writer:
    """FlashInfer addresses rows by request and page: here every row is a request of one page."""
    if cache_dtype == "fp8":
        raise RefusedError(Status.REFUSED, "append_paged_kv_cache does not quantise to fp8")
    try:
        append_paged_kv_cache = import_module("flashinfer.page").append_paged_kv_cache
    except ImportError as error:
        raise _import_failed("FlashInfer", error) from error

    def prepare(slots: Tensor) -> tuple[Tensor, ...]:
        row = torch.arange(slots.numel() + 1, device=slots.device, dtype=torch.int32)
        block, offset = slots // shape.block_size, slots % shape.block_size
        return row[:-1].clone(), offset.int(), block.int(), row, offset.int() + 1

    def bind(key: Tensor, value: Tensor, cache: Tensor, where: tuple[Tensor, ...]) -> Call:
        request, offset, block, starts, last = where
        to = torch.split(cache, shape.head_dim, dim=-1)
        return lambda: append_paged_kv_cache(
            key, value, request, offset, to, block, starts, last, kv_layout="HND"
        )

    return Writer(1, prepare, bind)


def _index_copy(shape: Shape, cache_dtype: str, scale: Tensor) -> Writer:
    """Two `index_copy_` per layer; the cache is viewed as one row per head and slot."""

    def prepare(slots: Tensor) -> Tensor:
        head = torch.arange(shape.kv_heads, device=slots.device)
        block, offset = slots // shape.block_size, slots % shape.block_size
        first = (block[:, None] * shape.kv_heads + head) * shape.block_size
        return (first + offset[:, None]).flatten()

    def bind(key: Tensor, value: Tensor, cache: Tensor, index: Tensor) -> Call:
        to = torch.split(cache.view(-1, 2 * shape.head_dim), shape.head_dim, dim=-1)

        def write() -> None:
            for half, rows in zip(to, (key, value), strict=True):
                if cache_dtype == "fp8":
                    rows = quantize_e4m3(rows, scale).view(torch.uint8)
                half.index_copy_(0, index, rows.flatten(0, 1))

        return write

    # K and V are made contiguous first; fp8 adds float, divide, clamp and cast.
    return Writer(4 if cache_dtype == "bf16" else 10, prepare, bind)


def _import_failed(what: str, error: ImportError) -> RefusedError:
    if isinstance(error, ModuleNotFoundError) and error.name == what.lower():
        return RefusedError(Status.NOT_INSTALLED, f"{what} is not installed")
    return RefusedError(Status.NOT_INSTALLED, f"{what} does not import: {error}")


@cache
def _cuda_write() -> Callable[..., None]:
    """`reshape_and_cache_flash` (CUDA), as vLLM's FlashAttention backend calls it.

    Loads vLLM's kernel library without importing vLLM. A CPU build has no such library.
    """
    found = importlib.util.find_spec("vllm")
    if found is None:
        raise RefusedError(Status.NOT_INSTALLED, "vLLM is not installed")
    for folder in found.submodule_search_locations or []:
        for library in sorted(Path(folder).glob("_C_stable_libtorch*.so")):
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    try:
        return torch.ops._C_cache_ops.reshape_and_cache_flash.default
    except AttributeError as error:
        raise RefusedError(Status.REFUSED, "this vLLM was built without CUDA kernels") from error


@cache
def _triton_write() -> Callable[..., None]:
    """`triton_reshape_and_cache_flash`, the write of vLLM's Triton attention backend."""
    try:
        from vllm.v1.attention.ops.triton_reshape_and_cache_flash import (
            triton_reshape_and_cache_flash,
        )
    except ImportError as error:
        raise RefusedError(
            Status.NOT_INSTALLED, f"vLLM's Triton write does not import: {error}"
        ) from error
    return triton_reshape_and_cache_flash


@cache
def flash_attention() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """vLLM's `flash_attn_varlen_func` and `get_scheduler_metadata`."""
    try:
        from vllm.vllm_flash_attn.flash_attn_interface import (
            flash_attn_varlen_func,
            get_scheduler_metadata,
        )
    except ImportError as error:
        raise RefusedError(
            Status.NOT_INSTALLED, f"vLLM's FlashAttention does not import: {error}"
        ) from error
    return flash_attn_varlen_func, get_scheduler_metadata


MOST_COPIED = 256 << 20
"""Most bytes in one copy. On an H200 graph copies of 513 MiB and more reached 2.77 TB/s instead of
4.2; eager copies did not slow down."""


def make_baseline(name: str, bytes_moved: int, sets: int, device: torch.device) -> Implementation:
    """`empty` or `copy`, with one call per set of buffers.

    Args:
        bytes_moved: bytes that the copy reads and writes together, half of them each.
    """
    return {EMPTY: _empty, COPY: _copy}[name](bytes_moved, sets, device)


@triton.jit
def _empty_kernel(anything):  # type: ignore[no-untyped-def]
    pass


@cache
def _empty_launch() -> Launch:
    """Launch of the empty kernel, without early start, as most kernels are launched."""
    return Launch(_empty_kernel, (1, 1, 1), {}, num_warps=1)


def _empty(bytes_moved: int, sets: int, device: torch.device) -> Implementation:
    anything = torch.ones(1, device=device)
    launch = _empty_launch()
    return Implementation(EMPTY, 1, None, [lambda: launch(anything)] * sets, lambda: "")


def _copy(bytes_moved: int, sets: int, device: torch.device) -> Implementation:
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
