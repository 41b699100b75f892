"""Triton kernels that write and read with and without L2's evict_last hint."""

import triton
import triton.language as tl


@triton.jit
def write_kernel(to, value, KEPT: tl.constexpr, BLOCK: tl.constexpr):
    """`value` plus its place, everywhere; KEPT: as lines to be evicted last."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbers = at + value
    if KEPT:
        tl.inline_asm_elementwise(
            """{
            .reg .b64 policy;
            createpolicy.fractional.L2::evict_last.b64 policy, 1.0;
            st.global.L2::cache_hint.b32 [$1], $2, policy;
            mov.b32 $0, 0;
            }""",
            "=r,l,r",
            [(to + at).to(tl.int64), numbers],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(to + at, numbers)


@triton.jit
def read_kernel(source, to, KEPT: tl.constexpr, BLOCK: tl.constexpr):
    """One sum a program; KEPT: with the same hint as the write."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if KEPT:
        numbers = tl.inline_asm_elementwise(
            """{
            .reg .b64 policy;
            createpolicy.fractional.L2::evict_last.b64 policy, 1.0;
            ld.global.L2::cache_hint.b32 $0, [$1], policy;
            }""",
            "=r,l",
            [(source + at).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        numbers = tl.load(source + at)
    tl.store(to + tl.program_id(0), tl.sum(numbers, axis=0))
