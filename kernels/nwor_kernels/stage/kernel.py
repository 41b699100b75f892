"""Stage in Triton: one launch copies a layer's draft rows and writes the layer's metadata.

All or nothing without a host synchronisation: every program reads all of `rows` (8 bytes an
entry, from L2) and so decides the same. The rows are loaded before the decision and stored after
it, so that the check's latency hides behind theirs.
"""

import triton
import triton.language as tl
from torch import Tensor

from nwor_kernels.launch import Launch
from nwor_kernels.metadata import ERROR_FLAG, ERROR_OVERFLOW, ERROR_ROW_RANGE, STAGED_COUNT
from nwor_kernels.tiles import check_chunk, head_offsets, tiling

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
) -> None:
    """`stage_kv_cache_reference` in one launch; safe inside a CUDA graph."""
    tensors = (key, value, rows, staged_key, staged_value, layer_metadata)
    num_rows, value_dim = rows.numel(), value.shape[2]
    # The alignment of rows and metadata makes no other kernel, but Triton looks at the rest.
    layouts = [
        (tensor.dtype, tensor.stride(), tensor.data_ptr() % 16 == 0 or tensor.dim() == 1)
        for tensor in tensors
    ]
    launch_key = (rows.device, num_rows, key.shape[1:], value_dim, *layouts)
    launch = _launches.get(launch_key)
    if launch is None:
        launch = _launches[launch_key] = _prepare(*tensors)
    launch(*tensors, num_rows, min(key.shape[0], value.shape[0]), staged_key.shape[0])


_launches: dict[object, Launch] = {}


def _prepare(
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    staged_key: Tensor,
    staged_value: Tensor,
    layer_metadata: Tensor,
) -> Launch:
    (_, heads, key_dim), value_dim = key.shape, value.shape[2]
    num_rows = rows.numel()
    tile = tiling(num_rows, heads * max(key_dim, value_dim), 1)
    constants = {
        "STRIDES": (rows.stride(0), layer_metadata.stride(0)),
        "KEY_STRIDES": key.stride(),
        "VALUE_STRIDES": value.stride(),
        "TO_KEY_STRIDES": staged_key.stride(),
        "TO_VALUE_STRIDES": staged_value.stride(),
        "HEADS": heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "TOKENS": tile.tokens,
        "COLUMNS": tile.columns,
        "CHUNK": check_chunk(num_rows),
    }
    grid = (*tile.grid, 1)
    return Launch(_stage_kernel, grid, constants, num_warps=tile.num_warps, num_stages=1)


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "capacity"],
    do_not_specialize_on_alignment=["rows", "metadata"],  # it changes from call to call
)
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
    STRIDES: tl.constexpr,
    KEY_STRIDES: tl.constexpr,
    VALUE_STRIDES: tl.constexpr,
    TO_KEY_STRIDES: tl.constexpr,
    TO_VALUE_STRIDES: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program: TOKENS rows by COLUMNS columns. STRIDES are those of rows and metadata."""
    entry = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    reports = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    row = tl.load(rows + entry * STRIDES[0], mask=entry < num_rows, other=-1).to(tl.int64)
    real = (row >= 0) & (row < num_tokens)
    if (tl.max(real.to(tl.int32), axis=0) == 0) & (not reports):
        return  # padding only

    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_key = real[:, None] & (column < HEADS * KEY_DIM)[None, :]
    in_value = real[:, None] & (column < HEADS * VALUE_DIM)[None, :]
    from_key = head_offsets(column, KEY_DIM, KEY_STRIDES[1], KEY_STRIDES[2])
    from_value = head_offsets(column, VALUE_DIM, VALUE_STRIDES[1], VALUE_STRIDES[2])
    key_tile = tl.load(key + (row * KEY_STRIDES[0])[:, None] + from_key[None, :], mask=in_key)
    value_tile = tl.load(
        value + (row * VALUE_STRIDES[0])[:, None] + from_value[None, :], mask=in_value
    )

    count, largest = _count_and_largest(rows, STRIDES[0], num_rows, CHUNK)
    flags = tl.where(largest >= num_tokens, _ROW_RANGE, 0)
    flags = tl.where(num_rows > capacity, _OVERFLOW, flags)
    if reports:
        tl.store(metadata + _STAGED_COUNT * STRIDES[1], tl.where(flags == 0, count, 0))
        tl.store(metadata + _ERROR_FLAG * STRIDES[1], flags)
    if flags != 0:
        return

    to = entry.to(tl.int64)
    to_key = head_offsets(column, KEY_DIM, TO_KEY_STRIDES[1], TO_KEY_STRIDES[2])
    to_value = head_offsets(column, VALUE_DIM, TO_VALUE_STRIDES[1], TO_VALUE_STRIDES[2])
    tl.store(
        staged_key + (to * TO_KEY_STRIDES[0])[:, None] + to_key[None, :], key_tile, mask=in_key
    )
    tl.store(
        staged_value + (to * TO_VALUE_STRIDES[0])[:, None] + to_value[None, :],
        value_tile,
        mask=in_value,
    )


@triton.jit
def _count_and_largest(entries, stride, num_entries, CHUNK: tl.constexpr):
    """How many entries are not negative (padding is), and the largest one, or -1."""
    lanes = tl.arange(0, CHUNK)
    count = tl.zeros([CHUNK], tl.int32)
    largest = tl.full([CHUNK], -1, tl.int64)
    for start in range(0, num_entries, CHUNK):
        at = start + lanes
        entry = tl.load(entries + at * stride, mask=at < num_entries, other=-1).to(tl.int64)
        count += (entry >= 0).to(tl.int32)
        largest = tl.maximum(largest, entry)
    return tl.sum(count, axis=0), tl.max(largest, axis=0)
