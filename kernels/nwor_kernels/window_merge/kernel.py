"""A window's own K/V, merged into stock attention over the committed tokens.

Stock attends every query row of a request to all of its committed tokens, without a mask, and
returns the log-sum-exp of its scores. Here each row attends to the staged rows up to its own, and
the two results are weighted by their sums. One launch of one program for each 16 query rows of a
request that share a K/V head; none waits for another.

Exact only for plain softmax attention (a softcap, a sink or a sliding window would have to be in
both parts), and only if a request stages all of its rows, or all but the first.
"""

import triton
import triton.language as tl
from torch import Tensor

from nwor_kernels.attention_step import AttentionStep, Scales
from nwor_kernels.fp8 import E4M3_CACHE_DTYPES
from nwor_kernels.launch import Launches
from nwor_kernels.verify_attention.kernel import compute_type, counts_of
from nwor_kernels.verify_attention.tiles import LOG2_E, as_read_back, product, scale_of
from nwor_kernels.verify_attention.tuning import padded, unsupported_reason

ROWS = 16
"""Query rows of a program: the fewest of a matrix instruction."""

NUM_WARPS = 4


@triton.jit(
    do_not_specialize=["scale", "lse_head"],
    do_not_specialize_on_alignment=[
        "query_start_loc", "seq_lens", "staged_start", "staged_end", "lse",
    ],
)  # fmt: skip
def merge_window_kernel(
    query,
    key,
    value,
    query_start_loc,
    seq_lens,
    staged_start,
    staged_end,
    output,
    lse,
    q_scale,
    k_scale,
    v_scale,
    scale,
    query_row,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    output_row,
    output_head,
    lse_head,
    Q_SCALES: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    FP8: tl.constexpr,
    COMPUTE: tl.constexpr,
    RATIO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    OUT_DIM: tl.constexpr,
    STAGED: tl.constexpr,
):
    """One program: ROWS query rows of one request and one K/V head."""
    tile, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row = tl.load(query_start_loc + request)
    num_rows = tl.load(query_start_loc + request + 1) - first_row
    first_staged = tl.load(staged_start + request)
    num_staged = tl.load(staged_end + request) - first_staged
    if (tile * ROWS >= num_rows * RATIO) | (num_staged <= 0):
        return
    committed = tl.load(seq_lens + request) - num_staged

    folded = tile * ROWS + tl.arange(0, ROWS)
    number, in_group = folded // RATIO, folded % RATIO
    is_row = number < num_rows
    row, attended = (first_row + number).to(tl.int64), head * RATIO + in_group
    in_key, in_value = tl.arange(0, DIM), tl.arange(0, OUT_DIM)
    key_dims, value_dims = (in_key < HEAD_DIM)[None, :], (in_value < VALUE_DIM)[None, :]
    staged = tl.arange(0, STAGED)
    is_staged = staged < num_staged

    q_at = query + row * query_row + attended * query_head
    q = tl.load(q_at[:, None] + in_key[None, :], mask=is_row[:, None] & key_dims, other=0.0)
    source = (first_staged + staged).to(tl.int64)
    k_at = (key + source * key_row + head * key_head)[:, None] + in_key[None, :]
    k = tl.load(k_at, mask=is_staged[:, None] & key_dims, other=0.0)
    v_at = (value + source * value_row + head * value_head)[:, None] + in_value[None, :]
    v = tl.load(v_at, mask=is_staged[:, None] & value_dims, other=0.0)

    was_attended = number < tl.where(committed > 0, num_rows, 0)
    o_at = (output + row * output_row + attended * output_head)[:, None] + in_value[None, :]
    before = tl.load(o_at, mask=was_attended[:, None] & value_dims, other=0.0).to(tl.float32)
    sums_at = lse + attended * lse_head + row
    stock = tl.load(sums_at, mask=was_attended, other=float("-inf")) * LOG2_E

    kept_k_scale = scale_of(k_scale, head, K_SCALES)
    kept_v_scale = scale_of(v_scale, head, V_SCALES)
    factor = scale * kept_k_scale * scale_of(q_scale, head, Q_SCALES) * LOG2_E
    k = as_read_back(k, kept_k_scale, FP8, COMPUTE)
    v = as_read_back(v, kept_v_scale, FP8, COMPUTE)
    last_seen = num_staged - num_rows + number  # a request may have a row that is not staged
    seen = is_staged[None, :] & (staged[None, :] <= last_seen[:, None])
    scores = tl.where(seen, product(q.to(COMPUTE), tl.trans(k)) * factor, float("-inf"))
    best = tl.maximum(tl.max(scores, axis=1), stock)
    best = tl.where(is_row, best, 0.0)  # rows of padding have seen nothing
    weights = tl.exp2(scores - best[:, None])
    kept = tl.exp2(stock - best)
    total = tl.sum(weights, axis=1) + kept
    merged = product(weights.to(COMPUTE), v) * kept_v_scale + before * kept[:, None]
    tl.store(o_at, merged / total[:, None], mask=is_row[:, None] & value_dims)


_launches = Launches(merge_window_kernel, free=frozenset({"scale", "lse_head"}))


def merge_window_triton(step: AttentionStep, lse: Tensor) -> None:
    """Merge the staged rows of every request into stock's output over its committed tokens.

    Safe in a CUDA graph: it reads nothing on the host and allocates nothing. Requests without
    query rows or without staged rows are skipped.

    Args:
        step: its output is stock's over the first L - s tokens of a request of L tokens and s
            staged rows. Of its cache only the dtype counts: fp8 rows are seen as if read back.
        lse: [heads, num_tokens] float32, the natural log-sum-exp of stock's scaled scores, its last
            dimension contiguous. It is not read, nor is the output, for rows that saw no token.

    Raises:
        ValueError: the kernel does not serve this shape.
    """
    query, key, value, output, max_query_len = (
        step.query,
        step.key,
        step.value,
        step.output,
        step.max_query_len,
    )
    starts, seq_lens, _, staged_start, staged_end = step.requests
    requests, cache_dtype = seq_lens.shape[0], step.kv_cache.dtype
    heads, head_dim = query.shape[1:]
    kv_heads, value_dim = value.shape[1:]
    reason = unsupported_reason(head_dim, max_query_len, key.dtype, cache_dtype, value_dim)
    if reason:
        raise ValueError(f"merge_window does not serve this: {reason}")
    if requests == 0:
        return
    quantised = cache_dtype in E4M3_CACHE_DTYPES
    scales = step.scales if quantised else Scales(step.scales.query)
    arguments = (
        query,
        key,
        value,
        starts,
        seq_lens,
        staged_start,
        staged_end,
        output,
        lse,
        *scales,
        step.scores.scale,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *output.stride()[:2],
        lse.stride(0),
    )
    constants = {
        **counts_of(scales),
        "FP8": int(quantised),
        "COMPUTE": compute_type(key, quantised),
        "RATIO": heads // kv_heads,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "ROWS": ROWS,
        "DIM": padded(head_dim),
        "OUT_DIM": padded(value_dim),
        "STAGED": max(16, triton.next_power_of_2(max_query_len)),
    }
    tiles = triton.cdiv(max_query_len * (heads // kv_heads), ROWS)
    _launches((tiles, kv_heads, requests), arguments, constants, num_warps=NUM_WARPS)
