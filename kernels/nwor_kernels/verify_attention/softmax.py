"""Device code: attention's online softmax, and the merging of its partial results."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-1e30)


@triton.jit
def product(a, b, acc=None):
    """acc + a b in float32; float32 operands are not rounded to tf32."""
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def attend(
    q0, q1, k0, k1, v0, v1, visible, acc0, acc1, best, total, factor, softcap, slope, distance,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One step of online softmax; `best` and `total` are in base 2.

    `slope` [rows, 1], if there is one, times `distance` [rows, tokens] is added to the scores.

    `best` starts at a finite lowest number, so that rows that have seen nothing make no NaN.
    """
    scores = product(q1, tl.trans(k1), product(q0, tl.trans(k0))) * factor
    if SOFTCAP:
        # factor is in natural units here: tanh(x) = 1 - 2 / (exp(2x) + 1).
        scores = softcap * (1 - 2 / (tl.exp(2 * (scores / softcap)) + 1)) * LOG2_E
    if slope is not None:
        scores += slope * distance
    return take_in(scores, v0, v1, visible, acc0, acc1, best, total)


@triton.jit
def take_in(scores, v0, v1, visible, acc0, acc1, best, total):
    """Add these tokens' values by their scores in base 2, of which `visible` ones count."""
    scores = tl.where(visible, scores, float("-inf"))
    better = tl.maximum(best, tl.max(scores, axis=1))
    weights = tl.exp2(scores - better[:, None])
    shrink = tl.exp2(best - better)
    total = total * shrink + tl.sum(weights, axis=1)
    weights = weights.to(v0.dtype)
    acc0 = product(weights, v0, acc0 * shrink[:, None])
    acc1 = product(weights, v1, acc1 * shrink[:, None])
    return acc0, acc1, better, total


@triton.jit
def nothing_seen(ROWS: tl.constexpr, HALF: tl.constexpr):
    """(two halves of an accumulator, `best`, `total`) before the first step."""
    acc0 = tl.zeros([ROWS, HALF], tl.float32)
    acc1 = tl.zeros([ROWS, HALF], tl.float32)
    return acc0, acc1, tl.full([ROWS], _LOWEST, tl.float32), tl.zeros([ROWS], tl.float32)


@triton.jit
def slot_of(first_program, other):
    """The slot of the workspace that has the part `other` of a pair, whose first program this is.

    A program has two slots: the odd one for the part that begins a pair, which is the last thing
    that it did, the even one for a part that continues a pair, which is the first.
    """
    return 2 * (first_program + other) + (other == 0).to(tl.int32)


@triton.jit
def leave_part(
    accumulators, sums, slot, row, half, left, acc0, acc1, best, total, ROWS: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Write a partial result to a slot of the workspace.

    `row` [ROWS] numbers the rows, `half` [ROWS, DIM / 2] the elements of an accumulator's first
    half in a slot; the second half's are DIM / 2 further. Only the rows `left` [ROWS] of it are
    written, whole lines of L2. Maximum and sum are written of all: those of 16 rows are one line,
    and what is written of a 32-byte sector in part may have to be completed from DRAM.
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
