"""Verification attention in two passes: over the committed context, then over the window.

The context pass attends the cache without causality (every query comes after all of it), the
window pass attends the staged rows causally, and both are merged by log-sum-exp. Any attention
function with FlashAttention's varlen arguments does the passes. It is the reference of the fused
kernel, and with FlashAttention's own function a way without it, for a second attention launch and
the merge; the plugin, whose kernel takes mixed batches too, does not call it.
"""

from typing import Any

import torch
from torch import Tensor

from nwor_kernels.fp8 import E4M3_CACHE_DTYPES, quantize_e4m3
from nwor_kernels.verify_attention.varlen_attention import VarlenAttention, torch_varlen_attention

FLASH_BLOCK = 16
"""FlashAttention's cache blocks are multiples of so many tokens."""


class TwoPassRefusedError(NotImplementedError):
    """What two passes cannot compute; `reason` is the word for a counted fallback."""

    def __init__(self, reason: str, message: str):
        super().__init__(f"{reason}: {message}")
        self.reason = reason


def verify_attention_two_pass(
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
    max_query_len: int,
    max_seq_len: int,
    sliding_window: int = -1,
    softcap: float = 0.0,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    staged_len: int | None = None,
    attention: VarlenAttention | None = None,
) -> None:
    """Attend the queries of every request with staged tokens; other output rows stay as they are.

    Nothing is read on the host, so that with a capturable `attention` it can be captured.

    Args:
        query, key, value, kv_cache, query_start_loc, seq_lens, block_table, staged_start,
            staged_end, output, scale, softcap, q_scale, k_scale, v_scale: as for
            `verify_attention_triton`; but a request's staged rows must be all of its query rows
            or all but the first. Prefill chunks are staged whole.
        max_query_len: most query rows of any request, staged or not.
        max_seq_len: upper bound of `seq_lens`.
        sliding_window: positions that a query sees, its own included; -1: all.
        staged_len: staged rows of every request that has any, where they are equal; a sliding
            window needs it, because FlashAttention counts back from the last key it is given.
        attention: does each pass; `torch_varlen_attention` if None.

    Raises:
        TwoPassRefusedError: a sliding window with unequal windows, or no longer than the window.
    """
    attention = attention or torch_varlen_attention
    context_window = (-1, -1)
    if sliding_window > 0:
        context_window = (_positions_left(sliding_window, staged_len), -1)
    requests = seq_lens.shape[0]
    staged = staged_end - staged_start
    fp8 = kv_cache.dtype in E4M3_CACHE_DTYPES
    if fp8:
        kv_cache = kv_cache.view(torch.float8_e4m3fn)
        key, value = (
            quantize_e4m3(rows, _one(rows) if scales is None else scales)
            for rows, scales in ((key, k_scale), (value, v_scale))
        )
    shared: dict[str, Any] = {
        "q": query,
        "cu_seqlens_q": query_start_loc,
        "max_seqlen_q": max_query_len,
        "softmax_scale": scale,
        "softcap": softcap,
    }
    for name, scales in (("q", q_scale), ("k", k_scale), ("v", v_scale)):
        if fp8 and scales is not None:
            shared[f"{name}_descale"] = scales.expand(requests, kv_cache.shape[1])
    cached_key, cached_value = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    of_context = attention(
        **shared,
        k=cached_key,
        v=cached_value,
        seqused_k=torch.where(staged > 0, seq_lens - staged, 0).int(),
        max_seqlen_k=max_seq_len,
        block_table=block_table,
        causal=False,
        window_size=context_window,
    )
    of_window = attention(
        **shared,
        **_staged_rows(key, value, query_start_loc, staged_start, staged_end, max_query_len),
        causal=True,
        window_size=(sliding_window - 1, 0) if sliding_window > 0 else (-1, -1),
    )
    merged = merge_attention(*of_context, *of_window)
    row = torch.arange(query.shape[0], device=query.device, dtype=query_start_loc.dtype)
    request = torch.searchsorted(query_start_loc[1:].contiguous(), row, right=True)
    in_request = request < requests  # padding rows follow the last request
    attended = in_request & (staged[request.clamp(max=requests - 1)] > 0)
    output.copy_(torch.where(attended[:, None, None], merged.to(output.dtype), output))


def merge_attention(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> Tensor:
    """Attention over two disjoint sets of keys from that over each, in float32.

    Args:
        out, other_out: [tokens, heads, head_dim].
        lse, other_lse: [heads, tokens], log of the sum of exponentials; infinite (of either sign,
            as FlashAttention's versions have it) where no key was visible.
    """
    lse, other_lse = (
        part.masked_fill(part.isinf(), float("-inf")).transpose(0, 1)[..., None]
        for part in (lse, other_lse)
    )
    both = torch.logaddexp(lse, other_lse)
    # Nothing seen: the output may be anything, NaN too, and must not be multiplied.
    first, second = (
        torch.where(part_lse.isinf(), 0.0, part.float() * torch.exp(part_lse - both))
        for part, part_lse in ((out, lse), (other_out, other_lse))
    )
    return first + second


def _positions_left(sliding_window: int, staged_len: int | None) -> int:
    """FlashAttention's left window in the context pass, which ends `staged_len` tokens early."""
    if staged_len is None:
        raise TwoPassRefusedError(
            "sliding_window_of_unequal_windows", "the requests' windows must be equally long"
        )
    if sliding_window <= staged_len:
        raise TwoPassRefusedError(
            "sliding_window_too_short",
            f"{sliding_window} positions must be more than the window's {staged_len}",
        )
    return sliding_window - 1 - staged_len


def _staged_rows(
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    staged_start: Tensor,
    staged_end: Tensor,
    max_query_len: int,
) -> dict[str, Any]:
    """The staged K/V as attention's arguments: in place, or copied to one cache block a request."""
    first, size = query_start_loc.data_ptr(), query_start_loc.element_size()
    if (staged_start.data_ptr(), staged_end.data_ptr()) == (first, first + size):
        return {
            "k": key,
            "v": value,
            "cu_seqlens_k": query_start_loc,
            "max_seqlen_k": max_query_len,
        }
    block_size = -(-max_query_len // FLASH_BLOCK) * FLASH_BLOCK
    requests = torch.arange(staged_start.shape[0], device=key.device, dtype=torch.int32)
    row = staged_start[:, None] + torch.arange(block_size, device=key.device)
    row = row.where(row < staged_end[:, None], 0).long()
    return {
        "k": _gathered(key, row),
        "v": _gathered(value, row),
        "seqused_k": (staged_end - staged_start).int(),
        "max_seqlen_k": max_query_len,
        "block_table": requests[:, None],
    }


def _gathered(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index], of e4m3 too, which indexing does not take."""
    if rows.dtype == torch.float8_e4m3fn:
        return rows.view(torch.uint8)[index].view(rows.dtype)
    return rows[index]


def _one(like: Tensor) -> Tensor:
    return torch.ones(1, device=like.device)
