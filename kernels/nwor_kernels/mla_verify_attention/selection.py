"""A sparse layer's selected positions, split into cached and staged ones.

An indexer selects positions of a request for each query row, the window's own among them. Stock
attention turns all of them into rows of the cache. The rows of a staged window are not there:
the committed positions become cached rows, packed to the front, and those of the window a bit each,
by which `mla_tail_triton` merges them in.
"""

import triton
import triton.language as tl
from torch import Tensor

from nwor_kernels.launch import Launches

TOGETHER = 32
"""Grids are rounded up to a multiple: a step of a prefill may have any number of rows."""


@triton.jit(
    do_not_specialize=["tokens", "requests", "selection_row"],
    do_not_specialize_on_alignment=[
        "selected", "request_of", "seq_lens", "block_table", "staged_start", "staged_end", "rows",
        "selection",
    ],
)  # fmt: skip
def split_selection_kernel(
    selected,
    request_of,
    seq_lens,
    block_table,
    staged_start,
    staged_end,
    rows,
    selection,
    selected_row,
    table_row,
    rows_row,
    selection_row,
    tokens,
    requests,
    SELECTED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program: all selected positions of one query row."""
    token = tl.program_id(0).to(tl.int64)
    if token >= tokens:
        return
    # Padding of a captured shape selects nothing, whichever request it belongs to.
    request = tl.minimum(tl.load(request_of + token), requests - 1).to(tl.int64)
    num_staged = tl.load(staged_end + request) - tl.load(staged_start + request)
    committed = tl.load(seq_lens + request) - num_staged

    place = tl.arange(0, WIDTH)
    is_place = place < SELECTED
    position = tl.load(selected + token * selected_row + place, mask=is_place, other=-1)
    in_cache = (position >= 0) & (position < committed)
    table = block_table + request * table_row
    block = tl.load(table + position // BLOCK_SIZE, mask=in_cache, other=0)
    row = block * BLOCK_ROWS + position % BLOCK_SIZE

    ones = in_cache.to(tl.int32)
    count = tl.sum(ones, axis=0)
    to_rows = rows + token * rows_row
    tl.store(to_rows + tl.cumsum(ones, axis=0) - 1, row, mask=in_cache)
    tl.store(to_rows + place, -1, mask=is_place & (place >= count))

    is_staged = (position >= 0) & (position >= committed) & (position < committed + num_staged)
    bit = tl.where(is_staged, 1 << tl.where(is_staged, position - committed, 0), 0)
    tl.store(selection + token, count)
    tl.store(selection + selection_row + token, tl.sum(bit, axis=0))  # each position comes once


_launches = Launches(
    split_selection_kernel, free=frozenset({"tokens", "requests", "selection_row"})
)


def split_selection_triton(
    selected: Tensor,
    request_of: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    staged_start: Tensor,
    staged_end: Tensor,
    rows: Tensor,
    selection: Tensor,
    *,
    block_size: int,
    block_rows: int,
) -> None:
    """Split what each query row has selected.

    Safe in a CUDA graph: nothing is read on the host, nothing is allocated.

    Args:
        selected: [tokens, most] int32, positions of the row's request, each at most once, in any
            order; -1 for none.
        request_of: [tokens] int32, each row's request.
        seq_lens, block_table, staged_start, staged_end: as for `mla_verify_attention_triton`. The
            last rows of a request of L tokens are its s staged ones: L - s are in the cache.
        rows: [tokens, most] int32, overwritten: the cache's rows of the selected committed
            positions, in their order, then -1.
        selection: [2, tokens] int32, overwritten: how many those are; and bit i if the request's
            i-th staged row is selected.
        block_size: tokens of a block.
        block_rows: rows from one block of the cache to the next.
    """
    tokens, most = selected.shape
    if tokens == 0:
        return
    strides = (selected, block_table, rows, selection)
    arguments = (
        selected,
        request_of,
        seq_lens,
        block_table,
        staged_start,
        staged_end,
        rows,
        selection,
        *(each.stride(0) for each in strides),
        tokens,
        seq_lens.shape[0],
    )
    constants = {
        "SELECTED": most,
        "BLOCK_SIZE": block_size,
        "BLOCK_ROWS": block_rows,
        "WIDTH": triton.next_power_of_2(most),
    }
    programs = triton.cdiv(tokens, TOGETHER) * TOGETHER
    _launches((programs, 1, 1), arguments, constants, num_warps=4)
