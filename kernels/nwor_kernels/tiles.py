"""How the copy kernels cut rows of K and V into tiles.

A tile is `TOKENS` rows by `COLUMNS` columns, and column `head * head_dim + d` of a row is
element d of a head. Neighbouring threads therefore touch neighbouring elements of one head, and
a thread's share is 16 bytes if strides and addresses allow it, head dims that are no power
of two included. Everything else about a layout is in its strides.
"""

from typing import NamedTuple

import triton
import triton.language as tl

MAX_COLUMNS = 2048
"""Widest tile in elements; wider rows are spread over several programs."""


class Tiles(NamedTuple):
    """How a launch cuts [rows, width] into programs, and how many warps each has."""

    tokens: int
    columns: int
    grid: tuple[int, int]
    num_warps: int


def tiling(num_rows: int, width: int, tokens: int) -> Tiles:
    """Cut `num_rows` rows of `width` elements into tiles of about `tokens` rows.

    Short rows are gathered until a program has something to do. There is always one program:
    it reports the errors of an empty window too.
    """
    columns = min(triton.next_power_of_2(width), MAX_COLUMNS)
    tokens = max(tokens, min(1024 // columns, triton.next_power_of_2(max(num_rows, 1))))
    grid = (max(triton.cdiv(num_rows, tokens), 1), triton.cdiv(width, columns))
    return Tiles(tokens, columns, grid, min(max(tokens * columns // 256, 1), 4))


def check_chunk(num_rows: int) -> int:
    """Entries that one pass over a window's rows reads: few sizes, so that few are compiled."""
    return next((size for size in (32, 256) if num_rows <= size), 1024)


@triton.jit
def head_offsets(columns, HEAD_DIM: tl.constexpr, stride_head, stride_dim):
    """The place of each column of a row, in elements from the row's start."""
    return (columns // HEAD_DIM).to(tl.int64) * stride_head + (columns % HEAD_DIM) * stride_dim
