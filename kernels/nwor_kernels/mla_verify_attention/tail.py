"""The last keys of a window's rows, merged into stock attention over the tokens before them.

Stock attends only over the committed tokens. Its mask is causal and ends with them, so row i of a
request's q rows sees all but the last q - 1 - i of them. With s of L tokens staged, a row lacks s
keys, at positions L - s - (q - 1 - i) to L - q + i: those below L - s are in the cache, the others
are staged. The s + q - 1 keys that some row lacks are the request's tail.
"""

import triton
import triton.language as tl
from torch import Tensor

from nwor_kernels.attention_step import AttentionStep
from nwor_kernels.launch import Launches
from nwor_kernels.mla_verify_attention.kernel import (
    latent_tensors,
    strides_of,
    unsupported_reason,
)
from nwor_kernels.mla_verify_attention.program import attend_latents
from nwor_kernels.verify_attention.tiles import LOG2_E, halves_of_rows, nothing_seen, store_halves

ROWS = 16
"""Query rows of a program, as a matrix instruction takes. Two programs of 4 warps then fit on a
multiprocessor of an H200, by their 230 registers a thread."""


@triton.jit(
    do_not_specialize=["scale", "lse_row", "lse_head"],
    do_not_specialize_on_alignment=[
        "query_start_loc", "seq_lens", "block_table", "staged_start", "staged_end", "lse",
    ],
)  # fmt: skip
def mla_tail_kernel(
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
    lse,
    scale,
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
    lse_row,
    lse_head,
    HEADS: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    PE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PE: tl.constexpr,
    TAIL: tl.constexpr,
):
    """One program: a tile of (query row, head) of one request, over the request's tail."""
    tile, request = tl.program_id(0), tl.program_id(1)
    first_row = tl.load(query_start_loc + request)
    num_rows = tl.load(query_start_loc + request + 1) - first_row
    first_staged = tl.load(staged_start + request)
    num_staged = tl.load(staged_end + request) - first_staged
    seq_len = tl.load(seq_lens + request)
    # Padding of a captured shape has no rows, or no tokens.
    if (tile * ROWS >= num_rows * HEADS) | (num_staged <= 0) | (seq_len < num_rows):
        return

    half_dim: tl.constexpr = DIM // 2
    half_pe: tl.constexpr = PE // 2
    committed = seq_len - num_staged
    position = committed - num_rows + 1 + tl.arange(0, TAIL)
    exists = (position >= 0) & (position < seq_len)
    is_staged = exists & (position >= committed)

    folded = tile * ROWS + tl.arange(0, ROWS)
    number, head = folded // HEADS, folded % HEADS
    is_row = number < num_rows
    row = (first_row + number).to(tl.int64)
    q_rows = query + row * query_row + head * query_head
    p_rows = query_pe + row * query_pe_row + head * query_pe_head
    q0, q1 = halves_of_rows(q_rows, is_row, LATENT_DIM, half_dim, 0)
    p0, p1 = halves_of_rows(p_rows, is_row, PE_DIM, half_pe, 0)

    source = (first_staged + position - committed).to(tl.int64)
    k0, k1 = halves_of_rows(latent + source * latent_row, is_staged, LATENT_DIM, half_dim, 0)
    r0, r1 = halves_of_rows(key_pe + source * key_pe_row, is_staged, PE_DIM, half_pe, 0)
    in_cache = exists & (position < committed)
    table = block_table + request.to(tl.int64) * table_row
    block = tl.load(table + position // BLOCK_SIZE, mask=in_cache, other=0)
    cached = cache + block.to(tl.int64) * cache_block + (position % BLOCK_SIZE) * cache_offset
    c0, c1 = halves_of_rows(cached, in_cache, LATENT_DIM, half_dim, 0)
    s0, s1 = halves_of_rows(cached + LATENT_DIM, in_cache, PE_DIM, half_pe, 0)
    # A key that is read from the other of the two places is 0 in one.
    k0, k1, r0, r1 = k0 + c0, k1 + c1, r0 + s0, r1 + s1

    # Stock's output is one value of weight 1; if stock saw nothing, it may be anything.
    seen_until = committed - (num_rows - 1 - number)
    has_seen = is_row & (seen_until > 0)
    missing = exists[None, :] & (position[None, :] >= seen_until[:, None])
    missing &= position[None, :] <= (seq_len - num_rows + number)[:, None]
    o_rows = output + row * output_row + head * output_head
    acc0, acc1 = halves_of_rows(o_rows, has_seen, LATENT_DIM, half_dim, 0)
    stock_lse = tl.load(lse + row * lse_row + head * lse_head, mask=has_seen, other=0.0)
    _, _, lowest, total = nothing_seen(ROWS, half_dim)
    best = tl.where(has_seen, stock_lse * LOG2_E, lowest)
    acc0, acc1, best, total = attend_latents(
        q0, q1, p0, p1, k0, k1, r0, r1, missing,
        acc0.to(tl.float32), acc1.to(tl.float32), best, total + 1, scale * LOG2_E,
    )  # fmt: skip
    by = (1 / total)[:, None]
    store_halves(o_rows, is_row, acc0 * by, acc1 * by, LATENT_DIM, half_dim, 0)


_launches = Launches(mla_tail_kernel, free=frozenset({"scale", "lse_row", "lse_head"}))


def mla_tail_triton(step: AttentionStep, lse: Tensor) -> None:
    """Merge the tail of every request with staged rows into stock's output over the tokens before.

    Safe in a CUDA graph: it reads nothing on the host and allocates nothing. Requests without query
    rows, staged rows or tokens are skipped.

    Args:
        step: tensors of one dtype. Its output is stock's over the first L - s tokens of a request
            of L tokens and s staged rows, causal and aligned to their end.
        lse: [num_tokens, heads] float32, the natural log-sum-exp of stock's scaled scores, of any
            strides. It is not read, nor is the output, for rows that saw no token.

    Raises:
        ValueError: the kernel does not serve this shape or dtype.
    """
    query, query_pe, latent, key_pe, kv_cache, output = latent_tensors(step)
    requests, max_query_len = step.requests.seq_lens.shape[0], step.max_query_len
    heads, latent_dim = query.shape[1:]
    pe_dim = query_pe.shape[2]
    reason = unsupported_reason(latent_dim, pe_dim, max_query_len, latent.dtype, kv_cache.dtype)
    if reason is None and kv_cache.dtype != latent.dtype:
        reason = f"cache_dtype_{str(kv_cache.dtype).removeprefix('torch.')}"
    if reason:
        raise ValueError(f"the tail of MLA attention does not serve this: {reason}")
    if requests == 0:
        return
    tail = max(16, triton.next_power_of_2(2 * max_query_len - 1))
    arguments = (
        query,
        query_pe,
        latent,
        key_pe,
        kv_cache,
        *step.requests,
        output,
        lse,
        step.scores.scale,
        *strides_of(step),
        *lse.stride(),
    )
    constants = {
        "HEADS": heads,
        "LATENT_DIM": latent_dim,
        "PE_DIM": pe_dim,
        "BLOCK_SIZE": kv_cache.shape[1],
        "ROWS": ROWS,
        "DIM": triton.next_power_of_2(latent_dim),
        "PE": max(32, triton.next_power_of_2(pe_dim)),
        "TAIL": tail,
    }
    _launches(
        (triton.cdiv(max_query_len * heads, ROWS), requests, 1),
        arguments,
        constants,
        num_warps=4 if tail == 16 else 8,  # 4 would spill registers
    )
