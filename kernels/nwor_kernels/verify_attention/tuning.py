"""What the verification kernel serves, and the shape of its launches."""

import functools
from dataclasses import dataclass
from enum import IntEnum

import torch
import triton

from nwor_kernels.fp8 import E4M3_CACHE_DTYPES

MAX_QUERY_LEN = 16
"""Longest window: k = 15 drafts and the certain first token."""

MAX_HEAD_DIM = 256

MAX_PARTS = 32
"""About the most programs that a pair is cut into: merging takes longer with each."""

MAX_TILE = 128 * 128
"""Most elements of a program's accumulator: more query rows are cut into several tiles."""


def unsupported_reason(
    head_dim: int, max_query_len: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> str | None:
    """The fallback reason of what the kernel does not serve; None if it does."""
    if head_dim > MAX_HEAD_DIM or head_dim % 8:
        return f"head_dim_{head_dim}"
    if max_query_len > MAX_QUERY_LEN:
        return f"window_of_{max_query_len}_tokens"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"dtype_{str(dtype).removeprefix('torch.')}"
    if cache_dtype != dtype and cache_dtype not in E4M3_CACHE_DTYPES:
        return f"cache_dtype_{str(cache_dtype).removeprefix('torch.')}"
    return None


class Discard(IntEnum):
    """What a launch does with partial results that it has merged (`discard.py`)."""

    OFF = 0
    L2 = 1
    """Drop them from L2 before they are written to DRAM; OFF where that is not possible."""
    POISON = 2
    """Overwrite them with NaN, as a discard might: for tests, interpreted ones too."""


DISCARD = Discard.L2
SKIP_PADDING = True
WHOLE_PAIRS = 5
"""Defaults for partial results, overridden by a `Tuning`.

Chosen by the measurement in sweeps/studies/partial-results/README.md.
"""


SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a block may have on an H100 and an H200."""


@dataclass(frozen=True)
class Tuning:
    """Choices for a launch; None leaves a choice to `launch_shape`."""

    block_n: int | None = None
    programs: int | None = None
    min_tiles: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    max_registers: int | None = None
    discard: Discard | None = None
    skip_padding: bool | None = None
    whole_pairs: int | None = None


@dataclass(frozen=True)
class LaunchShape:
    """How query rows are tiled and what one program does."""

    rows: int
    """Query rows of a tile, a power of two; unused ones are padding."""
    row_tiles: int
    """Tiles of query rows that one K/V head of a request has."""
    dim: int
    """Head dim, padded to a power of two."""
    block_n: int
    """Tokens of context a step."""
    programs: int
    """Programs of the launch."""
    min_tiles: int
    """Fewest steps that are worth a program."""
    num_warps: int
    """Triton's."""
    num_stages: int
    """Triton's."""
    max_registers: int | None
    """Most registers of a thread: fewer let more programs run at a time."""
    discard: Discard
    """What becomes of merged partial results."""
    skip_padding: bool
    """True if partial results leave out the padding rows."""
    whole_pairs: int
    """Per cent more steps that a program may have for whole pairs; 0: always cut."""


def launch_shape(
    max_query_len: int,
    ratio: int,
    head_dim: int,
    cache_bytes: int,
    device: torch.device,
    tuning: Tuning | None = None,
) -> LaunchShape:
    """The shape of a launch, by rules measured on an H200.

    `cache_bytes` are those of an element of the cache, `tuning` overrides single choices.
    """
    tuning = tuning or Tuning()
    rows, row_tiles, dim = row_tiling(max_query_len, ratio, head_dim)
    step = 32 if dim * cache_bytes > 256 else 64
    # K and V of three steps beside the query rows: float32 of head dim 256 has room for two.
    shared = (2 * 3 * step + rows) * dim * cache_bytes
    stages = 3 if shared <= SHARED_MEMORY else 2
    warps = 8 if rows * dim >= 128 * 128 else 4
    discard = DISCARD if tuning.discard is None else tuning.discard
    if discard is Discard.L2 and not can_discard(device):
        discard = Discard.OFF
    return LaunchShape(
        rows=rows,
        row_tiles=row_tiles,
        dim=dim,
        block_n=tuning.block_n or step,
        programs=tuning.programs or programs_for(rows, dim, device),
        min_tiles=tuning.min_tiles or 2,
        num_warps=tuning.num_warps or warps,
        num_stages=tuning.num_stages or stages,
        max_registers=tuning.max_registers,
        discard=discard,
        skip_padding=SKIP_PADDING if tuning.skip_padding is None else tuning.skip_padding,
        whole_pairs=WHOLE_PAIRS if tuning.whole_pairs is None else tuning.whole_pairs,
    )


def row_tiling(max_query_len: int, ratio: int, head_dim: int) -> tuple[int, int, int]:
    """(query rows of a tile, tiles, padded head dim)."""
    dim = max(32, triton.next_power_of_2(head_dim))
    folded = max_query_len * ratio
    rows = min(max(16, triton.next_power_of_2(folded)), MAX_TILE // dim)
    return rows, triton.cdiv(folded, rows), dim


def programs_for(rows: int, dim: int, device: torch.device) -> int:
    """Programs that fill the GPU: two or more a multiprocessor hide each other's latency."""
    return programs_on(_processors(device), rows, dim)


def programs_on(processors: int, rows: int, dim: int) -> int:
    """The same for a GPU of so many multiprocessors."""
    return processors * (2 if rows * dim <= 64 * 128 else 1)


@functools.cache
def can_discard(device: torch.device) -> bool:
    """Whether `discard.L2` runs there: NVIDIA's sm_80 and later; the interpreter has no PTX."""
    if device.type != "cuda" or torch.version.hip or triton.knobs.runtime.interpret:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


_processors_of: dict[torch.device, int] = {}


def _processors(device: torch.device) -> int:
    if device not in _processors_of:
        on_gpu = device.type == "cuda"
        _processors_of[device] = (
            torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 2
        )
    return _processors_of[device]
