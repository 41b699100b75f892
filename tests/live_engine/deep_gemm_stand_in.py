"""The scores of vLLM's sparse indexer in torch, for machines on which DeepGEMM does not load.

vLLM takes both only from DeepGEMM: a score is the sum over heads of weight * relu(q.k), times the
key's scale. A key is 128 bytes of fp8; a block has its keys first, then a float32 scale for each.
Nothing waits for the device and no size depends on a value, so that full CUDA graphs capture it.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

INDEXER = "vllm.model_executor.layers.sparse_attn_indexer"


def use_where_missing(monkeypatch: pytest.MonkeyPatch) -> bool:
    """Put these in DeepGEMM's place where it does not load; whether that was so.

    The metadata's builder is left to find none: it then gives the indexer one query a row.
    """
    from vllm.utils.import_utils import has_deep_gemm

    if has_deep_gemm():
        return False
    monkeypatch.setattr(f"{INDEXER}.has_deep_gemm", lambda: True)
    monkeypatch.setattr(f"{INDEXER}.fp8_fp4_mqa_logits", scores_of_rows)
    monkeypatch.setattr(f"{INDEXER}.fp8_fp4_paged_mqa_logits", scores_of_pages)
    return True


def scores_of_rows(
    q: tuple[Tensor, None], kv: tuple[Tensor, Tensor], weights: Tensor, *_: Any, **__: Any
) -> Tensor:
    """[rows, keys] float32: every query [rows, heads, 128] with every key [keys, 128].

    Head by head, since all scores of a long prefill at once would not fit into memory.
    """
    queries, keys, scales = q[0], kv[0].float(), kv[1].reshape(-1)
    scores = torch.zeros(len(queries), len(keys), device=keys.device)
    for head in range(queries.shape[1]):
        scores += (queries[:, head].float() @ keys.T).relu_() * weights[:, head, None]
    return scores * scales


def scores_of_pages(
    q: tuple[Tensor, None],
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    schedule_metadata: Any,
    max_model_len: int,
    **_: Any,
) -> Tensor:
    """[requests * queries, max_model_len] float32; -inf behind each row's context.

    Queries are [requests, queries, heads, 128], the cache [blocks, block_size, 1, 132] uint8.
    """
    requests, per_request, heads, dim = q[0].shape
    blocks, size = kv_cache.shape[:2]
    pages = kv_cache.as_strided((blocks, size * (dim + 4)), (kv_cache.stride(0), 1))
    wanted = block_tables[:requests, : -(-max_model_len // size)].long().clamp(0, blocks - 1)
    found = pages[wanted]
    keys = found[..., : size * dim].view(torch.float8_e4m3fn).float().reshape(requests, -1, dim)
    scales = found[..., size * dim :].contiguous().view(torch.float32).reshape(requests, 1, -1)
    queries = q[0].float().reshape(requests, per_request * heads, dim)
    products = torch.bmm(queries, keys.transpose(1, 2)).relu_()
    products = products.view(requests, per_request, heads, -1)
    weighted = products * weights[: requests * per_request].view(requests, per_request, heads, 1)
    scores = (weighted.sum(2) * scales).view(requests * per_request, -1)[:, :max_model_len]
    ends = context_lens.reshape(-1)
    if len(ends) != len(scores):  # the length of each request's last query
        last = torch.arange(1 - per_request, 1, device=ends.device)
        ends = (ends[:, None] + last).reshape(-1)
    place = torch.arange(scores.shape[1], device=ends.device)
    all_scores = torch.full((len(scores), max_model_len), -torch.inf, device=ends.device)
    all_scores[:, : scores.shape[1]] = scores.masked_fill(place >= ends[:, None], -torch.inf)
    return all_scores
