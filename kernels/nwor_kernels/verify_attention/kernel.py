"""`verify_attention` on a GPU: the launch of the Triton kernel in `program.py`."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nwor_kernels.attention_step import AttentionStep, Scales
from nwor_kernels.fp8 import E4M3_CACHE_DTYPES
from nwor_kernels.launch import Launches
from nwor_kernels.verify_attention.program import verify_kernel
from nwor_kernels.verify_attention.tuning import (
    LINE_BYTES,
    Discard,
    LaunchShape,
    Tuning,
    launch_shape,
    padded,
    processors_of,
    programs_on,
    row_tiling,
    tilings,
    tuning_of,
    unsupported_reason,
)


@dataclass(frozen=True)
class VerifyWorkspace:
    """Partial results of contexts that several programs share, and which programs are done.

    Made once and used by every layer; launches that share one must not overlap.
    """

    accumulators: Tensor
    """float32, two [rows, out_dim] tiles a program: only the first and the last of its contexts can
    be shared with another program."""
    sums: Tensor
    """float32, maximum and sum of each of their rows."""
    arrived: Tensor
    """int32, programs done with each (request, K/V head, tile of query rows); every launch leaves
    it at 0."""

    @classmethod
    def create(
        cls,
        *,
        max_requests: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_query_len: int,
        device: torch.device,
        programs: int | None = None,
        value_dim: int | None = None,
    ) -> "VerifyWorkspace":
        """Room for any launch of up to `max_requests` requests, in each of the `tilings`.

        `programs` as in `Tuning`. `value_dim` None: values are as wide as keys.
        """
        value_dim = value_dim or head_dim
        widest = max(head_dim, value_dim)
        rows, row_tiles, dim = row_tiling(max_query_len, num_heads // num_kv_heads, widest)
        most = (programs or programs_on(processors_of(device), rows, dim)) * rows
        if programs is None:
            more = tilings(max_query_len, num_heads // num_kv_heads, widest)
            tunings = [tuning_of(tiling, 2, device) or Tuning() for tiling in more]
            most = max(most, *((t.programs or 0) * (t.rows or rows) for t in tunings))
        pairs = max_requests * num_kv_heads * row_tiles
        return cls.allocate(2 * most, padded(value_dim), pairs, device)

    @classmethod
    def allocate(
        cls, rows: int, dim: int, counters: int, device: torch.device
    ) -> "VerifyWorkspace":
        """Room for `rows` rows of partial results and `counters` (request, head, tile)s."""
        return cls(
            torch.empty(rows * dim, dtype=torch.float32, device=device),
            torch.empty(rows * 2, dtype=torch.float32, device=device),
            torch.zeros(counters, dtype=torch.int32, device=device),
        )

    def check(self, shape: LaunchShape, pairs: int) -> None:
        """Raise ValueError if a launch of this shape does not fit, or may not discard here."""
        needed = 2 * shape.programs * shape.rows * shape.out_dim
        if self.accumulators.numel() < needed or self.arrived.numel() < pairs:
            raise ValueError(
                f"the workspace is too small: {self.accumulators.numel()} numbers and "
                f"{self.arrived.numel()} counters for {needed} and {pairs}"
            )
        if shape.discard is Discard.L2:
            for name, tensor in (("accumulators", self.accumulators), ("sums", self.sums)):
                if tensor.data_ptr() % LINE_BYTES:
                    raise ValueError(
                        f"the workspace's {name} begin at {tensor.data_ptr():#x}, no multiple of "
                        f"{LINE_BYTES}: their cache line's other data would be discarded too"
                    )


_launches = Launches(verify_kernel, free=frozenset({"scale", "softcap", "requests"}))


def verify_attention_triton(
    step: AttentionStep, workspace: VerifyWorkspace, tuning: Tuning | None = None
) -> None:
    """Attend the queries of every request with staged tokens; other output rows stay as they are.

    Safe in a CUDA graph: it reads nothing on the host and allocates nothing.

    Args:
        workspace: from `VerifyWorkspace.create`.
        tuning: the launch's shape, for benchmarks.

    Raises:
        ValueError: the kernel does not serve this shape, or the workspace is too small for it.
    """
    query, key, value, kv_cache, output = (
        step.query,
        step.key,
        step.value,
        step.kv_cache,
        step.output,
    )
    rules, max_query_len, sinks = step.scores, step.max_query_len, step.scores.sinks
    requests = step.requests.seq_lens.shape[0]
    heads, head_dim = query.shape[1:]
    kv_heads, block_size = kv_cache.shape[1:3]
    value_dim = value.shape[2]
    reason = unsupported_reason(head_dim, max_query_len, key.dtype, kv_cache.dtype, value_dim)
    if reason:
        raise ValueError(f"verify_attention does not serve this: {reason}")
    if sinks is not None and (sinks.shape, sinks.stride()) != ((heads,), (1,)):
        raise ValueError(f"sinks must be contiguous [{heads}], not {tuple(sinks.shape)}")
    if requests == 0:
        return
    quantised = kv_cache.dtype in E4M3_CACHE_DTYPES
    if kv_cache.dtype == torch.uint8:
        kv_cache = kv_cache.view(torch.float8_e4m3fn)
    scales = step.scales if quantised else Scales(step.scales.query)
    shape = launch_shape(
        max_query_len,
        heads // kv_heads,
        head_dim,
        kv_cache.element_size(),
        query.device,
        tuning,
        requests * kv_heads,
        value_dim,
    )
    workspace.check(shape, requests * kv_heads * shape.row_tiles)
    steps = requests * kv_heads * shape.row_tiles
    steps *= triton.cdiv(step.max_seq_len, shape.block_n) + 1
    grid = min(shape.programs, triton.cdiv(steps, shape.min_tiles))
    arguments = (
        query,
        key,
        value,
        kv_cache,
        *step.requests,
        output,
        *scales,
        sinks,
        workspace.accumulators,
        workspace.sums,
        workspace.arrived,
        rules.scale,
        rules.softcap,
        requests,
        step.requests.block_table.stride(0),
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *kv_cache.stride()[:3],
        *output.stride()[:2],
    )
    constants = {
        **counts_of(scales),
        "FP8": fp8_way(quantised),
        "COMPUTE": compute_type(key, quantised),
        "SLIDING_WINDOW": rules.sliding_window,
        "CHUNK": rules.chunk,
        "SOFTCAP": rules.softcap > 0,
        "RATIO": heads // kv_heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_SIZE": block_size,
        "MAX_REQUESTS": max(32, triton.next_power_of_2(requests)),
        "ROWS": shape.rows,
        "ROW_TILES": shape.row_tiles,
        "DIM": shape.dim,
        "OUT_DIM": shape.out_dim,
        "BLOCK_N": shape.block_n,
        "WINDOW": max(16, triton.next_power_of_2(max_query_len)),
        "MIN_STEPS": shape.min_tiles,
        "MERGED": shape.merged,
        "DISCARD": int(shape.discard),
        "WHOLE_PAIRS": shape.whole_pairs,
    }
    options = {"num_warps": shape.num_warps, "num_stages": shape.num_stages}
    if shape.max_registers is not None:
        options["maxnreg"] = shape.max_registers
    _launches((grid, 1, 1), arguments, constants, **options)


def counts_of(scales: Scales) -> dict[str, int]:
    """How many scales `scale_of` chooses from, by a kernel's names; 0 without any."""
    names = ("Q_SCALES", "K_SCALES", "V_SCALES")
    by_name = zip(names, scales, strict=True)
    return {name: 0 if given is None else given.numel() for name, given in by_name}


def fp8_way(quantised: bool) -> int:
    """0: no fp8. 2: PTX unpacks e4m3. 1: Triton's language does, slower but interpreted too."""
    return (1 if triton.knobs.runtime.interpret else 2) if quantised else 0


def compute_type(key: Tensor, quantised: bool) -> tl.dtype:
    """Dtype of the products' operands. Half precision holds every e4m3 number, and the GPU converts
    e4m3 to it in one instruction."""
    if key.dtype == torch.float32:
        return tl.float32
    return tl.float16 if quantised or key.dtype == torch.float16 else tl.bfloat16
