"""Device code: a step of attention: tiles of K, V and queries, and the online softmax over them.

A head's columns are worked on in two halves: first and second half, or for fp8 caches the even and
the odd ones, because two e4m3 numbers are moved as one 16-bit number (matrix units load no bytes
transposed).
"""

import triton
import triton.language as tl

from nwor_kernels.fp8 import E4M3_MAX

_E4M3_MAX = tl.constexpr(E4M3_MAX)
LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-1e30)


@triton.jit
def scale_of(scales, head, COUNT: tl.constexpr):
    """The scale of a head; 1 without scales."""
    if COUNT == 0:
        return 1.0
    else:
        return tl.load(scales + (head if COUNT > 1 else 0))


@triton.jit
def halves_of_rows(rows, exists, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, FP8: tl.constexpr):
    """Two halves [rows, HALF] of a head's columns of the rows at `rows`; 0 if not `exists`."""
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
    """Both halves of rows in the cache."""
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


@triton.jit
def product(a, b, acc=None):
    """acc + a b in float32; float32 operands are not rounded to tf32."""
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def attend(
    q0, q1, k0, k1, v0, v1, visible, acc0, acc1, best, total, factor, softcap,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One step of online softmax; `best` and `total` are in base 2.

    `best` starts at a finite lowest number, so that rows that have seen nothing make no NaN.
    """
    scores = product(q1, tl.trans(k1), product(q0, tl.trans(k0))) * factor
    if SOFTCAP:
        # factor is in natural units here: tanh(x) = 1 - 2 / (exp(2x) + 1).
        scores = softcap * (1 - 2 / (tl.exp(2 * (scores / softcap)) + 1)) * LOG2_E
    return take_in(scores, v0, v1, visible, acc0, acc1, best, total)


@triton.jit
def take_in(scores, v0, v1, visible, acc0, acc1, best, total):
    """Add the values of `visible` tokens by their scores in base 2."""
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
