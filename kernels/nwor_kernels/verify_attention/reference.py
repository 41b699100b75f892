"""Attention over a paged cache whose newest tokens may still be staged. Torch reference.

Layout of the cache: [blocks, kv_heads, block_size, head_dim + value_dim], K then V. Staged tokens
have no K/V in the cache yet: their rows come from the staging buffer instead. With and
without staging the very same tensors reach the very same operations, so that in any dtype
the result is equal bit by bit as long as the staged K/V are right.

Like vLLM's kernels it relies on unwritten cache memory being finite (new blocks are zeroed):
masked positions are multiplied by a weight of exactly zero.

`verify_attention_varlen_reference` takes the kernel's own arguments instead, one request at a time,
and computes in any dtype: tests take float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from nwor_kernels.fp8 import E4M3_CACHE_DTYPES, quantize_e4m3

BATCHED_QUERY_LIMIT = 16
"""Requests with at most this many query rows share one padded call; longer ones run alone."""


@dataclass(frozen=True)
class StagedRows:
    """Where a group's staged tokens belong: parallel int64 vectors."""

    request: Tensor
    position: Tensor
    staging_row: Tensor


@dataclass(frozen=True)
class RequestGroup:
    """Requests attended in one call.

    Attributes:
        query_rows: [requests, queries] int64, rows of the batch; padding repeats row 0 of
            the request.
        is_query: [requests, queries] bool, False for padding.
        blocks: [requests, blocks] int64, block numbers; padding is block 0.
        positions: [requests, queries] int64, each query's position in its sequence.
        visible: [requests, 1, queries, tokens] bool, what each query may attend to.
        staged: the group's staged tokens, or None when all of its K/V is in the cache.
    """

    query_rows: Tensor
    is_query: Tensor
    blocks: Tensor
    positions: Tensor
    visible: Tensor
    staged: StagedRows | None


AttentionPlan = Sequence[RequestGroup]


def plan_attention(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
    *,
    causal: bool = True,
    sliding_window: int = -1,
    chunk: int = -1,
    staged_token_rows: Tensor | None = None,
) -> AttentionPlan:
    """Index tensors for one step, shared by all layers of a KV-cache group.

    Args:
        query_start_loc: [requests + 1], first batch row of each request.
        seq_lens: [requests], tokens of each request including this step's.
        block_table: [requests, max blocks].
        block_size: tokens a block.
        causal: a query sees positions up to its own.
        sliding_window: a query sees at most this many positions, its own included; -1: all.
        chunk: if > 0, a query at position p sees nothing before p - p % chunk.
        staged_token_rows: [num_staged] int64, batch rows whose K/V is staged (staging row i
            holds row `staged_token_rows[i]`); None when nothing is staged.
    """
    starts = query_start_loc.tolist()
    lengths = seq_lens.tolist()
    queries = [end - start for start, end in pairwise(starts)]
    short = [r for r, n in enumerate(queries) if 0 < n <= BATCHED_QUERY_LIMIT]
    groups = [short] if short else []
    groups += [[r] for r, n in enumerate(queries) if n > BATCHED_QUERY_LIMIT]
    return [
        _plan_group(
            requests,
            starts,
            lengths,
            block_table,
            block_size,
            causal,
            sliding_window,
            chunk,
            staged_token_rows,
        )
        for requests in groups
    ]


def _plan_group(
    requests: list[int],
    starts: list[int],
    lengths: list[int],
    block_table: Tensor,
    block_size: int,
    causal: bool,
    sliding_window: int,
    chunk: int,
    staged_token_rows: Tensor | None,
) -> RequestGroup:
    start = torch.tensor([starts[r] for r in requests])[:, None]
    count = torch.tensor([starts[r + 1] - starts[r] for r in requests])[:, None]
    length = torch.tensor([lengths[r] for r in requests])[:, None]
    num_blocks = -(-max(lengths[r] for r in requests) // block_size)

    step = torch.arange(int(count.max()))[None, :]
    is_query = step < count
    step = step.where(is_query, torch.zeros_like(step))
    positions = length - count + step

    token = torch.arange(num_blocks * block_size)
    used_block = token[::block_size] < length
    visible = (token < length)[:, None, :].expand(-1, positions.shape[1], -1)
    if causal:
        visible = visible & (token <= positions[:, :, None])
    if sliding_window > 0:
        visible = visible & (token > positions[:, :, None] - sliding_window)
    if chunk > 0:
        visible = visible & (token >= (positions - positions % chunk)[:, :, None])

    blocks = block_table[requests, :num_blocks].long()
    return RequestGroup(
        query_rows=start + step,
        is_query=is_query,
        blocks=blocks.where(used_block, torch.zeros_like(blocks)),
        positions=positions,
        visible=visible[:, None],
        staged=_locate_staged(staged_token_rows, start, count, length),
    )


def _locate_staged(
    rows: Tensor | None, start: Tensor, count: Tensor, length: Tensor
) -> StagedRows | None:
    """Request, position and staging row of the staged tokens that belong to a group."""
    if rows is None:
        return None
    inside = (rows >= start) & (rows < start + count)
    request, staging_row = inside.nonzero(as_tuple=True)
    if request.numel() == 0:
        return None
    position = (rows[None, :] - start + length - count)[request, staging_row]
    return StagedRows(request, position, staging_row)


def verify_attention_reference(
    query: Tensor,
    kv_cache: Tensor,
    plan: AttentionPlan,
    output: Tensor,
    *,
    scale: float,
    staged_key: Tensor | None = None,
    staged_value: Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Attend each query to its request's cached and staged tokens; writes `output`.

    Args:
        query: [num_tokens, heads, head_dim].
        kv_cache: [blocks, kv_heads, block_size, head_dim + value_dim].
        plan: from `plan_attention`; rows that no request owns are left as they are.
        output: [num_tokens, heads, value_dim], written in place.
        scale: factor on the scores.
        staged_key: [capacity, kv_heads, head_dim], K of the staged tokens.
        staged_value: [capacity, kv_heads, value_dim], V of the staged tokens.
        softcap: if > 0, scores become softcap * tanh(scores / softcap).
        alibi_slopes: [heads], added as slope * (key position - query position).
        sinks: [heads], one more score per head that takes weight and gives no value.
    """
    for group in plan:
        key, value = gather_kv(kv_cache, group, query.shape[2], staged_key, staged_value)
        queries = query[group.query_rows].transpose(1, 2)
        if softcap or alibi_slopes is not None or sinks is not None:
            attended = _attend_by_formula(
                queries, key, value, group, scale, softcap, alibi_slopes, sinks
            )
        else:
            attended = _attend(queries, key, value, group.visible, scale)
        output[group.query_rows[group.is_query]] = attended.transpose(1, 2)[group.is_query]


def gather_kv(
    kv_cache: Tensor,
    group: RequestGroup,
    head_dim: int,
    staged_key: Tensor | None,
    staged_value: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """K and V of a group's requests, [requests, kv_heads, tokens, head_dim or value_dim]."""
    requests, num_blocks = group.blocks.shape
    _, kv_heads, block_size, width = kv_cache.shape
    gathered = kv_cache[group.blocks].transpose(1, 2)
    gathered = gathered.reshape(requests, kv_heads, num_blocks * block_size, width)
    if group.staged is not None:
        assert staged_key is not None
        assert staged_value is not None
        at = (group.staged.request, slice(None), group.staged.position)
        from_row = group.staged.staging_row
        gathered[(*at, slice(0, head_dim))] = staged_key[from_row].to(kv_cache.dtype)
        gathered[(*at, slice(head_dim, width))] = staged_value[from_row].to(kv_cache.dtype)
    return gathered[..., :head_dim], gathered[..., head_dim:]


def _attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Torch's attention; query heads that share a K/V head are folded into the query axis."""
    requests, heads, queries, head_dim = query.shape
    kv_heads = key.shape[1]
    ratio = heads // kv_heads
    folded = query.reshape(requests, kv_heads, ratio * queries, head_dim)
    mask = visible[:, :, None].expand(-1, -1, ratio, -1, -1).flatten(2, 3)
    attended = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    return attended.reshape(requests, heads, queries, value.shape[-1])


def _attend_by_formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: RequestGroup,
    scale: float,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """softmax(cap(q k / sqrt d) + alibi, with sinks) v, in float32, written out."""
    ratio = query.shape[1] // key.shape[1]
    key = key.float().repeat_interleave(ratio, dim=1)
    value = value.float().repeat_interleave(ratio, dim=1)
    scores = (query.float() @ key.transpose(-1, -2)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        token = torch.arange(key.shape[2])
        distance = token - group.positions[:, None, :, None]
        scores = scores + alibi_slopes.float()[None, :, None, None] * distance
    scores = scores.masked_fill(~group.visible, float("-inf"))
    if sinks is not None:
        sink = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return (weights @ value).to(query.dtype)


def verify_attention_varlen_reference(
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
    sliding_window: int = -1,
    softcap: float = 0.0,
    chunk: int = -1,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Attend the queries of every request with staged tokens, in `dtype`.

    Shapes and meanings are those of `verify_attention_triton`. Nothing but committed context and
    staged rows is read; output rows of requests without staged tokens are left alone.
    """
    kv_heads = kv_cache.shape[1]
    ratio = query.shape[1] // kv_heads
    fp8 = kv_cache.dtype in E4M3_CACHE_DTYPES
    cache = kv_cache.view(torch.float8_e4m3fn) if kv_cache.dtype == torch.uint8 else kv_cache
    query_scale = _per_head(q_scale, kv_heads, dtype, query.device).repeat_interleave(ratio)
    bounds = zip(staged_start.tolist(), staged_end.tolist(), strict=True)
    for request, (start, end) in enumerate(bounds):
        if start == end:
            continue
        length = int(seq_lens[request])
        first, last = query_start_loc[request : request + 2].tolist()
        context = _first_tokens(cache, block_table[request], length - (end - start))
        parts = context.tensor_split((key.shape[2],), dim=-1)
        keys, values = (
            _with_staged(part, rows[start:end], scales if fp8 else None, dtype)
            .repeat_interleave(ratio, dim=1)
            .transpose(0, 1)
            for part, rows, scales in zip(parts, (key, value), (k_scale, v_scale), strict=True)
        )
        q = (query[first:last].to(dtype) * query_scale[:, None]).transpose(0, 1)
        attended = _attend_one(
            q, keys, values, scale, sliding_window, softcap, chunk, sinks, alibi_slopes
        )
        output[first:last] = attended.to(output.dtype)


def _with_staged(
    context: Tensor, staged: Tensor, scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """[tokens, kv_heads, width]: a request's K or V, the staged rows last, as if read back."""
    if context.dtype == torch.float8_e4m3fn:
        unit = torch.ones(1, device=staged.device)
        staged = quantize_e4m3(staged, unit if scale is None else scale)
    both = torch.cat([context.to(dtype), staged.to(dtype)])
    return both * _per_head(scale, context.shape[1], dtype, context.device)[:, None]


def _per_head(
    scale: Tensor | None, kv_heads: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[kv_heads] scales; ones for none."""
    if scale is None:
        return torch.ones(kv_heads, dtype=dtype, device=device)
    return scale.to(dtype).reshape(-1).expand(kv_heads)


def _first_tokens(cache: Tensor, blocks: Tensor, tokens: int) -> Tensor:
    """[tokens, kv_heads, head_dim + value_dim]: the first tokens of a request, from its blocks."""
    size = cache.shape[2]
    position = torch.arange(tokens, device=cache.device)
    # Indexing takes no e4m3; its bytes are moved instead.
    raw = cache.view(torch.uint8) if cache.dtype in E4M3_CACHE_DTYPES else cache
    return raw[blocks[position // size].long(), :, position % size].view(cache.dtype)


def _attend_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    sliding_window: int,
    softcap: float,
    chunk: int,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
) -> Tensor:
    """Causal attention of the last queries of a sequence: [heads, n, dim] each, [n, heads, dim]."""
    queries, tokens = query.shape[1], key.shape[1]
    position = torch.arange(tokens - queries, tokens, device=query.device)[:, None]
    token = torch.arange(tokens, device=query.device)[None, :]
    visible = token <= position
    if sliding_window > 0:
        visible &= token > position - sliding_window
    if chunk > 0:
        visible &= token >= position - position % chunk
    scores = (query @ key.transpose(1, 2)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.to(scores.dtype)[:, None, None] * (token - position)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks.to(scores.dtype)[:, None, None].expand(-1, queries, 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1)[..., :tokens]
    return (weights @ value).transpose(0, 1)
