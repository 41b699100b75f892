"""Attention over a paged cache whose newest tokens may be staged. Torch references.

Layout of the cache: [blocks, kv_heads, block_size, head_dim + value_dim], K then V. The K/V of
staged tokens come from the staging buffer. With and without staging the same tensors reach the same
operations, so in any dtype the results are equal bit for bit if the staged K/V are right.

Like vLLM's kernels it relies on unwritten cache memory being finite (new blocks are zeroed):
masked positions are multiplied by a weight of exactly zero.

`verify_attention_varlen_reference` takes the kernel's own arguments instead, one request at a time,
and computes in any dtype: tests take float64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from nwor_kernels.attention_step import AttentionStep, ScoreRules
from nwor_kernels.fp8 import E4M3_CACHE_DTYPES, quantize_e4m3

BATCHED_QUERY_LIMIT = 16
"""Requests with at most this many query rows share one padded call; longer ones get their own."""


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
        visible: [requests, 1, queries, tokens] bool, the tokens that each query attends to.
        staged: the group's staged tokens, or None when all of its K/V is in the cache.
    """

    query_rows: Tensor
    is_query: Tensor
    blocks: Tensor
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
    sees = partial(_visible, sliding_window=sliding_window, chunk=chunk, causal=causal)
    around = (starts, lengths, block_table, block_size, sees, staged_token_rows)
    return [_plan_group(requests, *around) for requests in groups]


def _plan_group(
    requests: list[int],
    starts: list[int],
    lengths: list[int],
    block_table: Tensor,
    block_size: int,
    sees: Callable[[Tensor, Tensor], Tensor],
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
    position = positions[:, :, None]
    visible = sees(token - position, position)
    visible &= (token < length)[:, None, :]

    blocks = block_table[requests, :num_blocks].long()
    return RequestGroup(
        query_rows=start + step,
        is_query=is_query,
        blocks=blocks.where(used_block, torch.zeros_like(blocks)),
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
    scores: ScoreRules,
    staged: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Attend each query to its request's cached and staged tokens; writes `output`.

    Args:
        query: [num_tokens, heads, head_dim].
        kv_cache: [blocks, kv_heads, block_size, head_dim + value_dim].
        plan: from `plan_attention`, which says what is seen; rows that no request owns are left as
            they are.
        output: [num_tokens, heads, value_dim], written in place.
        scores: what a query sees is the plan's.
        staged: K [capacity, kv_heads, head_dim] and V [capacity, kv_heads, value_dim] of the staged
            tokens; None if the plan has none.
    """
    for group in plan:
        key, value = gather_kv(kv_cache, group, query.shape[2], staged)
        queries = query[group.query_rows].transpose(1, 2)
        if scores.softcap or scores.sinks is not None:
            ratio = query.shape[1] // key.shape[1]
            keys, values = (rows.float().repeat_interleave(ratio, dim=1) for rows in (key, value))
            attended = _attend_by_formula(queries.float(), keys, values, group.visible, scores)
            attended = attended.to(query.dtype)
        else:
            attended = _attend(queries, key, value, group.visible, scores.scale)
        output[group.query_rows[group.is_query]] = attended.transpose(1, 2)[group.is_query]


def gather_kv(
    kv_cache: Tensor,
    group: RequestGroup,
    head_dim: int,
    staged: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """K and V of a group's requests, [requests, kv_heads, tokens, head_dim or value_dim]."""
    requests, num_blocks = group.blocks.shape
    _, kv_heads, block_size, width = kv_cache.shape
    gathered = kv_cache[group.blocks].transpose(1, 2)
    gathered = gathered.reshape(requests, kv_heads, num_blocks * block_size, width)
    if group.staged is not None:
        assert staged is not None
        at = (group.staged.request, slice(None), group.staged.position)
        from_row = group.staged.staging_row
        gathered[(*at, slice(0, head_dim))] = staged[0][from_row].to(kv_cache.dtype)
        gathered[(*at, slice(head_dim, width))] = staged[1][from_row].to(kv_cache.dtype)
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
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, rules: ScoreRules
) -> Tensor:
    """softmax(cap(q k * scale), with sinks) v, written out, in the dtype of `query`.

    Args:
        query: [..., heads, queries, head_dim].
        key: [..., heads, tokens, head_dim].
        value: [..., heads, tokens, value_dim].
        visible: [..., queries, tokens] bool, the tokens that each query attends to.
    """
    softcap, sinks = rules.softcap, rules.sinks
    scores = (query @ key.transpose(-1, -2)) * rules.scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[-2]]
    return weights @ value


def verify_attention_varlen_reference(
    step: AttentionStep, dtype: torch.dtype = torch.float32
) -> None:
    """`verify_attention_triton`, computed in `dtype`.

    Reads only committed context and staged rows.
    """
    cache, sources = step.kv_cache, (step.key, step.value)
    starts, seq_lens, block_table, staged_start, staged_end = step.requests
    kv_heads = cache.shape[1]
    ratio = step.query.shape[1] // kv_heads
    fp8 = cache.dtype in E4M3_CACHE_DTYPES
    cache = cache.view(torch.float8_e4m3fn) if cache.dtype == torch.uint8 else cache
    query_scale = _per_head(step.scales.query, kv_heads, dtype, cache.device)
    query_scale = query_scale.repeat_interleave(ratio)
    bounds = zip(staged_start.tolist(), staged_end.tolist(), strict=True)
    for request, (start, end) in enumerate(bounds):
        if start == end:
            continue
        length = int(seq_lens[request])
        first, last = starts[request : request + 2].tolist()
        context = _first_tokens(cache, block_table[request], length - (end - start))
        parts = context.tensor_split((step.key.shape[2],), dim=-1)
        keys, values = (
            _with_staged(part, rows[start:end], scales if fp8 else None, dtype)
            .repeat_interleave(ratio, dim=1)
            .transpose(0, 1)
            for part, rows, scales in zip(parts, sources, step.scales[1:], strict=True)
        )
        q = (step.query[first:last].to(dtype) * query_scale[:, None]).transpose(0, 1)
        position = torch.arange(length - (last - first), length, device=q.device)[:, None]
        visible = _visible(
            torch.arange(length, device=q.device) - position, position,
            step.scores.sliding_window, step.scores.chunk,
        )  # fmt: skip
        attended = _attend_by_formula(q, keys, values, visible, step.scores).transpose(0, 1)
        step.output[first:last] = attended.to(step.output.dtype)


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


def _visible(
    distance: Tensor, position: Tensor, sliding_window: int, chunk: int, *, causal: bool = True
) -> Tensor:
    """Bool of the shape of `distance`: whether a query at `position` attends to the token."""
    visible = distance <= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if sliding_window > 0:
        visible = visible & (distance > -sliding_window)
    if chunk > 0:
        visible = visible & (distance >= -(position % chunk))
    return visible
