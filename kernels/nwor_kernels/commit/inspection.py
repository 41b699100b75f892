"""Device code: what every program of a commit looks at in a whole window before it writes."""

import triton
import triton.language as tl


@triton.jit
def inspect_window(slots, rows, num_rows, capacity, slots_stride, rows_stride, CHUNK: tl.constexpr):
    """(rows that are no padding, largest slot or -1, how many of them lie past the sources)."""
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
def inspect_groups(
    slots, rows, num_rows, capacity, group, slots_stride, group_stride, rows_stride,
    GROUPS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """What `inspect_window` returns, of the slots of each layer: `group` [layers] is its row.

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
