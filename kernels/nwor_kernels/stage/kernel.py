"""Stage in Triton: one launch copies a layer's draft rows and writes the layer's metadata.

All or nothing without a host synchronisation: every program reads all of `rows` (8 bytes an
entry, from L2) and comes to the same verdict by itself. The copied rows are loaded before that
verdict is in and stored after it, so that the check's latency hides behind theirs.
"""

import triton
import triton.language as tl
from torch import Tensor

from nwor_kernels.metadata import ERROR_FLAG, ERROR_OVERFLOW, ERROR_ROW_RANGE, STAGED_COUNT
from nwor_kernels.tiles import check_chunk, count_and_largest, head_offsets, tiling

_STAGED_COUNT = tl.constexpr(STAGED_COUNT)
_ERROR_FLAG = tl.constexpr(ERROR_FLAG)
_OVERFLOW = tl.constexpr(ERROR_OVERFLOW)
_ROW_RANGE = tl.constexpr(ERROR_ROW_RANGE)


def stage_kv_cache_triton(
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    staged_key: Tensor,
    staged_value: Tensor,
    layer_metadata: Tensor,
    *,
    tokens_per_program: int = 1,
) -> None:
    """`stage_kv_cache_reference` in one launch; safe inside a CUDA graph."""
    num_rows, (_, heads, key_dim), value_dim = rows.numel(), key.shape, value.shape[-1]
    tile = tiling(num_rows, heads * max(key_dim, value_dim), tokens_per_program)
    _stage_kernel[tile.grid](
        key,
        value,
        rows,
        staged_key,
        staged_value,
        layer_metadata,
        num_rows,
        min(key.shape[0], value.shape[0]),
        staged_key.shape[0],
        rows.stride(0),
        layer_metadata.stride(0),
        *key.stride(),
        *value.stride(),
        *staged_key.stride(),
        *staged_value.stride(),
        HEADS=heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        TOKENS=tile.tokens,
        COLUMNS=tile.columns,
        CHUNK=check_chunk(num_rows),
        num_warps=tile.num_warps,
        num_stages=1,
    )


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "capacity"])
def _stage_kernel(
    key,
    value,
    rows,
    staged_key,
    staged_value,
    metadata,
    num_rows,
    num_tokens,
    capacity,
    rows_stride,
    metadata_stride,
    key_row,
    key_head,
    key_one,
    value_row,
    value_head,
    value_one,
    to_key_row,
    to_key_head,
    to_key_one,
    to_value_row,
    to_value_head,
    to_value_one,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    entry = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    reports = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    row = tl.load(rows + entry * rows_stride, mask=entry < num_rows, other=-1).to(tl.int64)
    real = (row >= 0) & (row < num_tokens)
    if (tl.max(real.to(tl.int32), axis=0) == 0) & (not reports):
        return  # padding only

    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_key = real[:, None] & (column < HEADS * KEY_DIM)[None, :]
    in_value = real[:, None] & (column < HEADS * VALUE_DIM)[None, :]
    from_key = head_offsets(column, KEY_DIM, key_head, key_one)
    from_value = head_offsets(column, VALUE_DIM, value_head, value_one)
    key_tile = tl.load(key + (row * key_row)[:, None] + from_key[None, :], mask=in_key)
    value_tile = tl.load(value + (row * value_row)[:, None] + from_value[None, :], mask=in_value)

    count, largest = count_and_largest(rows, rows_stride, num_rows, CHUNK)
    flags = tl.where(largest >= num_tokens, _ROW_RANGE, 0)
    flags = tl.where(num_rows > capacity, _OVERFLOW, flags)
    if reports:
        tl.store(metadata + _STAGED_COUNT * metadata_stride, tl.where(flags == 0, count, 0))
        tl.store(metadata + _ERROR_FLAG * metadata_stride, flags)
    if flags != 0:
        return

    to = entry.to(tl.int64)
    to_key = head_offsets(column, KEY_DIM, to_key_head, to_key_one)
    to_value = head_offsets(column, VALUE_DIM, to_value_head, to_value_one)
    tl.store(staged_key + (to * to_key_row)[:, None] + to_key[None, :], key_tile, mask=in_key)
    tl.store(
        staged_value + (to * to_value_row)[:, None] + to_value[None, :], value_tile, mask=in_value
    )
