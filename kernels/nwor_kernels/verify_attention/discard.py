"""Device code: partial results that were merged are dropped from L2 instead of written to DRAM.

Once merged they are dead, but dirty: whatever comes next (a layer's weights) would push them out
to DRAM. PTX's `discard.L2` (sm_80 and later) gives 128 bytes up: to the memory model it is a weak
write of an indeterminate value, to the hardware a hint not to write the line back. So it is safe
exactly where overwriting the tiles would be:

- The parts' stores come before their arrival (release), ours before the merge (acquire): none can
  come after the discard.
- Our own loads: a barrier stands between them and the discards. The output was stored before it,
  so that no load that the output is made of is even on its way. They bypass L1 (.cg), so no stale
  line stays there.
- Other programs of the launch: a slot is written once a launch and read only by the one program
  that merges its pair; programs that write meanwhile write other slots.
- Later launches on the stream or in a CUDA graph write every number before they read it, and a
  kernel's writes, indeterminate ones too, are done before the next kernel begins. Launches that
  share a workspace must not overlap, with or without discards, and none may be started early
  (programmatic dependent launch) before its predecessor is done.
- Whole lines only: a slot's tiles are multiples of 128 bytes (16 rows or more, 32 columns or more)
  in tensors that begin at such a multiple (`VerifyWorkspace.check`), and nothing else is there;
  the arrival counters are a tensor of their own.

The L2 of an H100 or H200 is in two partitions. The instruction is as legal there as a store and
ordered like one; but whether a discard drops a line whose home is the other partition is written
nowhere that we know of: only counters of DRAM writes can tell what it saves.
"""

import triton
import triton.language as tl

from nwor_kernels.verify_attention.softmax import slot_of
from nwor_kernels.verify_attention.tuning import Discard

LINE_BYTES = 128
"""What one discard drops, and how its address must be aligned."""

_FLOATS = tl.constexpr(LINE_BYTES // 4)
_POISON = tl.constexpr(int(Discard.POISON))


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
    each = tl.arange(0, MERGED * lines)
    line = each % lines
    was_left = line // (DIM // _FLOATS) < rows_left
    if parts > 1:
        tl.debug_barrier()  # every thread's loads come before any thread's discards
        for group in range(0, parts, MERGED):
            other = group + each // lines
            slot = slot_of(first_program, other)
            exists = other < parts
            tile = accumulators + slot.to(tl.int64) * (ROWS * DIM)
            _discard(tile + line * _FLOATS, exists & was_left, DISCARD)
            both = sums + slot * (2 * ROWS)
            _discard(both + line * _FLOATS, exists & (line < sum_lines), DISCARD)


@triton.jit
def _discard(line, wanted, DISCARD: tl.constexpr):
    """Drop, or poison, the lines that begin at the addresses `line` where `wanted`."""
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
