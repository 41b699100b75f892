"""Device code: the steps of a batch's contexts, cut into equal parts, one a program.

Cuts are moved to where pairs begin if that costs little: then no program has parts of two pairs.
"""

import triton
import triton.language as tl

from nwor_kernels.verify_attention.tuning import MAX_PARTS

_MAX_PARTS = tl.constexpr(MAX_PARTS)


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
    """(steps a program, of which a pair's steps are rounded up to a multiple).

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
