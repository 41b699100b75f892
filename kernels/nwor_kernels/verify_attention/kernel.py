"""Verification attention in Triton: committed context from the paged cache, the window's K/V from
where it is staged, in one launch.

All query rows of one request that share a K/V head (the GQA ratio times the window's length,
padded to a matrix tile) are attended together: a pair. A pair's work is its context in steps of
BLOCK_N tokens and one last step for the window. The steps of all pairs, laid end to end, are cut
into equal parts, one a program; each program finds its part from the lengths on the device. So a
fixed grid serves short, long and mixed contexts alike, in a CUDA graph too. Cuts are moved to
where pairs begin if that costs little: then no program has parts of two pairs. A pair that was
cut is merged by log-sum-exp by whichever of its programs finishes last: nobody waits, and there
is no second launch.

A head's columns are worked on in two halves: first and second half, or for fp8 caches the even and
the odd ones, because two e4m3 numbers are moved as one 16-bit number (matrix units load no bytes
transposed).

For fp8 caches the staged K/V are seen as if they had been written and read back: quantisation
happens when they are read here, with the stock write's rounding; commit rounds the same way.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nwor_kernels.fp8 import E4M3_CACHE_DTYPES, E4M3_MAX
from nwor_kernels.verify_attention.workspace import (
    MAX_QUERY_LEN,
    Tuning,
    VerifyWorkspace,
    launch_shape,
    unsupported_reason,
)

__all__ = [
    "MAX_QUERY_LEN",
    "Tuning",
    "VerifyWorkspace",
    "unsupported_reason",
    "verify_attention_triton",
]

MAX_PARTS = 32
"""About the most programs that a pair is cut into: merging takes longer with each."""

_E4M3_MAX = tl.constexpr(E4M3_MAX)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-1e30)
_MAX_PARTS = tl.constexpr(MAX_PARTS)


def verify_attention_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    staged_start: Tensor,
    staged_end: Tensor,
    output: Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    sliding_window: int = -1,
    softcap: float = 0.0,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    workspace: VerifyWorkspace | None = None,
    tuning: Tuning | None = None,
) -> None:
    """Attend the queries of every request with staged tokens; other output rows stay as they are.

    Safe in a CUDA graph: nothing is read on the host, and nothing but a missing workspace is
    allocated.

    Args:
        query: [num_tokens, heads, head_dim]; float8_e4m3fn where vLLM quantises queries.
        key, value: [rows, kv_heads, head_dim], the staged source, last dimension contiguous.
        kv_cache: [blocks, kv_heads, block_size, 2 * head_dim], K then V, last dimension
            contiguous; of the dtype of `key`, or e4m3 (uint8 is taken as e4m3).
        query_start_loc: [requests + 1] int32, non-decreasing.
        seq_lens: [requests] int32, tokens of each request, this step's included.
        block_table: [requests, max blocks] int32.
        staged_start, staged_end: [requests] int32: rows start..end-1 of `key` and `value` are the
            last end - start tokens of the request. None staged: the request is left alone.
        output: [num_tokens, heads, head_dim], written in place.
        scale: factor on the scores.
        max_query_len: most query rows of a request with staged tokens.
        max_seq_len: upper bound of `seq_lens`, the model's own under graph capture; the work is
            divided by the actual lengths.
        sliding_window: positions that a query sees, its own included; -1: all.
        softcap: if > 0, scores become softcap * tanh(scores / softcap).
        q_scale, k_scale, v_scale: float32, [1] or [kv_heads]; for fp8 caches.
        workspace: from `VerifyWorkspace.create`; one is made if there is none.
        tuning: the launch's shape, for benchmarks.

    Raises:
        ValueError: the kernel does not serve this shape, or the workspace is too small for it.
    """
    requests = seq_lens.shape[0]
    heads, head_dim = query.shape[1:]
    kv_heads, block_size = kv_cache.shape[1:3]
    reason = unsupported_reason(head_dim, max_query_len, key.dtype, kv_cache.dtype)
    if reason:
        raise ValueError(f"verify_attention does not serve this: {reason}")
    if requests == 0:
        return
    quantised = kv_cache.dtype in E4M3_CACHE_DTYPES
    if kv_cache.dtype == torch.uint8:
        kv_cache = kv_cache.view(torch.float8_e4m3fn)
    shape = launch_shape(
        max_query_len, heads // kv_heads, head_dim, kv_cache.element_size(), query.device, tuning
    )
    if workspace is None:
        workspace = VerifyWorkspace.create(
            max_requests=requests,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_query_len=max_query_len,
            device=query.device,
            programs=shape.programs,
        )
    workspace.check(shape, requests * kv_heads * shape.row_tiles)
    steps = requests * kv_heads * shape.row_tiles * (triton.cdiv(max_seq_len, shape.block_n) + 1)
    _verify_kernel[(min(shape.programs, triton.cdiv(steps, shape.min_tiles)),)](
        query,
        key,
        value,
        kv_cache,
        query_start_loc,
        seq_lens,
        block_table,
        staged_start,
        staged_end,
        output,
        q_scale,
        k_scale if quantised else None,
        v_scale if quantised else None,
        workspace.accumulators,
        workspace.sums,
        workspace.arrived,
        scale,
        softcap,
        requests,
        block_table.stride(0),
        query_start_loc.stride(0),
        seq_lens.stride(0),
        staged_start.stride(0),
        staged_end.stride(0),
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *kv_cache.stride()[:3],
        *output.stride()[:2],
        Q_SCALES=0 if q_scale is None else q_scale.numel(),
        K_SCALES=0 if k_scale is None or not quantised else k_scale.numel(),
        V_SCALES=0 if v_scale is None or not quantised else v_scale.numel(),
        FP8=_fp8_way(quantised),
        COMPUTE=_compute_type(key, quantised),
        SLIDING_WINDOW=sliding_window,
        SOFTCAP=softcap > 0,
        RATIO=heads // kv_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        MAX_REQUESTS=max(32, triton.next_power_of_2(requests)),
        ROWS=shape.rows,
        ROW_TILES=shape.row_tiles,
        DIM=shape.dim,
        BLOCK_N=shape.block_n,
        WINDOW=max(16, triton.next_power_of_2(max_query_len)),
        MIN_STEPS=shape.min_tiles,
        MERGED=max(1, min(4, 64 * 128 // (shape.rows * shape.dim))),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        maxnreg=shape.max_registers,
    )


def _fp8_way(quantised: bool) -> int:
    """0: no fp8. 2: e4m3 is unpacked by PTX, 1: in Triton's language, slower but interpreted too."""
    return (1 if triton.knobs.runtime.interpret else 2) if quantised else 0


def _compute_type(key: Tensor, quantised: bool) -> tl.dtype:
    """What the products are made of. Half precision holds every e4m3 number, and the GPU converts
    e4m3 to it in one instruction."""
    if key.dtype == torch.float32:
        return tl.float32
    return tl.float16 if quantised or key.dtype == torch.float16 else tl.bfloat16


@triton.jit
def _product(a, b, acc=None):
    """acc + a b in float32; float32 operands are not rounded to tf32."""
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _scale_of(scales, head, COUNT: tl.constexpr):
    """The scale of a head; 1 without scales."""
    if COUNT == 0:
        return 1.0
    else:
        return tl.load(scales + (head if COUNT > 1 else 0))


@triton.jit
def _halves_of_rows(rows, exists, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, FP8: tl.constexpr):
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
def _store_halves(
    rows, exists, first, second, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, FP8: tl.constexpr
):
    """The reverse of `_halves_of_rows`."""
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
def _halves_of_cache(rows, exists, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, FP8: tl.constexpr):
    """The same of rows in the cache."""
    if FP8:
        pairs = rows.to(tl.pointer_type(tl.int16), bitcast=True)
        dim = tl.arange(0, HALF)
        in_head = exists[:, None] & (dim < HEAD_DIM // 2)[None, :]
        return _unpack(tl.load(pairs[:, None] + dim[None, :], mask=in_head, other=0), FP8)
    else:
        return _halves_of_rows(rows, exists, HEAD_DIM, HALF, FP8)


@triton.jit
def _unpack(pairs, FP8: tl.constexpr):
    """The e4m3 numbers in the low and in the high bytes, in half precision, which holds them all."""
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
def _as_read_back(tile, scale, FP8: tl.constexpr, COMPUTE: tl.constexpr):
    """Staged K or V as attention would read it from the cache, scale left out."""
    if FP8:
        tile = tl.div_rn(tile.to(tl.float32), scale)
        tile = tl.clamp(tile, -_E4M3_MAX, _E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
        tile = tile.to(tl.float8e4nv)
    return tile.to(COMPUTE)


@triton.jit
def _attend(
    q0, q1, k0, k1, v0, v1, visible, acc0, acc1, best, total, factor, softcap,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One step of online softmax; `best` and `total` are in base 2.

    `best` starts at a finite lowest number, so that rows that have seen nothing make no NaN.
    """
    scores = _product(q1, tl.trans(k1), _product(q0, tl.trans(k0))) * factor
    if SOFTCAP:
        # factor is in natural units here: tanh(x) = 1 - 2 / (exp(2x) + 1).
        scores = softcap * (1 - 2 / (tl.exp(2 * (scores / softcap)) + 1)) * _LOG2_E
    scores = tl.where(visible, scores, float("-inf"))
    better = tl.maximum(best, tl.max(scores, axis=1))
    weights = tl.exp2(scores - better[:, None])
    shrink = tl.exp2(best - better)
    total = total * shrink + tl.sum(weights, axis=1)
    weights = weights.to(v0.dtype)
    acc0 = _product(weights, v0, acc0 * shrink[:, None])
    acc1 = _product(weights, v1, acc1 * shrink[:, None])
    return acc0, acc1, better, total


@triton.jit
def _steps_of(
    staged, length, rows, SLIDING_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """(steps that one pair of a request takes, context steps before them that no row sees)."""
    skipped = length * 0
    if SLIDING_WINDOW > 0:
        skipped = tl.maximum(length - rows - SLIDING_WINDOW + 1, 0) // BLOCK_N
    steps = tl.maximum(tl.cdiv(length - staged, BLOCK_N) - skipped, 0) + 1
    return tl.where(staged > 0, steps, 0), skipped


@triton.jit
def _sum_sum_max(a, b, c, d, e, f):
    return a + d, b + e, tl.maximum(c, f)


@triton.jit
def _sum_max(a, b, c, d):
    return a + c, tl.maximum(b, d)


@triton.jit
def _cut(steps, PAIRS: tl.constexpr, MIN_STEPS: tl.constexpr):
    """(steps a program, of which a pair's steps are rounded up to a multiple)."""
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
    return tl.where(is_cheap, aligned, part), tl.where(is_cheap, aligned, 1)


@triton.jit(
    do_not_specialize=["scale", "softcap", "requests"],
    do_not_specialize_on_alignment=[
        "query_start_loc", "seq_lens", "block_table", "staged_start", "staged_end",
    ],
)  # fmt: skip
def _verify_kernel(
    query,
    key,
    value,
    cache,
    query_start_loc,
    seq_lens,
    block_table,
    staged_start,
    staged_end,
    output,
    q_scale,
    k_scale,
    v_scale,
    accumulators,
    sums,
    arrived,
    scale,
    softcap,
    requests,
    table_row,
    query_start_one,
    seq_len_one,
    staged_start_one,
    staged_end_one,
    query_row,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    cache_block,
    cache_head,
    cache_offset,
    output_row,
    output_head,
    Q_SCALES: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    FP8: tl.constexpr,
    COMPUTE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    RATIO: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_REQUESTS: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    MIN_STEPS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """One program: an equal part of all steps. A step of which the whole batch has S is numbered
    0..S-1, request by request, pair by pair, the window's step last."""
    PAIRS: tl.constexpr = KV_HEADS * ROW_TILES
    program = tl.program_id(0)
    each_request = tl.arange(0, MAX_REQUESTS)
    in_batch = each_request < requests
    starts = tl.load(staged_start + each_request * staged_start_one, mask=in_batch, other=0)
    ends = tl.load(staged_end + each_request * staged_end_one, mask=in_batch, other=0)
    lengths = tl.load(seq_lens + each_request * seq_len_one, mask=in_batch, other=0)
    row_counts = 0
    if SLIDING_WINDOW > 0:
        to_rows = query_start_loc + each_request * query_start_one
        row_counts = tl.load(to_rows + query_start_one, mask=in_batch, other=0)
        row_counts -= tl.load(to_rows, mask=in_batch, other=0)
    steps_of_each, _unseen = _steps_of(ends - starts, lengths, row_counts, SLIDING_WINDOW, BLOCK_N)
    part, multiple = _cut(steps_of_each, PAIRS, MIN_STEPS)
    until = tl.cumsum(tl.cdiv(steps_of_each, multiple) * multiple, axis=0) * PAIRS
    at = program * part
    end = tl.minimum(at + part, tl.max(until, axis=0))

    HALF: tl.constexpr = DIM // 2
    row = tl.arange(0, ROWS)
    half = tl.arange(0, HALF)
    lane = tl.arange(0, BLOCK_N)
    staged = tl.arange(0, WINDOW)
    while at < end:
        # Which pair, which of its steps, and which programs have the others?
        passed = until <= at
        request, before = tl.reduce(
            (passed.to(tl.int32), tl.where(passed, until, 0)), 0, _sum_max
        )
        first_staged = tl.load(staged_start + request * staged_start_one)
        num_staged = tl.load(staged_end + request * staged_end_one) - first_staged
        seq_len = tl.load(seq_lens + request * seq_len_one)
        first_row = tl.load(query_start_loc + request * query_start_one)
        num_rows = tl.load(query_start_loc + (request + 1) * query_start_one) - first_row
        steps, skipped = _steps_of(num_staged, seq_len, num_rows, SLIDING_WINDOW, BLOCK_N)
        pair_slots = tl.cdiv(steps, multiple) * multiple
        pair = (at - before) // pair_slots
        first = (at - before) % pair_slots
        pair_at = at - first
        last = tl.minimum(pair_slots, end - pair_at)
        first_program = pair_at // part
        parts = (pair_at + pair_slots - 1) // part - first_program + 1
        head, row_tile = pair // ROW_TILES, pair % ROW_TILES
        context = seq_len - num_staged
        first_position = seq_len - num_rows

        # A step's blocks are looked up one step ahead: only K and V are worth a pipeline's buffers.
        table = block_table + request.to(tl.int64) * table_row
        token = (skipped + first) * BLOCK_N + lane
        block = tl.load(table + token // BLOCK_SIZE, mask=token < context, other=0)

        folded = row_tile * ROWS + row
        number, in_group = folded // RATIO, folded % RATIO
        is_row = number < num_rows
        position = first_position + tl.where(is_row, number, 0)  # padding rows see something
        token_row, attended = (first_row + number).to(tl.int64), head * RATIO + in_group
        q = query + token_row * query_row + attended * query_head
        q0, q1 = _halves_of_rows(q, is_row, HEAD_DIM, HALF, FP8)
        q0, q1 = q0.to(COMPUTE), q1.to(COMPUTE)

        # The window's K/V are asked for now and attended last: their latency hides here.
        has_window = last >= steps
        is_staged = staged < tl.where(has_window, num_staged, 0)
        source = (first_staged + staged).to(tl.int64)
        staged_k0, staged_k1 = _halves_of_rows(
            key + source * key_row + head * key_head, is_staged, HEAD_DIM, HALF, FP8
        )
        staged_v0, staged_v1 = _halves_of_rows(
            value + source * value_row + head * value_head, is_staged, HEAD_DIM, HALF, FP8
        )

        kept_k_scale = _scale_of(k_scale, head, K_SCALES)
        kept_v_scale = _scale_of(v_scale, head, V_SCALES)
        factor = scale * kept_k_scale * _scale_of(q_scale, head, Q_SCALES)
        if not SOFTCAP:
            factor = factor * _LOG2_E

        acc0 = tl.zeros([ROWS, HALF], tl.float32)
        acc1 = tl.zeros([ROWS, HALF], tl.float32)
        best = tl.full([ROWS], _LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        of_head = cache + head.to(tl.int64) * cache_head
        seen_until = tl.minimum(position + 1, context)
        for _step in range(first, tl.minimum(last, steps - 1)):
            inside = token < context
            keys = of_head + block.to(tl.int64) * cache_block + (token % BLOCK_SIZE) * cache_offset
            k0, k1 = _halves_of_cache(keys, inside, HEAD_DIM, HALF, FP8)
            v0, v1 = _halves_of_cache(keys + HEAD_DIM, inside, HEAD_DIM, HALF, FP8)
            visible = token[None, :] < seen_until[:, None]
            if SLIDING_WINDOW > 0:
                visible = visible & (token[None, :] > position[:, None] - SLIDING_WINDOW)
            acc0, acc1, best, total = _attend(
                q0, q1, k0, k1, v0, v1, visible, acc0, acc1, best, total, factor, softcap, SOFTCAP
            )
            token += BLOCK_N
            block = tl.load(table + token // BLOCK_SIZE, mask=token < context, other=0)

        if has_window:
            read_k0 = _as_read_back(staged_k0, kept_k_scale, FP8, COMPUTE)
            read_k1 = _as_read_back(staged_k1, kept_k_scale, FP8, COMPUTE)
            read_v0 = _as_read_back(staged_v0, kept_v_scale, FP8, COMPUTE)
            read_v1 = _as_read_back(staged_v1, kept_v_scale, FP8, COMPUTE)
            at_window = context + staged
            in_sight = is_staged[None, :] & (at_window[None, :] <= position[:, None])
            if SLIDING_WINDOW > 0:
                in_sight = in_sight & (at_window[None, :] > position[:, None] - SLIDING_WINDOW)
            acc0, acc1, best, total = _attend(
                q0, q1, read_k0, read_k1, read_v0, read_v1, in_sight,
                acc0, acc1, best, total, factor, softcap, SOFTCAP,
            )  # fmt: skip

        complete = parts == 1
        tile = row[:, None] * DIM + half[None, :]
        if not complete:
            # Leave the partial result; the last to arrive merges all of them, in order.
            slot = 2 * program + (program == first_program).to(tl.int32)
            leave_at = accumulators + slot.to(tl.int64) * (ROWS * DIM) + tile
            tl.store(leave_at, acc0)
            tl.store(leave_at + HALF, acc1)
            tl.store(sums + slot * (2 * ROWS) + row, best)
            tl.store(sums + slot * (2 * ROWS) + ROWS + row, total)
            tl.debug_barrier()  # every thread's stores come before this program's arrival
            counter = arrived + request * PAIRS + pair
            earlier = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            complete = earlier == parts - 1
            if complete:
                tl.debug_barrier()  # and every thread's loads after it
                tl.store(counter, 0)
                acc0 = tl.zeros([ROWS, HALF], tl.float32)
                acc1 = tl.zeros([ROWS, HALF], tl.float32)
                best = tl.full([ROWS], _LOWEST, tl.float32)
                total = tl.zeros([ROWS], tl.float32)
                for group in range(0, parts, MERGED):
                    for i in tl.static_range(MERGED):
                        # Past the last part it is read again, and has no weight.
                        other = tl.minimum(group + i, parts - 1)
                        slot = 2 * (first_program + other) + (other == 0).to(tl.int32)
                        left_at = accumulators + slot.to(tl.int64) * (ROWS * DIM) + tile
                        sums_at = sums + slot * (2 * ROWS) + row
                        other_acc0 = tl.load(left_at, cache_modifier=".cg")
                        other_acc1 = tl.load(left_at + HALF, cache_modifier=".cg")
                        other_best = tl.load(sums_at, cache_modifier=".cg")
                        other_total = tl.load(sums_at + ROWS, cache_modifier=".cg")
                        better = tl.maximum(best, other_best)
                        shrink = tl.exp2(best - better)
                        grow = tl.where(group + i < parts, tl.exp2(other_best - better), 0.0)
                        acc0 = acc0 * shrink[:, None] + other_acc0 * grow[:, None]
                        acc1 = acc1 * shrink[:, None] + other_acc1 * grow[:, None]
                        total = total * shrink + other_total * grow
                        best = better
        if complete:
            by = (kept_v_scale / total)[:, None]
            rows_at = output + token_row * output_row + attended * output_head
            _store_halves(rows_at, is_row, acc0 * by, acc1 * by, HEAD_DIM, HALF, FP8)
        at += last - first
