"""`nwor::mla_verify_attention`: a window's absorbed queries over committed and staged latents."""

import torch
from torch import Tensor

from nwor_kernels.mla_verify_attention.reference import mla_verify_attention_reference

__all__ = ["mla_verify_attention", "mla_verify_attention_reference"]


@torch.library.custom_op("nwor::mla_verify_attention", mutates_args=("output",), device_types="cpu")
def mla_verify_attention(
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
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
) -> None:
    """See `mla_verify_attention_triton` for shapes and meaning."""
    mla_verify_attention_reference(
        query,
        query_pe,
        latent,
        key_pe,
        kv_cache,
        query_start_loc,
        seq_lens,
        block_table,
        staged_start,
        staged_end,
        output,
        scale=scale,
        q_scale=q_scale,
        k_scale=k_scale,
    )


@mla_verify_attention.register_kernel("cuda")
def _(
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
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
) -> None:
    """One Triton launch with a new workspace; hot paths reuse one and call the launch itself.

    Triton is imported by the first call, which only a GPU makes.
    """
    from nwor_kernels.mla_verify_attention.kernel import mla_verify_attention_triton

    mla_verify_attention_triton(
        query,
        query_pe,
        latent,
        key_pe,
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
        q_scale=q_scale,
        k_scale=k_scale,
    )


@mla_verify_attention.register_fake
def _(
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
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
) -> None:
    """Nothing to infer: the operator only mutates."""
