"""Whoever else writes K/V into one layer's paged cache, bound to tensors beforehand.

Everything that a peer can be given in advance it gets in advance: views, index tensors, int32
copies. What is timed is its write alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from nwor_bench.microbench import vllm_peers
from nwor_bench.microbench.cases import Shape
from nwor_bench.microbench.subject import Call, RefusedError, not_installed, refused
from nwor_kernels.fp8 import quantize_e4m3

Bind = Callable[[Tensor, Tensor, Tensor, Any], Call]


@dataclass(frozen=True)
class Writer:
    """Writes one layer.

    Attributes:
        launches: kernels of a write.
        prepare: slots [tokens] int64 -> what `bind` wants to know of them.
        bind: key and value [tokens, kv_heads, head_dim], the layer's cache, and what `prepare`
            gave -> the write.
    """

    launches: int
    prepare: Callable[[Tensor], Any]
    bind: Bind


def make_writer(name: str, shape: Shape, cache_dtype: str, scale: Tensor) -> Writer:
    """The peer of that name. Raises RefusedError where it is not installed or cannot do this.

    Args:
        scale: [1] float32, of K and of V; for fp8 caches.
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
    return _vllm_writer(vllm_peers.cuda_write(), shape, cache_dtype, scale)


def _vllm_triton(shape: Shape, cache_dtype: str, scale: Tensor) -> Writer:
    return _vllm_writer(vllm_peers.triton_write(), shape, cache_dtype, scale)


def _vllm_writer(
    write: Callable[..., None], shape: Shape, cache_dtype: str, scale: Tensor
) -> Writer:
    """vLLM's two writes take the same arguments."""
    kind = "fp8" if cache_dtype == "fp8" else "auto"

    def bind(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> Call:
        to = _halves(cache, shape.head_dim)
        return lambda: write(key, value, *to, slots, kind, scale, scale)

    return Writer(1, lambda slots: slots, bind)


def _flashinfer(shape: Shape, cache_dtype: str, scale: Tensor) -> Writer:
    """FlashInfer finds a row by its request's pages: here every row is a request of one page."""
    if cache_dtype == "fp8":
        raise refused("append_paged_kv_cache copies rows of the cache's dtype; it quantises none")
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
    """Two `index_copy_` a layer, over the cache as rows of one head of one slot."""

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

    # A K or V in a fused output is made dense first; fp8: float, divide, clamp and cast as well.
    return Writer(4 if cache_dtype == "bf16" else 10, prepare, bind)


def _import_failed(what: str, error: ImportError) -> RefusedError:
    if isinstance(error, ModuleNotFoundError) and error.name == what.lower():
        return not_installed(f"{what} is not installed")
    return not_installed(f"{what} does not import: {error}")
