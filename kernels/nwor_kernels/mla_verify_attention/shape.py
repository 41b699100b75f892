"""What the MLA verification kernel serves, the shape of its launches, and their workspace."""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

from nwor_kernels.fp8 import E4M3_CACHE_DTYPES
from nwor_kernels.verify_attention.tuning import (
    MAX_QUERY_LEN,
    Discard,
    LaunchShape,
    discard_on,
    processors_of,
    shared_memory,
)
from nwor_kernels.verify_attention.workspace import VerifyWorkspace

MAX_LATENT_DIM = 512
"""An accumulator of 64 rows then takes 128 registers of each of 256 threads."""

ROWS, MAX_ROWS, MANY_ROWS = 32, 64, 256
"""Query rows of a tile; as many as one warp group's matrix instruction takes where a request has
MANY_ROWS. Where 16 a tile leave multiprocessors idle, it is 16: there is less to merge."""

SLACK = 24 * 1024
"""Bytes of shared memory left to weights, reductions and changes of layout."""

STEPS = ((64, 2), (32, 3), (32, 2), (16, 2))
"""(Tokens of context a step, steps in flight), the first that fits into shared memory."""


def unsupported_reason(
    latent_dim: int, pe_dim: int, max_query_len: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> str | None:
    """The fallback reason of what the kernel does not serve; None if it does."""
    if latent_dim > MAX_LATENT_DIM or latent_dim < 32 or latent_dim % 16:
        return f"latent_dim_{latent_dim}"
    if pe_dim < 16 or pe_dim % 16 or pe_dim > 128:
        return f"rope_dim_{pe_dim}"
    if max_query_len > MAX_QUERY_LEN:
        return f"window_of_{max_query_len}_tokens"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"dtype_{str(dtype).removeprefix('torch.')}"
    if cache_dtype != dtype and cache_dtype not in E4M3_CACHE_DTYPES:
        return f"cache_dtype_{str(cache_dtype).removeprefix('torch.')}"
    return None


@dataclass(frozen=True)
class MlaTuning:
    """Choices for a launch; None leaves a choice to `launch_shape`."""

    rows: int | None = None
    block_n: int | None = None
    programs: int | None = None
    min_tiles: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    discard: Discard | None = None
    merged: int | None = None


@lru_cache(4096)
def launch_shape(
    max_query_len: int,
    heads: int,
    latent_dim: int,
    pe_dim: int,
    itemsize: int,
    device: torch.device,
    tuning: MlaTuning | None = None,
    requests: int | None = None,
) -> LaunchShape:
    """The shape of a launch, by rules measured on an H200 (sweeps/studies/attention-tiles).

    The query rows and the cache rows of each step in flight lie in shared memory. At 512 + 64 in
    bf16, 32 query rows and two steps of 64 tokens take (32 + 128) x 576 x 2 = 180 KiB of 227.

    Args:
        max_query_len: most query rows of a request with a window.
        heads: query heads.
        latent_dim, pe_dim: the two parts of a cached row, in elements.
        itemsize: bytes of an element of the products.
        device: where it runs.
        tuning: overrides single choices.
        requests: of the launch; None: enough to fill the GPU.
    """
    tuning = tuning or MlaTuning()
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
        max_registers=None,
        discard=discard_on(device, tuning.discard),
        skip_padding=True,
        whole_pairs=5,
        merged=tuning.merged or 1,
    )


def rows_wanted(folded: int, is_small: bool) -> int:
    """Query rows of a tile for requests of so many rows; `is_small`: few tiles in all."""
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
    tuning: MlaTuning | None = None,
) -> VerifyWorkspace:
    """Room for any launch of up to `max_requests` requests and `max_query_len` query rows each.

    Made once and used by every layer; launches that share one must not overlap. Arguments as for
    `launch_shape`.
    """
    shapes = [
        launch_shape(length, heads, latent_dim, pe_dim, itemsize, device, tuning)
        for length in range(1, max_query_len + 1)
    ]
    rows = 2 * max(shape.programs * shape.rows for shape in shapes)
    # Launches of few requests have smaller tiles: at most as many as multiprocessors.
    tiles = max(max_requests * max(shape.row_tiles for shape in shapes), processors_of(device))
    return VerifyWorkspace.allocate(rows, shapes[0].dim, tiles, device)
