"""Baselines: an empty kernel (the cost of a launch) and a plain copy (the memory bandwidth)."""

from functools import cache

import torch
import triton
from torch import Tensor

from nwor_bench.microbench.cases import COPY, EMPTY
from nwor_bench.microbench.implementation import Call, Implementation
from nwor_bench.microbench.inputs import count_sets
from nwor_kernels.launch import Launch

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
