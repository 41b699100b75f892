"""Verification attention in Triton: committed context from the paged cache, the window's K/V from
where it is staged, in one launch.

All query rows of one request that share a K/V head (the GQA ratio times the window's length,
padded to a matrix tile) are attended together: a pair. A pair's work is its context in steps of
BLOCK_N tokens and one last step for the window. The steps of all pairs, laid end to end, are cut
into equal parts, one a program; each program finds its part from the lengths on the device. So a
fixed grid serves short, long and mixed contexts alike, in a CUDA graph too. A pair that was cut is
merged by log-sum-exp by whichever of its programs finishes last: nobody waits, and there is no
second launch.

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
        QUANTISED=quantised,
        COMPUTE=_compute_type(key, quantised),
        SLIDING_WINDOW=sliding_window,
        SOFTCAP=softcap > 0,
        RATIO=heads // kv_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        MAX_REQUESTS=max(16, triton.next_power_of_2(requests)),
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


def _compute_type(key: Tensor, quantised: bool) -> tl.dtype:
    """What the products are made of. Half precision holds every e4m3 number, and the GPU converts
    e4m3 to it in one instruction."""
    if key.dtype == torch.float32:
        return tl.float32
    return tl.float16 if quantised or key.dtype == torch.float16 else tl.bfloat16


@triton.jit
def _product(a, b):
    """Matrix product in float32; float32 operands are not rounded to tf32."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _converted(tile, QUANTISED: tl.constexpr, COMPUTE: tl.constexpr):
    if QUANTISED:
        return tl.inline_asm_elementwise(
            """{ .reg .b16 a, b; mov.b32 {a, b}, $2;
            cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }""",
            "=r,=r,r", [tile], dtype=tl.float16, is_pure=True, pack=4)
    else:
        return tile


@triton.jit
def _scale_of(scales, head, COUNT: tl.constexpr):
    """The scale of a head; 1 without scales."""
    if COUNT == 0:
        return 1.0
    else:
        return tl.load(scales + (head if COUNT > 1 else 0))


@triton.jit
def _as_read_back(tile, scale, QUANTISED: tl.constexpr, COMPUTE: tl.constexpr):
    """Staged K or V as attention would read it from the cache, scale left out."""
    if QUANTISED:
        tile = tl.div_rn(tile.to(tl.float32), scale)
        tile = tl.clamp(tile, -_E4M3_MAX, _E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
        tile = tile.to(tl.float8e4nv)
    return tile.to(COMPUTE)


@triton.jit
def _attend(
    q, k, v, visible, acc, best, total, factor, softcap, SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr
):
    """One step of online softmax; `best` and `total` are in base 2.

    `best` starts at a finite lowest number, so that rows that have seen nothing make no NaN.
    """
    scores = _product(q, tl.trans(k)) * factor
    if SOFTCAP:
        # factor is in natural units here: tanh(x) = 1 - 2 / (exp(2x) + 1).
        scores = softcap * (1 - 2 / (tl.exp(2 * (scores / softcap)) + 1)) * _LOG2_E
    scores = tl.where(visible, scores, float("-inf"))
    better = tl.maximum(best, tl.max(scores, axis=1))
    weights = tl.exp2(scores - better[:, None])
    shrink = tl.exp2(best - better)
    total = total * shrink + tl.sum(weights, axis=1)
    acc = acc * shrink[:, None] + _product(weights.to(COMPUTE), v)
    return acc, better, total


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
    QUANTISED: tl.constexpr,
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
    steps = tl.cdiv(lengths - (ends - starts), BLOCK_N) + 1
    if SLIDING_WINDOW > 0:
        to_rows = query_start_loc + each_request * query_start_one
        row_counts = tl.load(to_rows + query_start_one, mask=in_batch, other=0)
        row_counts -= tl.load(to_rows, mask=in_batch, other=0)
        steps -= tl.maximum(lengths - row_counts - SLIDING_WINDOW + 1, 0) // BLOCK_N
    steps = tl.where(ends > starts, tl.maximum(steps, 1), 0)
    until = tl.cumsum(steps, axis=0) * PAIRS
    all_steps = tl.max(until, axis=0)
    most_steps = tl.max(steps, axis=0)
    part = tl.maximum(tl.cdiv(all_steps, tl.num_programs(0)), tl.cdiv(most_steps, _MAX_PARTS))
    part = tl.maximum(part, MIN_STEPS)
    at = program * part
    end = tl.minimum(at + part, all_steps)

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    is_dim = dim < HEAD_DIM
    lane = tl.arange(0, BLOCK_N)
    staged = tl.arange(0, WINDOW)
    while at < end:
        # Which pair, which of its steps, and which programs have the others?
        request = tl.sum((until <= at).to(tl.int32), axis=0)
        pair_steps = tl.sum(tl.where(each_request == request, steps, 0), axis=0)
        before = tl.sum(tl.where(each_request == request, until, 0), axis=0) - pair_steps * PAIRS
        pair = (at - before) // pair_steps
        first = (at - before) % pair_steps
        last = tl.minimum(pair_steps, first + end - at)
        pair_at = at - first
        first_program = pair_at // part
        parts = (pair_at + pair_steps - 1) // part - first_program + 1
        head, row_tile = pair // ROW_TILES, pair % ROW_TILES

        first_staged = tl.load(staged_start + request * staged_start_one)
        num_staged = tl.load(staged_end + request * staged_end_one) - first_staged
        seq_len = tl.load(seq_lens + request * seq_len_one)
        first_row = tl.load(query_start_loc + request * query_start_one)
        num_rows = tl.load(query_start_loc + (request + 1) * query_start_one) - first_row
        context = seq_len - num_staged
        first_position = seq_len - num_rows

        folded = row_tile * ROWS + row
        number, in_group = folded // RATIO, folded % RATIO
        is_row = number < num_rows
        position = first_position + tl.where(is_row, number, 0)  # padding rows see something
        keep = is_row[:, None] & is_dim[None, :]
        query_at = (first_row + number).to(tl.int64) * query_row
        query_at += (head * RATIO + in_group) * query_head
        q = tl.load(query + query_at[:, None] + dim[None, :], mask=keep, other=0.0).to(COMPUTE)

        # The window's K/V are asked for now and attended last: their latency hides here.
        has_window = last == pair_steps
        is_staged = staged < tl.where(has_window, num_staged, 0)
        in_window = is_staged[:, None] & is_dim[None, :]
        source = (first_staged + staged).to(tl.int64)
        key_at = source[:, None] * key_row + head * key_head + dim[None, :]
        value_at = source[:, None] * value_row + head * value_head + dim[None, :]
        staged_k = tl.load(key + key_at, mask=in_window, other=0.0)
        staged_v = tl.load(value + value_at, mask=in_window, other=0.0)

        kept_k_scale = _scale_of(k_scale, head, K_SCALES)
        kept_v_scale = _scale_of(v_scale, head, V_SCALES)
        factor = scale * kept_k_scale * _scale_of(q_scale, head, Q_SCALES)
        if not SOFTCAP:
            factor = factor * _LOG2_E

        acc = tl.zeros([ROWS, DIM], tl.float32)
        best = tl.full([ROWS], _LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        skipped = 0
        if SLIDING_WINDOW > 0:
            skipped = tl.maximum(first_position - SLIDING_WINDOW + 1, 0) // BLOCK_N
        table = block_table + request.to(tl.int64) * table_row
        of_head = cache + head.to(tl.int64) * cache_head
        seen_until = tl.minimum(position + 1, context)
        # A step's blocks are looked up one step ahead: only K and V are worth a pipeline's buffers.
        token = (skipped + first) * BLOCK_N + lane
        block = tl.load(table + token // BLOCK_SIZE, mask=token < context, other=0)
        for _ in range(first, tl.minimum(last, pair_steps - 1)):
            inside = token < context
            cache_at = block.to(tl.int64) * cache_block + (token % BLOCK_SIZE) * cache_offset
            keys = of_head + cache_at[:, None] + dim[None, :]
            readable = inside[:, None] & is_dim[None, :]
            k = tl.load(keys, mask=readable, other=0.0).to(COMPUTE)
            v = tl.load(keys + HEAD_DIM, mask=readable, other=0.0).to(COMPUTE)
            visible = token[None, :] < seen_until[:, None]
            if SLIDING_WINDOW > 0:
                visible = visible & (token[None, :] > position[:, None] - SLIDING_WINDOW)
            acc, best, total = _attend(
                q, k, v, visible, acc, best, total, factor, softcap, SOFTCAP, COMPUTE
            )
            token += BLOCK_N
            block = tl.load(table + token // BLOCK_SIZE, mask=token < context, other=0)

        if has_window:
            read_k = _as_read_back(staged_k, kept_k_scale, QUANTISED, COMPUTE)
            read_v = _as_read_back(staged_v, kept_v_scale, QUANTISED, COMPUTE)
            at_window = context + staged
            in_sight = is_staged[None, :] & (at_window[None, :] <= position[:, None])
            if SLIDING_WINDOW > 0:
                in_sight = in_sight & (at_window[None, :] > position[:, None] - SLIDING_WINDOW)
            acc, best, total = _attend(
                q, read_k, read_v, in_sight, acc, best, total, factor, softcap, SOFTCAP, COMPUTE
            )

        complete = parts == 1
        tile = row[:, None] * DIM + dim[None, :]
        if not complete:
            # Leave the partial result; the last to arrive merges all of them, in order.
            slot = 2 * program + (program == first_program).to(tl.int32)
            tl.store(accumulators + slot.to(tl.int64) * (ROWS * DIM) + tile, acc)
            tl.store(sums + slot * (2 * ROWS) + row, best)
            tl.store(sums + slot * (2 * ROWS) + ROWS + row, total)
            tl.debug_barrier()  # every thread's stores come before this program's arrival
            counter = arrived + request * PAIRS + pair
            earlier = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            complete = earlier == parts - 1
            if complete:
                tl.debug_barrier()  # and every thread's loads after it
                tl.store(counter, 0)
                acc = tl.zeros([ROWS, DIM], tl.float32)
                best = tl.full([ROWS], _LOWEST, tl.float32)
                total = tl.zeros([ROWS], tl.float32)
                for group in range(0, parts, MERGED):
                    for i in tl.static_range(MERGED):
                        # Past the last part it is read again, and has no weight.
                        other = tl.minimum(group + i, parts - 1)
                        slot = 2 * (first_program + other) + (other == 0).to(tl.int32)
                        sums_at = sums + slot * (2 * ROWS) + row
                        other_acc = tl.load(
                            accumulators + slot.to(tl.int64) * (ROWS * DIM) + tile,
                            cache_modifier=".cg",
                        )
                        other_best = tl.load(sums_at, cache_modifier=".cg")
                        other_total = tl.load(sums_at + ROWS, cache_modifier=".cg")
                        better = tl.maximum(best, other_best)
                        shrink = tl.exp2(best - better)
                        grow = tl.where(group + i < parts, tl.exp2(other_best - better), 0.0)
                        acc = acc * shrink[:, None] + other_acc * grow[:, None]
                        total = total * shrink + other_total * grow
                        best = better
        if complete:
            result = acc * (kept_v_scale / total)[:, None]
            output_at = (first_row + number).to(tl.int64) * output_row
            output_at += (head * RATIO + in_group) * output_head
            tl.store(output + output_at[:, None] + dim[None, :], result, mask=keep)
        at += last - first
