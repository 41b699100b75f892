"""Reference of the merge in torch, one request at a time."""

import torch
from torch import Tensor

from nwor_kernels.attention_step import AttentionStep
from nwor_kernels.fp8 import E4M3_CACHE_DTYPES, quantize_e4m3


def merge_window_reference(
    step: AttentionStep, lse: Tensor, dtype: torch.dtype = torch.float32
) -> None:
    """`merge_window_triton`, computed in `dtype` (float64 for tests)."""
    query, output, q_scale = step.query, step.output, step.scales.query
    starts, seq_lens, _, staged_start, staged_end = step.requests
    cache_dtype, kv_heads = step.kv_cache.dtype, step.key.shape[1]
    ratio = query.shape[1] // kv_heads
    for request, length in enumerate(seq_lens.tolist()):
        first, last = starts[request : request + 2].tolist()
        start, end = int(staged_start[request]), int(staged_end[request])
        rows, staged = last - first, end - start
        if staged == 0 or rows == 0:
            continue
        keys, values = (
            _as_read_back(tensor[start:end], factor, cache_dtype, dtype).repeat_interleave(ratio, 1)
            for tensor, factor in ((step.key, step.scales.key), (step.value, step.scales.value))
        )
        queries = query[first:last].to(dtype)
        if q_scale is not None:
            factors = q_scale.to(dtype).reshape(-1).expand(kv_heads)
            queries = queries * factors.repeat_interleave(ratio)[:, None]
        number, of_staged = (torch.arange(n, device=query.device) for n in (rows, staged))
        hidden = of_staged > (staged - rows + number)[:, None]
        scores = torch.einsum("qhd,khd->qhk", queries, keys) * step.scores.scale
        scores = scores.masked_fill(hidden[:, None], float("-inf"))
        sums = lse[:, first:last].to(dtype).T[..., None]
        before = output[first:last].to(dtype)
        if length <= staged:  # stock saw nothing
            sums, before = torch.full_like(sums, float("-inf")), torch.zeros_like(before)
        weights = torch.cat([sums, scores], dim=-1).softmax(dim=-1)
        merged = torch.einsum("qhk,khd->qhd", weights[..., 1:], values)
        output[first:last] = (merged + weights[..., :1] * before).to(output.dtype)


def _as_read_back(
    staged: Tensor, scale: Tensor | None, cache_dtype: torch.dtype, dtype: torch.dtype
) -> Tensor:
    """Staged rows as if they had been written and read."""
    if cache_dtype not in E4M3_CACHE_DTYPES:
        return staged.to(dtype)
    unit = torch.ones(1, device=staged.device) if scale is None else scale
    return quantize_e4m3(staged, unit).to(dtype) * unit.to(dtype).reshape(-1, 1)
