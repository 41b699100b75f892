"""Verification attention in two passes: over the committed context, then over the window.

The context pass attends the cache without causality (every query comes after all of it), the
window pass attends the staged rows causally, and both are merged by log-sum-exp. Any attention
function with FlashAttention's varlen arguments does the passes. It is the reference of the fused
kernel and serves what that does not, prefill chunks beside windows for example; it costs a second
attention launch and the merge.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from nwor_kernels.fp8 import E4M3_CACHE_DTYPES, quantize_e4m3

VarlenAttention = Callable[..., tuple[Tensor, Tensor]]
"""Takes what `torch_varlen_attention` takes; vLLM's `flash_attn_varlen_func` with
`return_softmax_lse=True` is one."""

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
    shared = {
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
) -> dict[str, object]:
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


def torch_varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float = 0.0,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Varlen attention with FlashAttention's arguments and meaning, request by request in float32.

    Args:
        q: [tokens, heads, head_dim].
        k, v: [rows, kv_heads, head_dim] with `cu_seqlens_k`, or [blocks, block_size, kv_heads,
            head_dim] with `seqused_k` and `block_table`.
        window_size: keys seen to the left and right of a query's own place, -1: all; the last
            query's place is the last key's.
        q_descale, k_descale, v_descale: [requests, kv_heads] factors.

    Returns:
        float32 [tokens, heads, head_dim] (0 where nothing is visible) and the log-sum-exp,
        [heads, tokens] (-inf there).
    """
    heads = q.shape[1]
    out = torch.zeros(q.shape, device=q.device)
    lse = torch.full((heads, q.shape[0]), float("-inf"), device=q.device)
    for request, (first, last) in enumerate(pairwise(cu_seqlens_q.tolist())):
        if first == last:
            continue
        if block_table is None:
            assert cu_seqlens_k is not None
            rows = slice(*cu_seqlens_k[request : request + 2].tolist())
            keys, values = k[rows].float(), v[rows].float()
        else:
            assert seqused_k is not None
            position = torch.arange(int(seqused_k[request]), device=q.device)
            block = block_table[request, position // k.shape[1]].long()
            keys, values = (_gathered_slots(part, block, position % k.shape[1]) for part in (k, v))
        factors = [
            1.0 if part is None else part[request, :, None]
            for part in (q_descale, k_descale, v_descale)
        ]
        ratio = heads // keys.shape[1]
        folded = q[first:last].float().unflatten(1, (-1, ratio))
        folded = folded * (factors[0] if q_descale is None else factors[0][..., None])
        scores = torch.einsum("qhrd,thd->hrqt", folded, keys * factors[1]) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(_hidden(scores, causal, window_size), float("-inf"))
        of_rows = scores.logsumexp(dim=-1)
        weights = torch.exp(scores - of_rows[..., None]).nan_to_num(0.0)
        out[first:last] = torch.einsum("hrqt,thd->qhrd", weights, values * factors[2]).flatten(1, 2)
        lse[:, first:last] = of_rows.flatten(0, 1)
    return out, lse


def _gathered_slots(cache: Tensor, block: Tensor, offset: Tensor) -> Tensor:
    if cache.dtype == torch.float8_e4m3fn:
        return cache.view(torch.uint8)[block, offset].view(cache.dtype).float()
    return cache[block, offset].float()


def _hidden(scores: Tensor, causal: bool, window_size: tuple[int, int]) -> Tensor:
    """[queries, keys]: which key each query may not see."""
    queries, keys = scores.shape[-2:]
    place = torch.arange(keys - queries, keys, device=scores.device)[:, None]
    token = torch.arange(keys, device=scores.device)[None, :]
    left, right = window_size
    hidden = torch.zeros(queries, keys, dtype=torch.bool, device=scores.device)
    if left >= 0:
        hidden |= token < place - left
    if causal or right >= 0:
        hidden |= token > place + (0 if causal else right)
    return hidden
