"""Limits of the verification kernel, and the shape of its launches."""

import functools
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum

import torch
import triton

from nwor_kernels.fp8 import E4M3_CACHE_DTYPES
from nwor_kernels.limits import unsupported_heads, unsupported_window

FEW_PARTS, LARGE_PART = 4, 64 * 64
"""Parts of a pair up to which more programs than multiprocessors are worth their merging, and the
elements of a part from which that counts."""

MAX_PARTS = 32
"""About the most programs that a pair is cut into: merging takes longer with each."""

MAX_TILE = 128 * 128
"""Most elements of a program's accumulator: more query rows are cut into several tiles."""

WIDE_DIM = 512
"""Head dim from which a tile has 16 query rows and a program 8 warps.

Every warp holds all query rows of a tile as matrix operands: 16 rows x 512 x 2 bytes / 32 lanes are
128 of a thread's 255 registers, and 32 rows would spill all of them in each step. The accumulator,
16 x 512 x 4 bytes, takes 32 more of 8 warps' threads, and 64 of 4 warps'.
"""


def unsupported_reason(
    head_dim: int,
    max_query_len: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    value_dim: int | None = None,
) -> str | None:
    """The fallback reason if the kernel does not serve this shape; None if it does.

    `value_dim` None: values are as wide as keys.
    """
    heads = unsupported_heads(head_dim, value_dim or head_dim)
    return heads or unsupported_step(max_query_len, dtype, cache_dtype)


def unsupported_step(
    max_query_len: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> str | None:
    """The fallback reason of a window's length or of a dtype; MLA's kernel has the same limits."""
    if window := unsupported_window(max_query_len):
        return window
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"dtype_{str(dtype).removeprefix('torch.')}"
    if cache_dtype != dtype and cache_dtype not in E4M3_CACHE_DTYPES:
        return f"cache_dtype_{str(cache_dtype).removeprefix('torch.')}"
    return None


class Discard(IntEnum):
    """How a launch discards partial results that it has merged (`parts.py`)."""

    OFF = 0
    L2 = 1
    """Drop them from L2 before they are written to DRAM; OFF if that is not possible."""
    POISON = 2
    """Overwrite them with NaN, as a discard might: for tests, interpreted ones too."""


LINE_BYTES = 128
"""Bytes that one discard drops, and the alignment of its address."""

DISCARD = Discard.L2
WHOLE_PAIRS = 5
"""Defaults for partial results, overridden by a `Tuning`; chosen by measurements on an H200."""

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a block may have on an H100 and an H200."""

WINDOW_ROWS = 16
"""Rows of a tile of staged K or V: MAX_QUERY_LEN, a power of two."""


@dataclass(frozen=True)
class Tuning:
    """Choices for a launch; None leaves a choice to `launch_shape`."""

    rows: int | None = None
    block_n: int | None = None
    programs: int | None = None
    min_tiles: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    discard: Discard | None = None
    whole_pairs: int | None = None
    merged: int | None = None
    max_registers: int | None = None
    """Registers of a thread, a limit for the compiler; None: none but the GPU's."""


class Tiling(StrEnum):
    """Shapes of launches of which none is the fastest everywhere."""

    USUAL = "ours"
    """What `launch_shape` takes by itself."""
    FOUR_PROGRAMS = "ours4"
    """Four programs a multiprocessor instead of two: each has fewer registers."""
    ROWS_32 = "ours32"
    """Tiles of 32 query rows instead of 64, of which 17 to 32 are used."""


def tilings(max_query_len: int, ratio: int, head_dim: int) -> tuple[Tiling, ...]:
    """The tilings that are worth a measurement for these query rows; the usual one first."""
    folded = max_query_len * ratio
    if folded <= 16 and head_dim <= 128:  # a wider tile has more registers than four programs may
        return Tiling.USUAL, Tiling.FOUR_PROGRAMS
    if 16 < folded <= 32 and (head_dim <= 128 or head_dim == 256):
        return Tiling.USUAL, Tiling.ROWS_32
    return (Tiling.USUAL,)


def tuning_of(
    tiling: Tiling, cache_bytes: int, device: torch.device, head_dim: int = 128
) -> Tuning | None:
    """The choices of a tiling; None for the usual one.

    Args:
        cache_bytes: of an element of the cache.
        device: where it runs.
        head_dim: elements of a key or a value, the wider of them.
    """
    if tiling is Tiling.FOUR_PROGRAMS:
        # Two warps have half of the registers of four; e4m3 is unpacked by four.
        usual = Tuning(programs=4 * processors_of(device), merged=1)
        return (
            replace(usual, max_registers=128) if cache_bytes == 1 else replace(usual, num_warps=2)
        )
    if tiling is Tiling.ROWS_32:
        return Tuning(rows=32, num_stages=4 if head_dim <= 128 else None, merged=1)
    return None


def fastest_tiling(
    max_query_len: int, ratio: int, head_dim: int, cache_bytes: int, pairs: int, processors: int
) -> Tiling:
    """The tiling that was the fastest on an H200, for steps whose own was not measured.

    Args:
        max_query_len, ratio, head_dim, cache_bytes: as for `launch_shape`.
        pairs: requests times K/V heads.
        processors: multiprocessors of the GPU.
    """
    choices = tilings(max_query_len, ratio, head_dim)
    if Tiling.FOUR_PROGRAMS in choices and pairs >= 2 * processors:
        return Tiling.FOUR_PROGRAMS
    if Tiling.ROWS_32 in choices and cache_bytes == 1:
        return Tiling.ROWS_32
    return Tiling.USUAL


@dataclass(frozen=True)
class LaunchShape:
    """Tiles of query rows, and the work of one program."""

    rows: int
    """Query rows of a tile, a power of two; unused ones are padding."""
    row_tiles: int
    """Tiles of query rows that one K/V head of a request has."""
    dim: int
    """Head dim, padded to a power of two."""
    out_dim: int
    """Value dim, padded likewise: columns of an accumulator."""
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
    discard: Discard
    """How merged partial results are discarded."""
    whole_pairs: int
    """Per cent more steps that a program may have for whole pairs; 0: always cut."""
    merged: int = 1
    """Parts of a pair that a merge reads at a time."""
    max_registers: int | None = None
    """Registers of a thread; None: no limit of ours."""


@functools.lru_cache(4096)
def launch_shape(
    max_query_len: int,
    ratio: int,
    head_dim: int,
    cache_bytes: int,
    device: torch.device,
    tuning: Tuning | None = None,
    groups: int | None = None,
    value_dim: int | None = None,
) -> LaunchShape:
    """The shape of a launch, by rules measured on an H200.

    Args:
        max_query_len: most query rows of a request.
        ratio: query heads of a K/V head.
        head_dim: elements of a query and of a key.
        cache_bytes: of an element of the cache.
        device: where it runs.
        tuning: overrides single choices.
        groups: requests times K/V heads; None: enough to fill the GPU.
        value_dim: elements of a value; None: as many as of a key. The rules take the wider.
    """
    tuning = tuning or Tuning()
    value_dim = value_dim or head_dim
    widest = max(head_dim, value_dim)
    rows, row_tiles, dim = row_tiling(max_query_len, ratio, widest, tuning.rows)
    step, stages = pipeline(rows, dim, cache_bytes, shared_memory(device))
    pairs = None if groups is None else groups * row_tiles
    warps = 8 if rows * dim >= 128 * 128 or dim >= WIDE_DIM else 4
    return LaunchShape(
        rows=rows,
        row_tiles=row_tiles,
        dim=padded(head_dim),
        out_dim=padded(value_dim),
        block_n=tuning.block_n or step,
        programs=tuning.programs or programs_on(processors_of(device), rows, dim, pairs),
        min_tiles=tuning.min_tiles or 2,
        num_warps=tuning.num_warps or warps,
        num_stages=tuning.num_stages or stages,
        discard=discard_on(device, tuning.discard),
        whole_pairs=WHOLE_PAIRS if tuning.whole_pairs is None else tuning.whole_pairs,
        merged=tuning.merged or most_merged(rows, dim),
        max_registers=tuning.max_registers,
    )


def pipeline(rows: int, dim: int, cache_bytes: int, available: int) -> tuple[int, int]:
    """(tokens of a step, stages): the most that fit the shared memory `available` to a program.

    A step of 64 tokens pays if a row has less than 256 bytes (measured in bf16).

    At most these bytes are needed: K and V of all steps but the one that is worked on; the query
    rows and the window's K and V as matrix operands of 2 bytes or more; a tile of float32
    weights; 1 KiB. Head dim 512 with its 16 query rows, in KiB (taken by Triton 3.6 for sm_90):

        bf16      32 tokens, 3 stages: 2 x 64 + 16 + 32 + 2 + 1 = 179 (161)
        fp8       32 tokens, 3 stages: 2 x 32 + 16 + 32 + 2 + 1 = 115 (81)
        float32   32 tokens, 2 stages: 128 + 32 + 64 + 2 + 1 = 227 (226) of an H200's 227

    float32 of head dim 256 and 64 rows took 232 with 3 stages, and takes 168 with 2. An sm_89 has
    99: bf16 of head dim 512 fits with 16 tokens and 2 stages (32 + 16 + 32 + 1 + 1 = 82).
    """
    operand = max(cache_bytes, 2)
    widest = 32 if dim * cache_bytes >= 256 else 64

    def needed(step: int, stages: int) -> int:
        buffers = (stages - 1) * 2 * step * dim * cache_bytes
        return buffers + (rows + 2 * WINDOW_ROWS) * dim * operand + rows * step * 4 + 1024

    choices = [(step, stages) for step in (widest, 16) for stages in (3, 2)]
    return next((choice for choice in choices if needed(*choice) <= available), (16, 2))


def padded(dim: int) -> int:
    """Columns of a tile for heads of `dim` elements: a power of two."""
    return max(32, triton.next_power_of_2(dim))


def row_tiling(
    max_query_len: int, ratio: int, head_dim: int, wanted: int | None = None
) -> tuple[int, int, int]:
    """(query rows of a tile, tiles, padded head dim); `wanted` rows as in `Tuning`."""
    dim = padded(head_dim)
    folded = max_query_len * ratio
    most = 16 if dim >= WIDE_DIM else MAX_TILE // dim
    # More than 16 rows are padded to a warp group's matrix instruction.
    fitting = 16 if folded <= 16 else max(64, triton.next_power_of_2(folded))
    rows = wanted or min(fitting, most)
    return rows, triton.cdiv(folded, rows), dim


def most_merged(rows: int, dim: int) -> int:
    """Parts of [rows, dim] that a program's registers hold at a time as it merges them."""
    return max(1, min(4, 128 * 128 // (rows * dim)))


def programs_on(processors: int, rows: int, dim: int, pairs: int | None = None) -> int:
    """Programs that fill a GPU: two a multiprocessor hide each other's latency.

    One if so few `pairs` would be cut into more than FEW_PARTS; None: there are enough.
    """
    many_parts = pairs is not None and 2 * processors // max(pairs, 1) > FEW_PARTS
    if dim >= WIDE_DIM or rows * dim > 64 * 128 or (many_parts and rows * dim >= LARGE_PART):
        return processors
    return 2 * processors


def discard_on(device: torch.device, wanted: Discard | None) -> Discard:
    """How merged partial results are discarded on a device; `wanted` as in `Tuning`."""
    chosen = DISCARD if wanted is None else wanted
    return Discard.OFF if chosen is Discard.L2 and not can_discard(device) else chosen


@functools.cache
def can_discard(device: torch.device) -> bool:
    """True if `discard.L2` runs there: NVIDIA's sm_80 and later; the interpreter has no PTX."""
    if device.type != "cuda" or torch.version.hip or triton.knobs.runtime.interpret:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block may have there."""
    if device.type != "cuda":
        return SHARED_MEMORY
    number = torch.cuda.device(device).idx
    # What Triton holds a binary against before it launches it.
    return int(triton.runtime.driver.active.utils.get_device_properties(number)["max_shared_mem"])


_processors_of: dict[torch.device, int] = {}


def processors_of(device: torch.device) -> int:
    """Multiprocessors of the device; 2 if kernels are interpreted."""
    if device not in _processors_of:
        on_gpu = device.type == "cuda"
        _processors_of[device] = (
            torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 2
        )
    return _processors_of[device]
