"""What the verification kernel computes, written out in torch: one request and one head at a time.

`reference.py` beside this serves the CPU backend, which must equal unstaged attention bit by bit;
this one takes the kernel's own arguments and accumulates in float64 if asked, for tests.
"""

import torch
from torch import Tensor

from nwor_kernels.fp8 import E4M3_CACHE_DTYPES, quantize_e4m3


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
        context = _context(cache, block_table[request], length - (end - start))
        parts = context.tensor_split((key.shape[2],), dim=-1)
        keys, values = (
            _with_staged(part, rows[start:end], scales if fp8 else None, dtype)
            .repeat_interleave(ratio, dim=1)
            .transpose(0, 1)
            for part, rows, scales in zip(parts, (key, value), (k_scale, v_scale), strict=True)
        )
        q = (query[first:last].to(dtype) * query_scale[:, None]).transpose(0, 1)
        attended = _attend(
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


def _context(cache: Tensor, blocks: Tensor, tokens: int) -> Tensor:
    """[tokens, kv_heads, head_dim + value_dim]: the first tokens of a request, from its blocks."""
    size = cache.shape[2]
    position = torch.arange(tokens, device=cache.device)
    # Indexing takes no e4m3; its bytes are moved instead.
    raw = cache.view(torch.uint8) if cache.dtype in E4M3_CACHE_DTYPES else cache
    return raw[blocks[position // size].long(), :, position % size].view(cache.dtype)


def _attend(
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
