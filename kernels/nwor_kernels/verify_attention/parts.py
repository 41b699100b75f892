"""Device code: how contexts are cut into parts for programs, and how partial results are merged.

The steps of all contexts are cut into equal parts, one a program. Cuts move to the beginnings of
pairs if that costs little: then no program has parts of two pairs.

Merged partial results are no longer needed, but dirty in L2: the next layer's weights would push
them out to DRAM. PTX's `discard.L2` (sm_80 and later) gives 128 bytes up: to the memory model it is
a weak write of an indeterminate value, to the hardware a hint not to write the line back. So it is
safe exactly if overwriting the tiles would be:

- The parts' stores come before their arrival (release), ours before the merge (acquire): none can
  come after the discard.
- A barrier stands between our own loads and the discards. The output was stored before it, so no
  load that the output depends on is still in flight. The loads bypass L1 (.cg), so no stale line
  stays there.
- Other programs of the launch: a slot is written once a launch and read only by the one program
  that merges its pair; programs that write meanwhile write other slots.
- Later launches on the stream or in a CUDA graph write every number before they read it, and a
  kernel's writes, indeterminate ones too, are done before the next kernel begins. Launches that
  share a workspace must not overlap, with or without discards, and none may be started early
  (programmatic dependent launch) before its predecessor is done.
- Only whole lines are dropped: a slot's tiles are multiples of 128 bytes (16 rows or more, 32
  columns or more) in tensors that begin at such a multiple (`VerifyWorkspace.check`), and nothing
  else is there; the arrival counters are a tensor of their own.

An H100's or H200's L2 has two partitions. Whether a discard drops a line whose home is the other
partition is not documented; only counters of DRAM writes can show it.
"""

import triton
import triton.language as tl

from nwor_kernels.verify_attention.tiles import nothing_seen
from nwor_kernels.verify_attention.tuning import LINE_BYTES, MAX_PARTS, Discard

_MAX_PARTS = tl.constexpr(MAX_PARTS)
_FLOATS = tl.constexpr(LINE_BYTES // 4)
_POISON = tl.constexpr(int(Discard.POISON))


@triton.jit
def first_seen(position, SLIDING_WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first position that a query at `position` sees."""
    first = position * 0
    if SLIDING_WINDOW > 0:
        first = tl.maximum(position - SLIDING_WINDOW + 1, 0)
    if CHUNK > 0:
        first = tl.maximum(position // CHUNK * CHUNK, first)
    return first


@triton.jit
def steps_of(
    staged, length, rows,
    SLIDING_WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(steps that one pair of a request takes, context steps before them that no row sees)."""
    skipped = length * 0
    if SLIDING_WINDOW > 0 or CHUNK > 0:
        skipped = first_seen(length - rows, SLIDING_WINDOW, CHUNK) // BLOCK_N
    steps = tl.maximum(tl.cdiv(length - staged, BLOCK_N) - skipped, 0) + 1
    return tl.where(staged > 0, steps, 0), skipped


@triton.jit
def _sum_sum_max(a, b, c, d, e, f):
    return a + d, b + e, tl.maximum(c, f)


@triton.jit
def _sum_max(a, b, c, d):
    return a + c, tl.maximum(b, d)


@triton.jit
def cut(steps, PAIRS: tl.constexpr, MIN_STEPS: tl.constexpr, WHOLE: tl.constexpr):
    """(Steps a program, the number to a multiple of which each pair's steps are rounded up).

    With more pairs than programs each program may have whole pairs, if its steps are then at most
    WHOLE per cent more than equal parts have: nothing is left to be merged.
    """
    programs = tl.num_programs(0)
    busy = (steps > 0).to(tl.int32)
    steps_of_all, requests, most = tl.reduce((steps, busy, steps), 0, _sum_sum_max)
    all_steps, pairs = steps_of_all * PAIRS, requests * PAIRS
    least = tl.maximum(tl.cdiv(most, _MAX_PARTS), MIN_STEPS)
    part = tl.maximum(tl.cdiv(all_steps, programs), least)
    # Two parts that are large enough to give every pair programs of its own; the first is the
    # best there is for contexts of one length.
    aligned = tl.cdiv(most, tl.maximum(programs // tl.maximum(pairs, 1), 1))
    aligned = tl.minimum(aligned, tl.cdiv(all_steps, tl.maximum(programs - pairs, 1)))
    aligned = tl.maximum(aligned, least)
    is_cheap = (pairs <= programs) & (aligned <= part + part // 4 + 1)
    whole = tl.cdiv(pairs, programs) * most
    is_whole = (WHOLE > 0) & (pairs > programs) & (whole * 100 <= part * (100 + WHOLE))
    part, multiple = tl.where(is_whole, whole, part), tl.where(is_whole, most, 1)
    return tl.where(is_cheap, aligned, part), tl.where(is_cheap, aligned, multiple)


@triton.jit
def find_pair(until, at):
    """(the request that has the step `at`, the steps of the requests before it).

    `until` [MAX_REQUESTS] is the first step after each request's.
    """
    passed = until <= at
    return tl.reduce((passed.to(tl.int32), tl.where(passed, until, 0)), 0, _sum_max)


@triton.jit
def locate(at, end, before, steps, multiple, part):
    """A program's next work: (pair of the request, its first step here, the step after its last
    here, the first program that has a part of the pair, how many have one).

    `before` are the steps of earlier requests; `steps`, `multiple` and `part` as in `cut`.
    """
    slots = tl.cdiv(steps, multiple) * multiple
    pair = (at - before) // slots
    first = (at - before) % slots
    pair_at = at - first
    last = tl.minimum(slots, end - pair_at)
    first_program = pair_at // part
    parts = (pair_at + slots - 1) // part - first_program + 1
    return pair, first, last, first_program, parts


@triton.jit
def slot_of(first_program, other):
    """The slot of the workspace with part `other` of the pair that `first_program` begins.

    A program has two slots: the odd one for the part that begins a pair, which is the last thing
    that it did, the even one for a part that continues a pair, which is the first.
    """
    return 2 * (first_program + other) + (other == 0).to(tl.int32)


@triton.jit
def settle(
    accumulators, sums, counter, first_program, parts, left, acc0, acc1, best, total,
    ROWS: tl.constexpr, DIM: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """(True for the one program that has the pair's result, its accumulator, `best`, `total`).

    A part of several is left in the workspace; the last to arrive merges all of them, in order, and
    leaves `counter` at 0.
    """
    complete = parts == 1
    row = tl.arange(0, ROWS)
    half = row[:, None] * DIM + tl.arange(0, DIM // 2)[None, :]
    if not complete:
        leave_part(
            accumulators, sums, slot_of(first_program, tl.program_id(0) - first_program),
            row, half, left, acc0, acc1, best, total, ROWS, DIM,
        )  # fmt: skip
        tl.debug_barrier()  # every thread's stores come before this program's arrival
        earlier = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        complete = earlier == parts - 1
        if complete:
            tl.debug_barrier()  # and every thread's loads after it
            tl.store(counter, 0)
            acc0, acc1, best, total = merge_parts(
                accumulators, sums, first_program, parts, row, half, left, ROWS, DIM, MERGED
            )
    return complete, acc0, acc1, best, total


@triton.jit
def leave_part(
    accumulators, sums, slot, row, half, left, acc0, acc1, best, total, ROWS: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Write a partial result to a slot of the workspace.

    `row` [ROWS] numbers the rows, `half` [ROWS, DIM / 2] the elements of an accumulator's first
    half in a slot; the second half's are DIM / 2 further. Only the rows `left` [ROWS] of it are
    written, whole lines of L2. Maximum and sum are written of all: those of 16 rows are one line,
    and a 32-byte sector that is written in part may have to be completed from DRAM.
    """
    leave_at = accumulators + slot.to(tl.int64) * (ROWS * DIM) + half
    tl.store(leave_at, acc0, mask=left[:, None])
    tl.store(leave_at + DIM // 2, acc1, mask=left[:, None])
    tl.store(sums + slot * (2 * ROWS) + row, best)
    tl.store(sums + slot * (2 * ROWS) + ROWS + row, total)


@triton.jit
def merge_parts(
    accumulators, sums, first_program, parts, row, half, left,
    ROWS: tl.constexpr, DIM: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """(two halves of the accumulator, `best`, `total`) of a pair's parts, MERGED read at a time."""
    acc0, acc1, best, total = nothing_seen(ROWS, DIM // 2)
    for group in range(0, parts, MERGED):
        for i in tl.static_range(MERGED):
            # Past the last part it is read again, and has no weight.
            other = tl.minimum(group + i, parts - 1)
            slot = slot_of(first_program, other)
            left_at = accumulators + slot.to(tl.int64) * (ROWS * DIM) + half
            sums_at = sums + slot * (2 * ROWS) + row
            # Other processors wrote them: not from this one's L1.
            in_row = left[:, None]
            other_acc0 = tl.load(left_at, mask=in_row, other=0.0, cache_modifier=".cg")
            other_acc1 = tl.load(left_at + DIM // 2, mask=in_row, other=0.0, cache_modifier=".cg")
            other_best = tl.load(sums_at, cache_modifier=".cg")
            other_total = tl.load(sums_at + ROWS, cache_modifier=".cg")
            better = tl.maximum(best, other_best)
            shrink = tl.exp2(best - better)
            grow = tl.where(group + i < parts, tl.exp2(other_best - better), 0.0)
            acc0 = acc0 * shrink[:, None] + other_acc0 * grow[:, None]
            acc1 = acc1 * shrink[:, None] + other_acc1 * grow[:, None]
            total = total * shrink + other_total * grow
            best = better
    return acc0, acc1, best, total


@triton.jit
def discard_parts(
    accumulators, sums, first_program, parts, rows_left,
    ROWS: tl.constexpr, DIM: tl.constexpr, MERGED: tl.constexpr, DISCARD: tl.constexpr,
):  # fmt: skip
    """Drop what `merge_parts` has read, MERGED parts at a time; after the output was stored.

    Only the first `rows_left` rows of each accumulator were written.
    """
    lines: tl.constexpr = ROWS * DIM // _FLOATS
    sum_lines: tl.constexpr = 2 * ROWS // _FLOATS
    lane = tl.arange(0, MERGED * lines)
    line = lane % lines
    was_left = line // (DIM // _FLOATS) < rows_left
    if parts > 1:
        tl.debug_barrier()  # every thread's loads come before any thread's discards
        for group in range(0, parts, MERGED):
            other = group + lane // lines
            slot = slot_of(first_program, other)
            exists = other < parts
            tile = accumulators + slot.to(tl.int64) * (ROWS * DIM)
            _discard(tile + line * _FLOATS, exists & was_left, DISCARD)
            both = sums + slot * (2 * ROWS)
            _discard(both + line * _FLOATS, exists & (line < sum_lines), DISCARD)


@triton.jit
def _discard(line, wanted, DISCARD: tl.constexpr):
    """Drop, or poison, the lines that begin at the addresses `line` if `wanted`."""
    if DISCARD == _POISON:
        numbers = line[:, None] + tl.arange(0, _FLOATS)[None, :]
        tl.store(numbers, float("nan"), mask=wanted[:, None])
    else:
        _discard_l2(line, wanted)


@triton.jit
def _discard_l2(line, wanted):
    """Not pure: it may neither vanish, though its result is never read, nor move over a barrier.

    The predicate is the mask that Triton's inline assembly does not have.
    """
    tl.inline_asm_elementwise(
        """{
        .reg .pred wanted;
        setp.ne.s32 wanted, $2, 0;
        @wanted discard.global.L2 [$1], 128;
        mov.b32 $0, 0;
        }""",
        "=r,l,r",
        [line.to(tl.int64), wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
