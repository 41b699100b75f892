"""`nwor::verify_attention`: a window's queries over committed and staged K/V."""

import torch
from torch import Tensor

from nwor_kernels.verify_attention.reference import (
    AttentionPlan,
    plan_attention,
    verify_attention_reference,
)
from nwor_kernels.verify_attention.varlen_reference import verify_attention_varlen_reference

__all__ = [
    "AttentionPlan",
    "plan_attention",
    "verify_attention",
    "verify_attention_reference",
    "verify_attention_varlen_reference",
]


@torch.library.custom_op("nwor::verify_attention", mutates_args=("output",), device_types="cpu")
def verify_attention(
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
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    sliding_window: int = -1,
    softcap: float = 0.0,
    chunk: int = -1,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """See `verify_attention_triton` for shapes and meaning."""
    verify_attention_varlen_reference(
        query,
        key,
        value,
        kv_cache,
        query_start_loc,
        seq_lens,
        block_table,
        staged_start,
        staged_end,
        output,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        chunk=chunk,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )


@verify_attention.register_kernel("cuda")
def _(
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
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    sliding_window: int = -1,
    softcap: float = 0.0,
    chunk: int = -1,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """One Triton launch with a new workspace; hot paths reuse a workspace and call
    `verify_attention_triton`. Triton is imported by the first call, which only a GPU makes."""
    from nwor_kernels.verify_attention.kernel import verify_attention_triton

    verify_attention_triton(
        query,
        key,
        value,
        kv_cache,
        query_start_loc,
        seq_lens,
        block_table,
        staged_start,
        staged_end,
        output,
        scale=scale,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        sliding_window=sliding_window,
        softcap=softcap,
        chunk=chunk,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )


@verify_attention.register_fake
def _(
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
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    sliding_window: int = -1,
    softcap: float = 0.0,
    chunk: int = -1,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Nothing to infer: the operator only mutates."""
