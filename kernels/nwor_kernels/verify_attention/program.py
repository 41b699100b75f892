"""Device code: one program of the verification kernel.

All query rows of one request that share a K/V head (the GQA ratio times the window's length,
padded to a matrix tile) are attended together: a pair. A pair's work is its context in steps of
BLOCK_N tokens and one last step for the window. The steps of all pairs, laid end to end, are cut
into equal parts, one a program; each program finds its part from the lengths on the device. So a
fixed grid serves short, long and mixed contexts alike, in a CUDA graph too. A pair that was cut
is merged by log-sum-exp by the last of its programs to finish: no program waits, and there is no
second launch.

For fp8 caches the staged K/V are seen as if they had been written and read back: quantisation
happens when they are read here, with the stock write's rounding; commit rounds the same way.
"""

import triton
import triton.language as tl

from nwor_kernels.verify_attention.parts import (
    cut,
    discard_parts,
    find_pair,
    first_seen,
    locate,
    settle,
    steps_of,
)
from nwor_kernels.verify_attention.tiles import (
    LOG2_E,
    as_read_back,
    attend,
    halves_of_cache,
    halves_of_rows,
    nothing_seen,
    scale_of,
    store_halves,
)


@triton.jit(
    do_not_specialize=["scale", "softcap", "requests"],
    do_not_specialize_on_alignment=[
        "query_start_loc", "seq_lens", "block_table", "staged_start", "staged_end",
    ],
)  # fmt: skip
def verify_kernel(
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
    sinks,
    accumulators,
    sums,
    arrived,
    scale,
    softcap,
    requests,
    table_row,
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
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    RATIO: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_REQUESTS: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    DIM: tl.constexpr,
    OUT_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    MIN_STEPS: tl.constexpr,
    MERGED: tl.constexpr,
    DISCARD: tl.constexpr,
    WHOLE_PAIRS: tl.constexpr,
):
    """One program: an equal part of all steps. A step of which the whole batch has S is numbered
    0..S-1, request by request, pair by pair, the window's step last."""
    pairs: tl.constexpr = KV_HEADS * ROW_TILES
    program = tl.program_id(0)
    each_request = tl.arange(0, MAX_REQUESTS)
    in_batch = each_request < requests
    starts = tl.load(staged_start + each_request, mask=in_batch, other=0)
    ends = tl.load(staged_end + each_request, mask=in_batch, other=0)
    lengths = tl.load(seq_lens + each_request, mask=in_batch, other=0)
    row_counts = 0
    bounded: tl.constexpr = SLIDING_WINDOW > 0 or CHUNK > 0
    if bounded:
        to_rows = query_start_loc + each_request
        row_counts = tl.load(to_rows + 1, mask=in_batch, other=0)
        row_counts -= tl.load(to_rows, mask=in_batch, other=0)
    steps_of_each, _unseen = steps_of(
        ends - starts, lengths, row_counts, SLIDING_WINDOW, CHUNK, BLOCK_N
    )
    part, multiple = cut(steps_of_each, pairs, MIN_STEPS, WHOLE_PAIRS)
    until = tl.cumsum(tl.cdiv(steps_of_each, multiple) * multiple, axis=0) * pairs
    at = program * part
    end = tl.minimum(at + part, tl.max(until, axis=0))

    half_dim: tl.constexpr = DIM // 2
    half_out: tl.constexpr = OUT_DIM // 2
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK_N)
    staged = tl.arange(0, WINDOW)
    while at < end:
        # Which pair, which of its steps, and which programs have the others?
        request, before = find_pair(until, at)
        first_staged = tl.load(staged_start + request)
        num_staged = tl.load(staged_end + request) - first_staged
        seq_len = tl.load(seq_lens + request)
        first_row = tl.load(query_start_loc + request)
        num_rows = tl.load(query_start_loc + request + 1) - first_row
        steps, skipped = steps_of(num_staged, seq_len, num_rows, SLIDING_WINDOW, CHUNK, BLOCK_N)
        pair, first, last, first_program, parts = locate(at, end, before, steps, multiple, part)
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
        seen_from = first_seen(position, SLIDING_WINDOW, CHUNK)
        none_sees = first_seen(first_position, SLIDING_WINDOW, CHUNK)
        token_row, attended = (first_row + number).to(tl.int64), head * RATIO + in_group
        q = query + token_row * query_row + attended * query_head
        q0, q1 = halves_of_rows(q, is_row, HEAD_DIM, half_dim, FP8)
        q0, q1 = q0.to(COMPUTE), q1.to(COMPUTE)

        # The window's K/V are asked for now and attended last: their latency hides here.
        has_window = last >= steps
        is_staged = staged < tl.where(has_window, num_staged, 0)
        source = (first_staged + staged).to(tl.int64)
        staged_k0, staged_k1 = halves_of_rows(
            key + source * key_row + head * key_head, is_staged, HEAD_DIM, half_dim, FP8
        )
        staged_v0, staged_v1 = halves_of_rows(
            value + source * value_row + head * value_head, is_staged, VALUE_DIM, half_out, FP8
        )

        kept_k_scale = scale_of(k_scale, head, K_SCALES)
        kept_v_scale = scale_of(v_scale, head, V_SCALES)
        factor = scale * kept_k_scale * scale_of(q_scale, head, Q_SCALES)
        if not SOFTCAP:
            factor = factor * LOG2_E

        acc0, acc1, best, total = nothing_seen(ROWS, half_out)
        of_head = cache + head.to(tl.int64) * cache_head
        seen_until = tl.minimum(position + 1, context)
        for _step in range(first, tl.minimum(last, steps - 1)):
            inside = token < context
            if bounded:  # engines free the blocks before it
                inside = inside & (token >= none_sees)
            keys = of_head + block.to(tl.int64) * cache_block + (token % BLOCK_SIZE) * cache_offset
            k0, k1 = halves_of_cache(keys, inside, HEAD_DIM, half_dim, FP8)
            v0, v1 = halves_of_cache(keys + HEAD_DIM, inside, VALUE_DIM, half_out, FP8)
            visible = token[None, :] < seen_until[:, None]
            if bounded:
                visible = visible & (token[None, :] >= seen_from[:, None])
            acc0, acc1, best, total = attend(
                q0, q1, k0, k1, v0, v1, visible, acc0, acc1, best, total, factor, softcap, SOFTCAP
            )  # fmt: skip
            token += BLOCK_N
            block = tl.load(table + token // BLOCK_SIZE, mask=token < context, other=0)

        if has_window:
            read_k0 = as_read_back(staged_k0, kept_k_scale, FP8, COMPUTE)
            read_k1 = as_read_back(staged_k1, kept_k_scale, FP8, COMPUTE)
            read_v0 = as_read_back(staged_v0, kept_v_scale, FP8, COMPUTE)
            read_v1 = as_read_back(staged_v1, kept_v_scale, FP8, COMPUTE)
            at_window = context + staged
            in_sight = is_staged[None, :] & (at_window[None, :] <= position[:, None])
            if bounded:
                in_sight = in_sight & (at_window[None, :] >= seen_from[:, None])
            acc0, acc1, best, total = attend(
                q0, q1, read_k0, read_k1, read_v0, read_v1, in_sight,
                acc0, acc1, best, total, factor, softcap, SOFTCAP,
            )  # fmt: skip

        complete, acc0, acc1, best, total = settle(
            accumulators, sums, arrived + request * pairs + pair, first_program, parts, is_row,
            acc0, acc1, best, total, ROWS, OUT_DIM, MERGED,
        )  # fmt: skip
        if complete:
            if sinks is not None:  # once a pair, of however many parts
                sink = tl.load(sinks + attended, mask=is_row, other=0.0).to(tl.float32)
                total += tl.exp2(sink * LOG2_E - best)
            by = (kept_v_scale / total)[:, None]
            rows_at = output + token_row * output_row + attended * output_head
            store_halves(rows_at, is_row, acc0 * by, acc1 * by, VALUE_DIM, half_out, FP8)
            if DISCARD:
                rows_left = num_rows * RATIO - row_tile * ROWS
                discard_parts(
                    accumulators, sums, first_program, parts, rows_left,
                    ROWS, OUT_DIM, MERGED, DISCARD,
                )  # fmt: skip
        at += last - first
