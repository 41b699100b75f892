"""Device code: a head's rows of K, V, queries and outputs, read and written in two halves.

A head's columns are worked on in two halves: first and second half, or for fp8 caches the even and
the odd ones, because two e4m3 numbers are moved as one 16-bit number (matrix units load no bytes
transposed).
"""

import triton
import triton.language as tl

from nwor_kernels.fp8 import E4M3_MAX

_E4M3_MAX = tl.constexpr(E4M3_MAX)


@triton.jit
def scale_of(scales, head, COUNT: tl.constexpr):
    """The scale of a head; 1 without scales."""
    if COUNT == 0:
        return 1.0
    else:
        return tl.load(scales + (head if COUNT > 1 else 0))


@triton.jit
def halves_of_rows(rows, exists, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, FP8: tl.constexpr):
    """Two halves [rows, HALF] of a head's columns in rows that begin at `rows`; 0 where none is."""
    if FP8:
        dim = tl.arange(0, 2 * HALF)
        in_head = exists[:, None] & (dim < HEAD_DIM)[None, :]
        tile = tl.load(rows[:, None] + dim[None, :], mask=in_head, other=0.0)
        return tl.split(tl.reshape(tile, [rows.shape[0], HALF, 2]))
    else:
        dim = tl.arange(0, HALF)
        in_first = exists[:, None] & (dim < HEAD_DIM)[None, :]
        in_second = exists[:, None] & (dim < HEAD_DIM - HALF)[None, :]
        first = tl.load(rows[:, None] + dim[None, :], mask=in_first, other=0.0)
        second = tl.load(rows[:, None] + HALF + dim[None, :], mask=in_second, other=0.0)
        return first, second


@triton.jit
def store_halves(
    rows, exists, first, second, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, FP8: tl.constexpr
):
    """The reverse of `halves_of_rows`."""
    if FP8:
        dim = tl.arange(0, 2 * HALF)
        in_head = exists[:, None] & (dim < HEAD_DIM)[None, :]
        tile = tl.reshape(tl.join(first, second), [rows.shape[0], 2 * HALF])
        tl.store(rows[:, None] + dim[None, :], tile, mask=in_head)
    else:
        dim = tl.arange(0, HALF)
        in_first = exists[:, None] & (dim < HEAD_DIM)[None, :]
        in_second = exists[:, None] & (dim < HEAD_DIM - HALF)[None, :]
        tl.store(rows[:, None] + dim[None, :], first, mask=in_first)
        tl.store(rows[:, None] + HALF + dim[None, :], second, mask=in_second)


@triton.jit
def halves_of_cache(rows, exists, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, FP8: tl.constexpr):
    """The same of rows in the cache."""
    if FP8:
        pairs = rows.to(tl.pointer_type(tl.int16), bitcast=True)
        dim = tl.arange(0, HALF)
        in_head = exists[:, None] & (dim < HEAD_DIM // 2)[None, :]
        return _unpack(tl.load(pairs[:, None] + dim[None, :], mask=in_head, other=0), FP8)
    else:
        return halves_of_rows(rows, exists, HEAD_DIM, HALF, FP8)


@triton.jit
def _unpack(pairs, FP8: tl.constexpr):
    """The e4m3 numbers in the low and the high bytes, in half precision, which holds them all."""
    if FP8 == 2:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 one, other;
            .reg .b32 both, others;
            mov.b32 {one, other}, $2;
            cvt.rn.f16x2.e4m3x2 both, one;
            cvt.rn.f16x2.e4m3x2 others, other;
            prmt.b32 $0, both, others, 0x5410;
            prmt.b32 $1, both, others, 0x7632;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        high = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return low.to(tl.float16), high.to(tl.float16)


@triton.jit
def as_read_back(tile, scale, FP8: tl.constexpr, COMPUTE: tl.constexpr):
    """Staged K or V as attention would read it from the cache, scale left out."""
    if FP8:
        tile = tl.div_rn(tile.to(tl.float32), scale)
        tile = tl.clamp(tile, -_E4M3_MAX, _E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
        tile = tile.to(tl.float8e4nv)
    return tile.to(COMPUTE)
