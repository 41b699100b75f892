"""Device code: one program of the MLA verification kernel.

All heads share a cached row, which is their key (latent and rotary part) and their value (the
latent part): each row is loaded once and used for both products. The query rows of a request
(window x heads) are cut into tiles; a tile's work is its request's context in steps of BLOCK_N
rows and one last step for the window. How that work is divided among the programs, and how parts
are merged, is that of `verify_attention` (`parts.py`).

For fp8 caches the staged rows are seen as if they had been written and read back.
"""

import triton
import triton.language as tl

from nwor_kernels.verify_attention.parts import (
    cut,
    discard_parts,
    find_pair,
    locate,
    settle,
)
from nwor_kernels.verify_attention.tiles import (
    LOG2_E,
    as_read_back,
    halves_of_cache,
    halves_of_rows,
    nothing_seen,
    product,
    store_halves,
    take_in,
)


@triton.jit
def _steps(staged, length, BLOCK_N: tl.constexpr):
    """Steps of one tile of a request, the window's own included; 0 if nothing is staged."""
    steps = tl.maximum(tl.cdiv(length - staged, BLOCK_N), 0) + 1
    return tl.where(staged > 0, steps, 0)


@triton.jit
def _scale_at(scale, GIVEN: tl.constexpr):
    """A scale on the device; 1 without one."""
    if GIVEN:
        return tl.load(scale)
    else:
        return 1.0


@triton.jit
def attend_latents(q0, q1, p0, p1, k0, k1, r0, r1, visible, acc0, acc1, best, total, factor):
    """One step of online softmax in base 2: `k0`, `k1` are the latent halves, key and value."""
    scores = product(q1, tl.trans(k1), product(q0, tl.trans(k0)))
    scores = product(p1, tl.trans(r1), product(p0, tl.trans(r0), scores)) * factor
    return take_in(scores, k0, k1, visible, acc0, acc1, best, total)


@triton.jit(
    do_not_specialize=["scale", "requests"],
    do_not_specialize_on_alignment=[
        "query_start_loc", "seq_lens", "block_table", "staged_start", "staged_end",
    ],
)  # fmt: skip
def mla_verify_kernel(
    query,
    query_pe,
    latent,
    key_pe,
    cache,
    query_start_loc,
    seq_lens,
    block_table,
    staged_start,
    staged_end,
    output,
    q_scale,
    k_scale,
    accumulators,
    sums,
    arrived,
    scale,
    requests,
    table_row,
    query_row,
    query_head,
    query_pe_row,
    query_pe_head,
    latent_row,
    key_pe_row,
    cache_block,
    cache_offset,
    output_row,
    output_head,
    Q_SCALE: tl.constexpr,
    K_SCALE: tl.constexpr,
    FP8: tl.constexpr,
    COMPUTE: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    PE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_REQUESTS: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    DIM: tl.constexpr,
    PE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    MIN_STEPS: tl.constexpr,
    DISCARD: tl.constexpr,
    WHOLE_PAIRS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """One program: an equal part of all steps, numbered request by request, tile by tile."""
    program = tl.program_id(0)
    each_request = tl.arange(0, MAX_REQUESTS)
    in_batch = each_request < requests
    starts = tl.load(staged_start + each_request, mask=in_batch, other=0)
    ends = tl.load(staged_end + each_request, mask=in_batch, other=0)
    lengths = tl.load(seq_lens + each_request, mask=in_batch, other=0)
    steps_of_each = _steps(ends - starts, lengths, BLOCK_N)
    part, multiple = cut(steps_of_each, ROW_TILES, MIN_STEPS, WHOLE_PAIRS)
    until = tl.cumsum(tl.cdiv(steps_of_each, multiple) * multiple, axis=0) * ROW_TILES
    at = program * part
    end = tl.minimum(at + part, tl.max(until, axis=0))

    half_dim: tl.constexpr = DIM // 2
    half_pe: tl.constexpr = PE // 2
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK_N)
    staged = tl.arange(0, WINDOW)
    kept_scale = _scale_at(k_scale, K_SCALE)
    factor = scale * kept_scale * _scale_at(q_scale, Q_SCALE) * LOG2_E
    while at < end:
        # Which tile, which of its steps, and which programs have the others?
        request, before = find_pair(until, at)
        first_staged = tl.load(staged_start + request)
        num_staged = tl.load(staged_end + request) - first_staged
        seq_len = tl.load(seq_lens + request)
        first_row = tl.load(query_start_loc + request)
        num_rows = tl.load(query_start_loc + request + 1) - first_row
        steps = _steps(num_staged, seq_len, BLOCK_N)
        tile, first, last, first_program, parts = locate(at, end, before, steps, multiple, part)
        context = seq_len - num_staged

        table = block_table + request.to(tl.int64) * table_row
        token = first * BLOCK_N + lane
        block = tl.load(table + token // BLOCK_SIZE, mask=token < context, other=0)

        folded = tile * ROWS + row
        number, head = folded // HEADS, folded % HEADS
        is_row = number < num_rows
        # Padding rows see what the first row sees.
        position = seq_len - num_rows + tl.where(is_row, number, 0)
        token_row = (first_row + number).to(tl.int64)
        q_rows = query + token_row * query_row + head * query_head
        p_rows = query_pe + token_row * query_pe_row + head * query_pe_head
        q0, q1 = halves_of_rows(q_rows, is_row, LATENT_DIM, half_dim, FP8)
        p0, p1 = halves_of_rows(p_rows, is_row, PE_DIM, half_pe, FP8)
        q0, q1 = q0.to(COMPUTE), q1.to(COMPUTE)
        p0, p1 = p0.to(COMPUTE), p1.to(COMPUTE)

        acc0, acc1, best, total = nothing_seen(ROWS, half_dim)
        seen_until = tl.minimum(position + 1, context)
        for _step in range(first, tl.minimum(last, steps - 1)):
            inside = token < context
            cached = cache + block.to(tl.int64) * cache_block
            cached += (token % BLOCK_SIZE) * cache_offset
            k0, k1 = halves_of_cache(cached, inside, LATENT_DIM, half_dim, FP8)
            r0, r1 = halves_of_cache(cached + LATENT_DIM, inside, PE_DIM, half_pe, FP8)
            visible = token[None, :] < seen_until[:, None]
            acc0, acc1, best, total = attend_latents(
                q0, q1, p0, p1, k0.to(COMPUTE), k1.to(COMPUTE), r0.to(COMPUTE), r1.to(COMPUTE),
                visible, acc0, acc1, best, total, factor,
            )  # fmt: skip
            token += BLOCK_N
            block = tl.load(table + token // BLOCK_SIZE, mask=token < context, other=0)

        if last >= steps:
            is_staged = staged < num_staged
            source = (first_staged + staged).to(tl.int64)
            k0, k1 = halves_of_rows(
                latent + source * latent_row, is_staged, LATENT_DIM, half_dim, FP8
            )
            r0, r1 = halves_of_rows(key_pe + source * key_pe_row, is_staged, PE_DIM, half_pe, FP8)
            in_sight = is_staged[None, :] & ((context + staged)[None, :] <= position[:, None])
            acc0, acc1, best, total = attend_latents(
                q0, q1, p0, p1,
                as_read_back(k0, kept_scale, FP8, COMPUTE),
                as_read_back(k1, kept_scale, FP8, COMPUTE),
                as_read_back(r0, kept_scale, FP8, COMPUTE),
                as_read_back(r1, kept_scale, FP8, COMPUTE),
                in_sight, acc0, acc1, best, total, factor,
            )  # fmt: skip

        complete, acc0, acc1, best, total = settle(
            accumulators, sums, arrived + request * ROW_TILES + tile, first_program, parts, is_row,
            acc0, acc1, best, total, ROWS, DIM, MERGED,
        )  # fmt: skip
        if complete:
            by = (kept_scale / total)[:, None]
            rows_at = output + token_row * output_row + head * output_head
            store_halves(rows_at, is_row, acc0 * by, acc1 * by, LATENT_DIM, half_dim, FP8)
            if DISCARD:
                rows_left = num_rows * HEADS - tile * ROWS
                discard_parts(
                    accumulators, sums, first_program, parts, rows_left, ROWS, DIM, MERGED, DISCARD
                )
        at += last - first
