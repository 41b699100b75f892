"""The two ends of the scale: a kernel that does nothing, and a plain copy."""

import torch
from torch import Tensor

from nwor_bench.microbench.cases import COPY, EMPTY
from nwor_bench.microbench.empty_kernel import empty_launch
from nwor_bench.microbench.inputs import count_sets
from nwor_bench.microbench.subject import Call, Subject

MOST_COPIED = 256 << 20
"""Bytes of one copy: on an H200 a graph's copies of 513 MiB and more fell to two thirds of the
bandwidth (2.77 TB/s instead of 4.2), eager ones did not."""


def make_baseline(name: str, bytes_moved: int, sets: int, device: torch.device) -> Subject:
    """`empty` or `copy`, with as many calls as the others have sets of buffers.

    Args:
        bytes_moved: what the copy reads and writes in all; half of it each.
    """
    return {EMPTY: _empty, COPY: _copy}[name](bytes_moved, sets, device)


def _empty(bytes_moved: int, sets: int, device: torch.device) -> Subject:
    anything = torch.ones(1, device=device)
    launch = empty_launch()
    return Subject(EMPTY, 1, None, [lambda: launch(anything)] * sets, lambda: "")


def _copy(bytes_moved: int, sets: int, device: torch.device) -> Subject:
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
        return "" if torch.equal(source, target) else "the copy is not the source"

    parts = -(-size // MOST_COPIED)
    return Subject(COPY, parts, 2 * size, calls, check)


def _copying(source: Tensor, target: Tensor) -> Call:
    """A copy in parts of at most MOST_COPIED bytes."""
    if source.numel() <= MOST_COPIED:
        return lambda: target.copy_(source)
    parts = list(
        zip(torch.split(target, MOST_COPIED), torch.split(source, MOST_COPIED), strict=True)
    )

    def copy_parts() -> None:
        for to, part in parts:
            to.copy_(part)

    return copy_parts
