"""Varlen attention with FlashAttention's arguments: its type, and torch's own.

The passes of `verify_attention_two_pass` are made of it.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

VarlenAttention = Callable[..., tuple[Tensor, Tensor]]
"""Takes what `torch_varlen_attention` takes and returns what that returns; vLLM's
`flash_attn_varlen_func` with `return_softmax_lse=True` is one."""


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
        cu_seqlens_q, cu_seqlens_k: [requests + 1], first row of each request.
        max_seqlen_q, max_seqlen_k: FlashAttention's; nothing depends on them here.
        softmax_scale: factor on the scores.
        causal: a query sees keys up to its own place.
        window_size: keys seen to the left and right of a query's own place, -1: all; the last
            query's place is the last key's.
        softcap: if > 0, scores become softcap * tanh(scores / softcap).
        seqused_k: [requests], cached tokens of each request.
        block_table: [requests, max blocks].
        q_descale, k_descale, v_descale: [requests, kv_heads] factors.

    Returns:
        float32 [tokens, heads, head_dim] (0 where nothing is visible) and the log-sum-exp,
        [heads, tokens] (-inf there).
    """
    heads, head_dim = q.shape[1:]
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
        kv_heads = keys.shape[1]
        keys = keys * _factors(k_descale, request, q.device)
        values = values * _factors(v_descale, request, q.device)
        folded = q[first:last].float().reshape(last - first, kv_heads, -1, head_dim)
        folded = folded * _factors(q_descale, request, q.device)[..., None]
        scores = torch.einsum("qhrd,thd->hrqt", folded, keys) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(_hidden(scores, causal, window_size), float("-inf"))
        of_rows = scores.logsumexp(dim=-1)
        weights = torch.exp(scores - of_rows[..., None]).nan_to_num(0.0)
        out[first:last] = torch.einsum("hrqt,thd->qhrd", weights, values).flatten(1, 2)
        lse[:, first:last] = of_rows.flatten(0, 1)
    return out, lse


def _factors(descale: Tensor | None, request: int, device: torch.device) -> Tensor:
    """[kv_heads or 1, 1]"""
    return torch.ones(1, 1, device=device) if descale is None else descale[request, :, None]


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
