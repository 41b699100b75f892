"""`mla_verify_attention` on a GPU: the launch of the Triton kernel in `program.py`."""

import triton
from torch import Tensor

from nwor_kernels.fp8 import E4M3_CACHE_DTYPES
from nwor_kernels.launch import Launches
from nwor_kernels.mla_verify_attention.program import mla_verify_kernel
from nwor_kernels.mla_verify_attention.shape import (
    MlaTuning,
    create_workspace,
    launch_shape,
    unsupported_reason,
)
from nwor_kernels.verify_attention.kernel import compute_type, fp8_way
from nwor_kernels.verify_attention.workspace import VerifyWorkspace

_launches = Launches(mla_verify_kernel, free=frozenset({"scale", "requests"}))

__all__ = ["MlaTuning", "create_workspace", "launch_shape", "mla_verify_attention_triton"]


def mla_verify_attention_triton(
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
    max_query_len: int,
    max_seq_len: int,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    workspace: VerifyWorkspace | None = None,
    tuning: MlaTuning | None = None,
) -> None:
    """Attend the queries of every request with staged rows; other output rows stay as they are.

    Safe in a CUDA graph: nothing is read on the host, and nothing but a missing workspace is
    allocated.

    Args:
        query: [num_tokens, heads, latent_dim], absorbed (multiplied by W_UK); float8_e4m3fn where
            vLLM quantises queries.
        query_pe: [num_tokens, heads, pe_dim], the rotary part, of the dtype of `query`.
        latent: [rows, latent_dim] or [rows, 1, latent_dim], staged, last dimension contiguous.
        key_pe: [rows, pe_dim] or [rows, 1, pe_dim], staged likewise.
        kv_cache: [blocks, block_size, latent_dim + pe_dim], last dimension contiguous; of the
            dtype of `latent`, or e4m3 (uint8 is taken as e4m3).
        query_start_loc: [requests + 1] int32, non-decreasing, contiguous like the next ones.
        seq_lens: [requests] int32, tokens of each request, this step's included.
        block_table: [requests, max blocks] int32.
        staged_start, staged_end: [requests] int32: rows start..end-1 of `latent` and `key_pe` are
            the last end - start tokens of the request. None staged: the request is left alone.
        output: [num_tokens, heads, latent_dim], written in place, still to be multiplied by W_UV.
        scale: factor on the scores.
        max_query_len: most query rows of a request with staged rows.
        max_seq_len: upper bound of `seq_lens`.
        q_scale, k_scale: float32, one element; for fp8 queries and fp8 caches.
        workspace: from `create_workspace`; one is made if there is none.
        tuning: the launch's shape, for benchmarks.

    Raises:
        ValueError: the kernel does not serve this shape, or the workspace is too small for it.
    """
    requests = seq_lens.shape[0]
    heads, latent_dim = query.shape[1:]
    pe_dim = query_pe.shape[2]
    reason = unsupported_reason(latent_dim, pe_dim, max_query_len, latent.dtype, kv_cache.dtype)
    if reason:
        raise ValueError(f"mla_verify_attention does not serve this: {reason}")
    if requests == 0:
        return
    quantised = kv_cache.dtype in E4M3_CACHE_DTYPES
    itemsize = 2 if quantised else kv_cache.element_size()
    shape = launch_shape(
        max_query_len, heads, latent_dim, pe_dim, itemsize, query.device, tuning, requests
    )
    if workspace is None:
        workspace = create_workspace(
            requests, max_query_len, heads, latent_dim, pe_dim, itemsize, query.device, tuning
        )
    workspace.check(shape, requests * shape.row_tiles)
    steps = requests * shape.row_tiles * (triton.cdiv(max_seq_len, shape.block_n) + 1)
    grid = min(shape.programs, triton.cdiv(steps, shape.min_tiles))
    arguments = (
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
        q_scale,
        k_scale if quantised else None,
        workspace.accumulators,
        workspace.sums,
        workspace.arrived,
        scale,
        requests,
        block_table.stride(0),
        *query.stride()[:2],
        *query_pe.stride()[:2],
        latent.stride(0),
        key_pe.stride(0),
        *kv_cache.stride()[:2],
        *output.stride()[:2],
    )
    constants = {
        "Q_SCALE": q_scale is not None,
        "K_SCALE": quantised and k_scale is not None,
        "FP8": fp8_way(quantised),
        "COMPUTE": compute_type(latent, quantised),
        "HEADS": heads,
        "LATENT_DIM": latent_dim,
        "PE_DIM": pe_dim,
        "BLOCK_SIZE": kv_cache.shape[1],
        "MAX_REQUESTS": max(32, triton.next_power_of_2(requests)),
        "ROWS": shape.rows,
        "ROW_TILES": shape.row_tiles,
        "DIM": shape.dim,
        "PE": max(32, triton.next_power_of_2(pe_dim)),
        "BLOCK_N": shape.block_n,
        "WINDOW": max(16, triton.next_power_of_2(max_query_len)),
        "MIN_STEPS": shape.min_tiles,
        "DISCARD": int(shape.discard),
        "WHOLE_PAIRS": shape.whole_pairs,
        "MERGED": shape.merged,
    }
    _launches(
        (grid, 1, 1),
        arguments,
        constants,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
