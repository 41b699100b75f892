"""References of the MLA kernels in torch, one request at a time.

Queries are absorbed: projected into the latent space of the cache. A cached row is both the key
(all of it) and the value (its latent part), shared by all heads.
"""

import torch
from torch import Tensor

from nwor_kernels.fp8 import E4M3_CACHE_DTYPES, quantize_e4m3


def mla_verify_attention_reference(
    query: Tensor,
    query_pe: Tensor,
    latent: Tensor,
    key_pe: Tensor,
    kv_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    staged_start: Tensor,
    staged_end: Tensor,
    output: Tensor,
    *,
    scale: float,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """`mla_verify_attention_triton`, computed in `dtype` (float64 for tests).

    Reads only committed context and staged rows.
    """
    width = query.shape[2]
    bounds = zip(staged_start.tolist(), staged_end.tolist(), strict=True)
    for request, (start, end) in enumerate(bounds):
        first, last = query_start_loc[request : request + 2].tolist()
        if start == end or first == last:
            continue
        length = int(seq_lens[request])
        staged = torch.cat([latent[start:end].flatten(1), key_pe[start:end].flatten(1)], dim=-1)
        context = _context(kv_cache, block_table[request], length - (end - start))
        keys = _as_cached(context, staged, k_scale, dtype)
        queries = torch.cat([query[first:last].to(dtype), query_pe[first:last].to(dtype)], dim=-1)
        if q_scale is not None:
            queries = queries * q_scale.to(dtype)
        position = torch.arange(length - (last - first), length, device=keys.device)
        hidden = torch.arange(length, device=keys.device)[None, :] > position[:, None]
        scores = torch.einsum("qhd,td->hqt", queries, keys) * scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        output[first:last] = torch.einsum("hqt,td->qhd", weights, keys[:, :width]).to(output.dtype)


def mla_tail_reference(
    query: Tensor,
    query_pe: Tensor,
    latent: Tensor,
    key_pe: Tensor,
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
    selection: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """`mla_tail_triton`, computed in `dtype`."""
    width = query.shape[2]
    for request, length in enumerate(seq_lens.tolist()):
        first, last = query_start_loc[request : request + 2].tolist()
        start, end = int(staged_start[request]), int(staged_end[request])
        if start == end or first == last or length < last - first:
            continue
        staged = torch.cat([latent[start:end].flatten(1), key_pe[start:end].flatten(1)], dim=-1)
        context = _context(kv_cache, block_table[request], length - (end - start))
        keys = _as_cached(context, staged, None, dtype)
        queries = torch.cat([query[first:last].to(dtype), query_pe[first:last].to(dtype)], dim=-1)
        key = torch.arange(length, device=keys.device)[None, :]
        position = torch.arange(length - (last - first), length, device=keys.device)[:, None]
        seen_until = position + 1 - (end - start)
        saw_nothing = seen_until[..., None] <= 0
        hidden = (key < seen_until) | (key > position)
        if selection is not None:
            counts, bits = selection[:, first:last, None].long()
            staged_row = key - (length - (end - start))
            hidden = (staged_row < 0) | ((bits >> staged_row.clamp(min=0)) & 1 == 0)
            saw_nothing = counts[..., None] == 0
        scores = torch.einsum("qhd,td->qht", queries, keys) * scale
        scores = scores.masked_fill(hidden[:, None], float("-inf"))
        stock = lse[first:last, :, None].to(dtype).masked_fill(saw_nothing, float("-inf"))
        weights = torch.cat([stock, scores], dim=-1).softmax(dim=-1)
        values = output[first:last].to(dtype).masked_fill(saw_nothing, 0.0)
        merged = weights[..., :1] * values + weights[..., 1:] @ keys[:, :width]
        output[first:last] = merged.to(output.dtype)


def split_selection_reference(
    selected: Tensor,
    request_of: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    staged_start: Tensor,
    staged_end: Tensor,
    rows: Tensor,
    selection: Tensor,
    *,
    block_size: int,
    block_rows: int,
) -> None:
    """`split_selection_triton`, one query row at a time."""
    rows.fill_(-1)
    selection.zero_()
    for token, request in enumerate(request_of.tolist()):
        committed = int(seq_lens[request] - staged_end[request] + staged_start[request])
        positions = [position for position in selected[token].tolist() if position >= 0]
        cached = [position for position in positions if position < committed]
        for place, position in enumerate(cached):
            block = int(block_table[request, position // block_size])
            rows[token, place] = block * block_rows + position % block_size
        selection[0, token] = len(cached)
        staged = int(seq_lens[request]) - committed
        selection[1, token] = sum(1 << (p - committed) for p in positions
                                  if committed <= p < committed + staged)  # fmt: skip


def _context(cache: Tensor, blocks: Tensor, tokens: int) -> Tensor:
    """[tokens, width]: the first cached rows of a request, from its blocks."""
    size = cache.shape[1]
    position = torch.arange(tokens, device=cache.device)
    # Indexing takes no e4m3; its bytes are moved instead.
    raw = cache.view(torch.uint8) if cache.dtype in E4M3_CACHE_DTYPES else cache
    return raw[blocks[position // size].long(), position % size]


def _as_cached(context: Tensor, staged: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[tokens, width]: cached rows, then the staged ones as if they had been written and read."""
    if context.dtype != torch.uint8:
        return torch.cat([context.to(dtype), staged.to(dtype)])
    unit = torch.ones(1, device=staged.device) if scale is None else scale
    read_back = quantize_e4m3(staged.unsqueeze(1), unit).squeeze(1)
    both = torch.cat([context.view(torch.float8_e4m3fn).to(dtype), read_back.to(dtype)])
    return both * unit.to(dtype)
