"""Reference of the merge in torch, one request at a time."""

import torch
from torch import Tensor

from nwor_kernels.fp8 import E4M3_CACHE_DTYPES, quantize_e4m3


def merge_window_reference(
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
    lse: Tensor,
    *,
    scale: float,
    causal: bool,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """`merge_window_triton`, computed in `dtype` (float64 for tests)."""
    kv_heads, head_dim = key.shape[1:]
    ratio = query.shape[1] // kv_heads
    for request, length in enumerate(seq_lens.tolist()):
        first, last = query_start_loc[request : request + 2].tolist()
        start, end = int(staged_start[request]), int(staged_end[request])
        if start == end or first == last:
            continue
        rows, committed = last - first, length - (end - start)
        begin = max(committed - (rows - 1), 0) if causal else committed
        context = _tokens(kv_cache, block_table[request], begin, committed)
        parts = context.tensor_split((head_dim,), dim=-1)
        keys, values = (
            _as_read_back(part, staged[start:end], factor, dtype).repeat_interleave(ratio, dim=1)
            for part, staged, factor in zip(parts, (key, value), (k_scale, v_scale), strict=True)
        )
        queries = query[first:last].to(dtype)
        if q_scale is not None:
            factors = q_scale.to(dtype).reshape(-1).expand(kv_heads)
            queries = queries * factors.repeat_interleave(ratio)[:, None]
        number = torch.arange(rows, device=query.device)[:, None]
        seen_until = committed - (rows - 1 - number if causal else 0 * number)
        position = torch.arange(begin, length, device=query.device)
        hidden = (position < seen_until) | (position > length - rows + number)
        scores = torch.einsum("qhd,khd->qhk", queries, keys) * scale
        scores = scores.masked_fill(hidden[:, None], float("-inf"))
        saw_nothing = seen_until[:, None] <= 0
        sums = lse[:, first:last].to(dtype).T[..., None].masked_fill(saw_nothing, float("-inf"))
        before = output[first:last].to(dtype).masked_fill(saw_nothing, 0.0)
        weights = torch.cat([sums, scores], dim=-1).softmax(dim=-1)
        merged = torch.einsum("qhk,khd->qhd", weights[..., 1:], values)
        output[first:last] = (merged + weights[..., :1] * before).to(output.dtype)


def _tokens(cache: Tensor, blocks: Tensor, begin: int, end: int) -> Tensor:
    """[tokens, kv_heads, head_dim + value_dim]: cached tokens of a request."""
    size = cache.shape[2]
    position = torch.arange(begin, end, device=cache.device)
    # Indexing takes no e4m3; its bytes are moved instead.
    raw = cache.view(torch.uint8) if cache.dtype in E4M3_CACHE_DTYPES else cache
    return raw[blocks[position // size].long(), :, position % size]


def _as_read_back(
    context: Tensor, staged: Tensor, scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Cached rows, then the staged ones as if they had been written and read."""
    if context.dtype != torch.uint8:
        return torch.cat([context.to(dtype), staged.to(dtype)])
    unit = torch.ones(1, device=staged.device) if scale is None else scale
    both = torch.cat(
        [context.view(torch.float8_e4m3fn).to(dtype), quantize_e4m3(staged, unit).to(dtype)]
    )
    return both * unit.to(dtype).reshape(-1, 1)
