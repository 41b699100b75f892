"""References of the MLA kernels in torch, one request at a time.

Queries are absorbed: projected into the latent space of the cache. A cached row is both the key
(all of it) and the value (its latent part), shared by all heads.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nwor_kernels.attention_step import AttentionStep
from nwor_kernels.fp8 import E4M3_CACHE_DTYPES, quantize_e4m3


def mla_verify_attention_reference(step: AttentionStep, dtype: torch.dtype = torch.float32) -> None:
    """`mla_verify_attention_triton`, computed in `dtype` (float64 for tests).

    Reads only committed context and staged rows.
    """
    for request in _requests(step, dtype):
        query, keys, key, position = request.query, request.keys, request.key, request.position
        if step.scales.query is not None:
            query = query * step.scales.query.to(dtype)
        scores = torch.einsum("qhd,td->hqt", query, keys) * step.scores.scale
        weights = scores.masked_fill(key > position, float("-inf")).softmax(dim=-1)
        attended = torch.einsum("hqt,td->qhd", weights, keys[:, : step.query.shape[2]])
        step.output[request.rows] = attended.to(step.output.dtype)


def mla_tail_reference(
    step: AttentionStep, lse: Tensor, dtype: torch.dtype = torch.float32
) -> None:
    """`mla_tail_triton`, computed in `dtype`."""
    for request in _requests(step, dtype):
        keys, key, position = request.keys, request.key, request.position
        seen_until = position + 1 - request.staged
        saw_nothing = seen_until[..., None] <= 0
        hidden = (key < seen_until) | (key > position)
        scores = torch.einsum("qhd,td->qht", request.query, keys) * step.scores.scale
        scores = scores.masked_fill(hidden[:, None], float("-inf"))
        stock = lse[request.rows, :, None].to(dtype).masked_fill(saw_nothing, float("-inf"))
        weights = torch.cat([stock, scores], dim=-1).softmax(dim=-1)
        values = step.output[request.rows].to(dtype).masked_fill(saw_nothing, 0.0)
        latents = keys[:, : step.query.shape[2]]
        merged = weights[..., :1] * values + weights[..., 1:] @ latents
        step.output[request.rows] = merged.to(step.output.dtype)


class _Request(NamedTuple):
    """One request with staged rows."""

    rows: slice
    """The request's rows of the batch."""
    query: Tensor
    """[queries, heads, width], both parts."""
    keys: Tensor
    """[tokens, width], as read from the cache, the staged rows last."""
    key: Tensor
    """[1, tokens], positions."""
    position: Tensor
    """[queries, 1], of the queries."""
    staged: int
    """Staged rows."""


def _requests(step: AttentionStep, dtype: torch.dtype) -> Iterator[_Request]:
    """Requests with query rows, staged rows and tokens, in `dtype`; queries without their scale."""
    assert step.query_pe is not None
    starts, seq_lens, block_table, staged_start, staged_end = step.requests
    bounds = zip(staged_start.tolist(), staged_end.tolist(), strict=True)
    for request, (start, end) in enumerate(bounds):
        first, last = starts[request : request + 2].tolist()
        length, rows = int(seq_lens[request]), slice(first, last)
        if start == end or first == last or length < last - first:
            continue
        parts = (step.key[start:end].flatten(1), step.value[start:end].flatten(1))
        context = _context(step.kv_cache, block_table[request], length - (end - start))
        keys = _as_cached(context, torch.cat(parts, dim=-1), step.scales.key, dtype)
        query = torch.cat([step.query[rows].to(dtype), step.query_pe[rows].to(dtype)], dim=-1)
        key = torch.arange(length, device=keys.device)[None, :]
        position = torch.arange(length - (last - first), length, device=keys.device)[:, None]
        yield _Request(rows, query, keys, key, position, end - start)


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
