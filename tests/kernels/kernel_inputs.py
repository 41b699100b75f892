"""Random tensors for the kernel tests, laid out in memory as engines do and poisoned with NaN."""

import os

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

SEEDS = st.integers(0, 2**32 - 1)

# Triton decides when a kernel is defined whether it is compiled or interpreted, so one process
# tests either; test_interpreter.py starts the process that interprets.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

IN_TRITON = pytest.param(
    torch.device("cpu" if INTERPRETED else "cuda"),
    marks=[pytest.mark.triton, *[pytest.mark.gpu] * (not INTERPRETED)],
    id="triton",
)
"""Where Triton kernels run in this process: interpreted on the CPU, or on a GPU."""

E4M3_NAN = 0x7F

CACHE_LAYOUTS = ("dense", "layers_interleaved", "tokens_before_heads", "cut_from_larger")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_kv(
    num_tokens: int,
    kv_heads: int,
    widths: tuple[int, int],
    dtype: torch.dtype,
    rng: torch.Generator,
    *,
    fused: bool,
) -> tuple[Tensor, Tensor]:
    """K and V of a step: tensors of their own, or two views of one fused QKV output."""
    head_dim, value_dim = widths
    split = kv_heads * head_dim
    packed = torch.randn(num_tokens, split + kv_heads * value_dim + 5, generator=rng).to(dtype)
    key = packed[:, 5 : 5 + split].view(num_tokens, kv_heads, head_dim)
    value = packed[:, 5 + split :].view(num_tokens, kv_heads, value_dim)
    return (key, value) if fused else (key.contiguous(), value.contiguous())


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A copy on a device with the strides that the tensor has; `Tensor.to` makes views dense."""
    empty = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=torch.device(device)
    )
    return empty.copy_(tensor)


def kv_of_layers(
    layers: int,
    num_tokens: int,
    kv_heads: int,
    widths: tuple[int, int],
    dtype: torch.dtype,
    rng: torch.Generator,
) -> tuple[list[Tensor], list[Tensor]]:
    """K and V of every layer: views of each layer's own fused QKV output."""
    pairs = [random_kv(num_tokens, kv_heads, widths, dtype, rng, fused=True) for _ in range(layers)]
    return [key for key, _ in pairs], [value for _, value in pairs]


def nan_caches(
    layers: int, shape: tuple[int, int, int, int], dtype: torch.dtype, layout: str
) -> tuple[Tensor, list[Tensor]]:
    """(memory, one cache a layer): NaN caches [blocks, kv_heads, block_size, width] in `memory`.

    An fp8 cache's bytes, uint8, are poisoned with e4m3's NaN.
    """
    blocks, kv_heads, block_size, width = shape
    nan = E4M3_NAN if dtype is torch.uint8 else float("nan")
    if layout == "dense":
        memory = torch.full((layers, *shape), nan, dtype=dtype)
        return memory, list(memory)
    if layout == "layers_interleaved":
        memory = torch.full((blocks, layers, kv_heads, block_size, width), nan, dtype=dtype)
        return memory, [memory[:, layer] for layer in range(layers)]
    if layout == "tokens_before_heads":
        memory = torch.full((layers, blocks, block_size, kv_heads, width), nan, dtype=dtype)
        return memory, [cache.transpose(1, 2) for cache in memory]
    assert layout == "cut_from_larger"
    larger = (layers, 2 * blocks + 1, kv_heads + 1, block_size + 2, 2 * width)
    memory = torch.full(larger, nan, dtype=dtype)
    return memory, [cache[1::2, 1:, 1:-1, ::2] for cache in memory]


def nan_staging(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    strided: bool,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """(memory, view): NaN staging rows [capacity, kv_heads, width], with gaps if `strided`."""
    capacity, kv_heads, width = shape
    larger = (2 * capacity + 1, kv_heads + 1, width + 3) if strided else shape
    memory = torch.full(larger, float("nan"), dtype=dtype, device=device)
    return memory, memory[1::2, 1:, 2:-1] if strided else memory


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Equal values in equal places, NaN (never written) included."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def num_written(memory: Tensor) -> int:
    """Elements that no longer hold the poison."""
    if memory.dtype is torch.uint8:
        return int((memory != E4M3_NAN).sum())
    return int((~memory.isnan()).sum())
