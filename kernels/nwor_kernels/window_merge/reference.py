"""References of the merge in torch, one request at a time."""

import torch
from torch import Tensor

from nwor_kernels.fp8 import quantize_e4m3


def merge_window_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    staged_start: Tensor,
    staged_end: Tensor,
    output: Tensor,
    lse: Tensor,
    *,
    scale: float,
    quantised: bool = False,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """`merge_window_triton`, computed in `dtype` (float64 for tests)."""
    heads, kv_heads = query.shape[1], key.shape[1]
    ratio = heads // kv_heads
    for request, length in enumerate(seq_lens.tolist()):
        first, last = query_start_loc[request : request + 2].tolist()
        start, end = int(staged_start[request]), int(staged_end[request])
        if start == end or first == last:
            continue
        rows, staged = last - first, end - start
        keys, values = (
            _as_read_back(each[start:end], factor if quantised else None, quantised, dtype)
            .repeat_interleave(ratio, dim=1)
            for each, factor in ((key, k_scale), (value, v_scale))
        )  # fmt: skip
        queries = query[first:last].to(dtype)
        if q_scale is not None:
            factors = q_scale.to(dtype).reshape(-1).expand(kv_heads)
            queries = queries * factors.repeat_interleave(ratio)[:, None]
        scores = torch.einsum("qhd,khd->qhk", queries, keys) * scale
        position = torch.arange(staged - rows, staged, device=query.device)
        hidden = torch.arange(staged, device=query.device)[None, :] > position[:, None]
        scores = scores.masked_fill(hidden[:, None, :], float("-inf"))
        sums = lse[:, first:last].to(dtype).T[..., None]
        before = output[first:last].to(dtype)
        if length == staged:
            sums, before = torch.full_like(sums, float("-inf")), torch.zeros_like(before)
        weights = torch.cat([sums, scores], dim=-1).softmax(dim=-1)
        merged = torch.einsum("qhk,khd->qhd", weights[..., 1:], values)
        output[first:last] = (merged + weights[..., :1] * before).to(output.dtype)


def _as_read_back(
    rows: Tensor, scale: Tensor | None, quantised: bool, dtype: torch.dtype
) -> Tensor:
    """Staged rows as attention would read them from the cache."""
    if not quantised:
        return rows.to(dtype)
    unit = torch.ones(1, device=rows.device) if scale is None else scale
    return quantize_e4m3(rows, unit).to(dtype) * unit.to(dtype).reshape(-1, 1)
