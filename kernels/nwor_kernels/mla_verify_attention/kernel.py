"""`mla_verify_attention` on a GPU: the launch of the Triton kernel in `program.py`."""

from functools import lru_cache

import torch
import triton
from torch import Tensor

from nwor_kernels.attention_step import AttentionStep
from nwor_kernels.fp8 import E4M3_CACHE_DTYPES
from nwor_kernels.launch import Launches
from nwor_kernels.mla_verify_attention.program import mla_verify_kernel
from nwor_kernels.verify_attention.kernel import VerifyWorkspace, compute_type, fp8_way
from nwor_kernels.verify_attention.tuning import (
    WHOLE_PAIRS,
    LaunchShape,
    Tuning,
    discard_on,
    processors_of,
    shared_memory,
    unsupported_step,
)

_launches = Launches(mla_verify_kernel, free=frozenset({"scale", "requests"}))

MAX_LATENT_DIM = 512
"""An accumulator of 64 rows then takes 128 registers of each of 256 threads."""

ROWS, MAX_ROWS, MANY_ROWS = 32, 64, 256
"""Query rows of a tile; as many as one warp group's matrix instruction takes if a request has
MANY_ROWS. If tiles of 16 leave multiprocessors idle, it is 16: there is less to merge."""

SLACK = 24 * 1024
"""Bytes of shared memory left to weights, reductions and changes of layout."""

STEPS = ((64, 2), (32, 3), (32, 2), (16, 2))
"""(Tokens of context a step, steps in flight), the first that fits into shared memory."""


def unsupported_reason(
    latent_dim: int, pe_dim: int, max_query_len: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> str | None:
    """The fallback reason if the kernel does not serve this shape; None if it does."""
    if latent_dim > MAX_LATENT_DIM or latent_dim < 32 or latent_dim % 16:
        return f"latent_dim_{latent_dim}"
    if pe_dim < 16 or pe_dim % 16 or pe_dim > 128:
        return f"rope_dim_{pe_dim}"
    return unsupported_step(max_query_len, dtype, cache_dtype)


@lru_cache(4096)
def launch_shape(
    max_query_len: int,
    heads: int,
    latent_dim: int,
    pe_dim: int,
    itemsize: int,
    device: torch.device,
    tuning: Tuning | None = None,
    requests: int | None = None,
) -> LaunchShape:
    """The shape of a launch, by rules measured on an H200.

    Shared memory holds the query rows and the cache rows of each step in flight. At 512 + 64 in
    bf16, 32 query rows and two steps of 64 tokens take (32 + 128) x 576 x 2 = 180 KiB of 227.

    Args:
        max_query_len: most query rows of a request with a window.
        heads: query heads.
        latent_dim, pe_dim: the two parts of a cached row, in elements.
        itemsize: bytes of an element of the products.
        device, tuning: as in `verify_attention`'s `launch_shape`.
        requests: of the launch; None: enough to fill the GPU.
    """
    tuning = tuning or Tuning()
    folded = max_query_len * heads
    dim = triton.next_power_of_2(latent_dim)
    width = (dim + triton.next_power_of_2(pe_dim)) * itemsize
    limit, processors = shared_memory(device), processors_of(device)
    is_small = requests is not None and requests * triton.cdiv(folded, 16) <= processors
    wanted = tuning.rows or rows_wanted(folded, is_small)
    fitting = [
        (rows, block_n, stages)
        for rows in (wanted, wanted // 2, wanted // 4)
        for block_n, stages in STEPS
        if rows >= 16 and (rows + block_n * stages) * width + SLACK <= limit
    ]
    rows, block_n, stages = fitting[0] if fitting else (16, 16, 1)
    is_wide = rows * dim >= 64 * 512
    return LaunchShape(
        rows=rows,
        row_tiles=triton.cdiv(folded, rows),
        dim=dim,
        out_dim=dim,
        block_n=tuning.block_n or block_n,
        programs=tuning.programs or processors * (1 if is_wide or is_small else 2),
        min_tiles=tuning.min_tiles or 2,
        num_warps=tuning.num_warps or (8 if is_wide else 4),
        num_stages=tuning.num_stages or stages,
        discard=discard_on(device, tuning.discard),
        whole_pairs=WHOLE_PAIRS if tuning.whole_pairs is None else tuning.whole_pairs,
        merged=tuning.merged or 1,
    )


def rows_wanted(folded: int, is_small: bool) -> int:
    """Query rows of a tile for requests of `folded` rows; `is_small`: few tiles in all."""
    most = 16 if is_small else MAX_ROWS if folded >= MANY_ROWS else ROWS
    return min(most, max(16, triton.next_power_of_2(folded)))


def create_workspace(
    max_requests: int,
    max_query_len: int,
    heads: int,
    latent_dim: int,
    pe_dim: int,
    itemsize: int,
    device: torch.device,
    tuning: Tuning | None = None,
) -> VerifyWorkspace:
    """Room for any launch of up to `max_requests` requests and `max_query_len` query rows each.

    Arguments as for `launch_shape`.
    """
    shapes = [
        launch_shape(length, heads, latent_dim, pe_dim, itemsize, device, tuning)
        for length in range(1, max_query_len + 1)
    ]
    rows = 2 * max(shape.programs * shape.rows for shape in shapes)
    # Launches of few requests have smaller tiles: at most as many as multiprocessors.
    tiles = max(max_requests * max(shape.row_tiles for shape in shapes), processors_of(device))
    return VerifyWorkspace.allocate(rows, shapes[0].dim, tiles, device)


def mla_verify_attention_triton(
    step: AttentionStep, workspace: VerifyWorkspace, tuning: Tuning | None = None
) -> None:
    """Attend the queries of every request with staged rows; other output rows stay as they are.

    Safe in a CUDA graph: it reads nothing on the host and allocates nothing.

    Args:
        workspace: from `create_workspace`.
        tuning: the launch's shape, for benchmarks.

    Raises:
        ValueError: the kernel does not serve this shape, or the workspace is too small for it.
    """
    query, query_pe, latent, key_pe, kv_cache, output = latent_tensors(step)
    requests, max_query_len = step.requests.seq_lens.shape[0], step.max_query_len
    heads, latent_dim = query.shape[1:]
    pe_dim = query_pe.shape[2]
    reason = unsupported_reason(latent_dim, pe_dim, max_query_len, latent.dtype, kv_cache.dtype)
    if reason:
        raise ValueError(f"mla_verify_attention does not serve this: {reason}")
    if requests == 0:
        return
    quantised = kv_cache.dtype in E4M3_CACHE_DTYPES
    q_scale, k_scale = step.scales.query, step.scales.key if quantised else None
    itemsize = 2 if quantised else kv_cache.element_size()
    shape = launch_shape(
        max_query_len, heads, latent_dim, pe_dim, itemsize, query.device, tuning, requests
    )
    workspace.check(shape, requests * shape.row_tiles)
    steps = requests * shape.row_tiles * (triton.cdiv(step.max_seq_len, shape.block_n) + 1)
    grid = min(shape.programs, triton.cdiv(steps, shape.min_tiles))
    arguments = (
        query,
        query_pe,
        latent,
        key_pe,
        kv_cache,
        *step.requests,
        output,
        q_scale,
        k_scale,
        workspace.accumulators,
        workspace.sums,
        workspace.arrived,
        step.scores.scale,
        requests,
        *strides_of(step),
    )
    constants = {
        "Q_SCALE": q_scale is not None,
        "K_SCALE": k_scale is not None,
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
        (grid, 1, 1), arguments, constants, num_warps=shape.num_warps, num_stages=shape.num_stages
    )


def latent_tensors(step: AttentionStep) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries and their rotary part, latents and theirs, cache and output of a latent layer."""
    assert step.query_pe is not None
    return step.query, step.query_pe, step.key, step.value, step.kv_cache, step.output


def strides_of(step: AttentionStep) -> tuple[int, ...]:
    """Strides of a latent layer's tensors, in the order of the kernels' arguments."""
    query, query_pe, latent, key_pe, kv_cache, output = latent_tensors(step)
    return (
        step.requests.block_table.stride(0),
        *query.stride()[:2],
        *query_pe.stride()[:2],
        latent.stride(0),
        key_pe.stride(0),
        *kv_cache.stride()[:2],
        *output.stride()[:2],
    )
