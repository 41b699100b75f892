"""Commit in Triton: one launch writes the accepted rows to the caches of all layers.

Sources and caches are separate tensors, a pair a layer, with their addresses in tables on the
device. So a commit does no host work per layer, never waits for the device and can be captured in a
CUDA graph. `plan.py` builds the tables and launches.

With several KV-cache groups slots are [groups, N], and a table gives the row of each layer.

All or nothing: every program checks all layers and all slots (8 bytes each, from L2, while its rows
are loading), so all programs decide the same without communication. Only the first program writes
error flags, which follow from inputs that no program writes.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from nwor_kernels.fp8 import E4M3_MAX
from nwor_kernels.metadata import (
    ERROR_COUNT_MISMATCH,
    ERROR_FLAG,
    ERROR_OVERFLOW,
    ERROR_ROW_RANGE,
    ERROR_SLOT_RANGE,
    STAGED_COUNT,
)
from nwor_kernels.tiles import head_offsets

CACHE_COLUMNS = 4
"""Columns of the cache table: address, number of slots, addresses of the K and the V scale."""

_STAGED_COUNT = tl.constexpr(STAGED_COUNT)
_ERROR_FLAG = tl.constexpr(ERROR_FLAG)
_OVERFLOW = tl.constexpr(ERROR_OVERFLOW)
_ROW_RANGE = tl.constexpr(ERROR_ROW_RANGE)
_COUNT_MISMATCH = tl.constexpr(ERROR_COUNT_MISMATCH)
_SLOT_RANGE = tl.constexpr(ERROR_SLOT_RANGE)
_CACHE_COLUMNS = tl.constexpr(CACHE_COLUMNS)
_E4M3_MAX = tl.constexpr(E4M3_MAX)


@triton.jit(
    do_not_specialize=["num_rows", "capacity", "num_requests"],
    do_not_specialize_on_alignment=[
        "sources",
        "caches",
        "slots",
        "slot_rows",
        "num_sampled",
        "row_request",
        "row_index",
        "rows",
        "errors",
        "metadata",
        "written",
    ],
)
def commit_kernel(
    sources,
    caches,
    slots,
    slot_rows,
    num_sampled,
    row_request,
    row_index,
    rows,
    errors,
    metadata,
    written,
    num_rows,
    capacity,
    num_requests,
    STRIDES: tl.constexpr,
    KEY_STRIDES: tl.constexpr,
    VALUE_STRIDES: tl.constexpr,
    CACHE_STRIDES: tl.constexpr,
    SOURCE_ELEMENT: tl.constexpr,
    CACHE_ELEMENT: tl.constexpr,
    SOURCE_ALIGNMENT: tl.constexpr,
    CACHE_ALIGNMENT: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    TOKENS_PER_REQUEST: tl.constexpr,
    CERTAIN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    NUM_LAYERS: tl.constexpr,
    SLOT_GROUPS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    """One program: TOKENS rows by COLUMNS columns of one layer.

    STRIDES are those of slots (along N), num_sampled, row_request, row_index, rows, errors,
    metadata (two), slots again (along the groups) and written. SLOT_GROUPS: how many groups
    `slot_rows` names. K_SCALES, V_SCALES: scales of a layer, 0 if the cache is not quantised.
    """
    if STARTS_EARLY:
        gdc_wait()
    layer = tl.program_id(2)
    reports = (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (layer == 0)
    key_address = tl.load(sources + layer * 2)
    value_address = tl.load(sources + layer * 2 + 1)
    cache_row = caches + layer * _CACHE_COLUMNS
    cache_address = tl.load(cache_row)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k_scale = _load_scale(cache_row + 2, column // KEY_DIM, K_SCALES, HEADS)
    v_scale = _load_scale(cache_row + 3, column // VALUE_DIM, V_SCALES, HEADS)

    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = row < num_rows
    slots_of_layer = slots
    if slot_rows is not None:
        slots_of_layer += tl.load(slot_rows + layer) * STRIDES[8]
    slot = tl.load(slots_of_layer + row * STRIDES[0], mask=inside, other=-1).to(tl.int64)
    source = row.to(tl.int64)
    if rows is not None:
        source = tl.load(rows + row * STRIDES[4], mask=inside, other=-1).to(tl.int64)
    if TOKENS_PER_REQUEST is not None:
        request, index = row // TOKENS_PER_REQUEST, row % TOKENS_PER_REQUEST
    else:
        request = tl.load(row_request + row * STRIDES[2], mask=inside, other=-1)
        index = tl.load(row_index + row * STRIDES[3], mask=inside, other=0)
    known = inside & (request >= 0) & (request < num_requests)
    sampled = tl.load(num_sampled + request * STRIDES[1], mask=known, other=0)
    kept = known & (index < sampled + CERTAIN)
    kept = kept & (slot >= 0) & (source >= 0) & (source < capacity)
    if (tl.max(kept.to(tl.int32), axis=0) == 0) & (not reports):
        return  # padding and rejected drafts only

    in_key = kept[:, None] & (column < HEADS * KEY_DIM)[None, :]
    in_value = kept[:, None] & (column < HEADS * VALUE_DIM)[None, :]
    keys = tl.multiple_of(key_address.to(tl.pointer_type(SOURCE_ELEMENT)), SOURCE_ALIGNMENT)
    values = tl.multiple_of(value_address.to(tl.pointer_type(SOURCE_ELEMENT)), SOURCE_ALIGNMENT)
    from_key = head_offsets(column, KEY_DIM, KEY_STRIDES[1], KEY_STRIDES[2])
    from_value = head_offsets(column, VALUE_DIM, VALUE_STRIDES[1], VALUE_STRIDES[2])
    key_at = (source * KEY_STRIDES[0])[:, None] + from_key[None, :]
    value_at = (source * VALUE_STRIDES[0])[:, None] + from_value[None, :]
    # What is masked out is divided too, and a division of arbitrary numbers can be slow.
    key_tile = tl.load(keys + key_at, mask=in_key, other=1.0)
    value_tile = tl.load(values + value_at, mask=in_value, other=1.0)

    every = tl.arange(0, triton.next_power_of_2(NUM_LAYERS))
    exists = every < NUM_LAYERS
    num_slots = tl.load(caches + every * _CACHE_COLUMNS + 1, mask=exists, other=0)
    if slot_rows is None:
        count, largest, overrun = _inspect_window(
            slots, rows, num_rows, capacity, STRIDES[0], STRIDES[4], CHUNK
        )
    else:
        group = tl.load(slot_rows + every, mask=exists, other=0)
        count, largest, overrun = _inspect_groups(
            slots, rows, num_rows, capacity, group, STRIDES[0], STRIDES[8], STRIDES[4], SLOT_GROUPS,
            CHUNK,
        )  # fmt: skip
    flags = tl.where(largest >= num_slots, _SLOT_RANGE, 0)
    flags |= tl.where(overrun != 0, _OVERFLOW if rows is None else _ROW_RANGE, 0)
    if metadata is not None:
        per_layer = metadata + every * STRIDES[6]
        staged = tl.load(per_layer + _STAGED_COUNT * STRIDES[7], mask=exists, other=0)
        flags |= tl.load(per_layer + _ERROR_FLAG * STRIDES[7], mask=exists, other=0)
        flags |= tl.where(staged != count, _COUNT_MISMATCH, 0)
    if tl.max(tl.where(exists, flags, 0), axis=0) != 0:
        if reports:
            at = errors + every * STRIDES[5]
            tl.store(at, tl.load(at, mask=exists, other=0) | flags, mask=exists)
        return

    key_tile = _as_cached(key_tile, k_scale, K_SCALES, CACHE_ELEMENT)
    value_tile = _as_cached(value_tile, v_scale, V_SCALES, CACHE_ELEMENT)
    cache = tl.multiple_of(cache_address.to(tl.pointer_type(CACHE_ELEMENT)), CACHE_ALIGNMENT)
    place = (slot // BLOCK_SIZE) * CACHE_STRIDES[0] + (slot % BLOCK_SIZE) * CACHE_STRIDES[2]
    to_key = head_offsets(column, KEY_DIM, CACHE_STRIDES[1], CACHE_STRIDES[3])
    to_value = head_offsets(column, VALUE_DIM, CACHE_STRIDES[1], CACHE_STRIDES[3])
    to_value += KEY_DIM * CACHE_STRIDES[3]
    tl.store(cache + place[:, None] + to_key[None, :], key_tile, mask=in_key)
    tl.store(cache + place[:, None] + to_value[None, :], value_tile, mask=in_value)
    if written is not None:
        stored = tl.sum(kept.to(tl.int32), axis=0)
        once = tl.program_id(1) == 0  # other programs store more columns of the same rows
        tl.atomic_add(written + layer * STRIDES[9], stored, mask=once, sem="relaxed")


@triton.jit
def _inspect_window(
    slots, rows, num_rows, capacity, slots_stride, rows_stride, CHUNK: tl.constexpr
):
    """(rows that are not padding, largest slot or -1, how many rows are past the sources)."""
    lanes = tl.arange(0, CHUNK)
    count = tl.zeros([CHUNK], tl.int32)
    overrun = tl.zeros([CHUNK], tl.int32)
    largest = tl.full([CHUNK], -1, tl.int64)
    for start in range(0, num_rows, CHUNK):
        at = start + lanes
        slot = tl.load(slots + at * slots_stride, mask=at < num_rows, other=-1).to(tl.int64)
        source = at
        if rows is not None:
            source = tl.load(rows + at * rows_stride, mask=at < num_rows, other=-1)
        count += (slot >= 0).to(tl.int32)
        overrun += ((slot >= 0) & (source >= capacity)).to(tl.int32)
        largest = tl.maximum(largest, slot)
    return tl.sum(count, axis=0), tl.max(largest, axis=0), tl.sum(overrun, axis=0)


@triton.jit
def _inspect_groups(
    slots, rows, num_rows, capacity, group, slots_stride, group_stride, rows_stride,
    GROUPS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`_inspect_window` for each layer: `group` [layers] is its row of slots.

    All groups are read in one pass, CHUNK entries in all at a time.
    """
    padded: tl.constexpr = triton.next_power_of_2(GROUPS)
    lanes_each: tl.constexpr = max(CHUNK // padded, 1)
    lanes = tl.arange(0, lanes_each)
    every = tl.arange(0, padded)
    count = tl.zeros([padded, lanes_each], tl.int32)
    overrun = tl.zeros([padded, lanes_each], tl.int32)
    largest = tl.full([padded, lanes_each], -1, tl.int64)
    for start in range(0, num_rows, lanes_each):
        at = start + lanes
        inside = (every < GROUPS)[:, None] & (at < num_rows)[None, :]
        slot_at = (every * group_stride)[:, None] + (at * slots_stride)[None, :]
        slot = tl.load(slots + slot_at, mask=inside, other=-1).to(tl.int64)
        source = at
        if rows is not None:
            source = tl.load(rows + at * rows_stride, mask=at < num_rows, other=-1)
        count += (slot >= 0).to(tl.int32)
        overrun += ((slot >= 0) & (source >= capacity)[None, :]).to(tl.int32)
        largest = tl.maximum(largest, slot)
    is_its = group[:, None] == every[None, :]
    return (
        tl.sum(tl.where(is_its, tl.sum(count, axis=1)[None, :], 0), axis=1),
        tl.max(tl.where(is_its, tl.max(largest, axis=1)[None, :], -1), axis=1),
        tl.sum(tl.where(is_its, tl.sum(overrun, axis=1)[None, :], 0), axis=1),
    )


@triton.jit
def _load_scale(address, head, SCALES: tl.constexpr, HEADS: tl.constexpr):
    """A layer's scale, for all heads or for the head of each column; 1 if there is none."""
    if SCALES == 0:
        scale = 1.0
    else:
        scale_at = tl.load(address).to(tl.pointer_type(tl.float32))
        if SCALES == 1:
            scale = tl.load(scale_at)
        else:
            scale = tl.load(scale_at + head, mask=head < HEADS, other=1.0)[None, :]
    return scale


@triton.jit
def _as_cached(tile, scale, SCALES: tl.constexpr, ELEMENT: tl.constexpr):
    """The tile as the cache holds it: quantised (see `quantize_e4m3`) if there are scales."""
    if SCALES != 0:
        tile = tl.div_rn(tile.to(tl.float32), scale)
        # PropagateNan.ALL: NaN stays NaN, as it does in vLLM's write.
        tile = tl.clamp(tile, -_E4M3_MAX, _E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    return tile.to(ELEMENT)
