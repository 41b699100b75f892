"""Launch every kernel once per interesting shape, for compute-sanitizer to watch.

    PYTHONPATH=.:kernels:tests/kernels PYTORCH_NO_CUDA_MEMORY_CACHING=1 \\
        compute-sanitizer --tool memcheck --error-exitcode 9 \\
        python tests/kernels/sanitize_kernels.py [commit stage mask verify_attention]

Without PyTorch's cache each tensor is an allocation of its own, so that an access past its end
is seen. Nothing is compared here: the tests do that.
"""

import sys

import torch
from attention_cases import Request, Scales, as_e4m3_cache, make_step, stage_step
from kernel_inputs import generator, random_kv, to_device
from window_cases import WindowShape, make_windows

from nwor_kernels.mask.kernel import acceptance_mask_from_counts_triton
from nwor_kernels.stage.kernel import stage_kv_cache_triton
from nwor_kernels.verify_attention.kernel import verify_attention_triton
from nwor_kernels.verify_attention.tuning import Tuning

SHAPES = (
    WindowShape(6, 5, 2, 3, 8, (128, 128), 16, torch.bfloat16),
    WindowShape(103, 5, 7, 28, 2, (64, 64), 32, torch.bfloat16, layout="tokens_before_heads"),
    WindowShape(5, 3, 1, 2, 3, (96, 96), 64, torch.float16, layout="cut_from_larger"),
    WindowShape(2, 2, 0, 2, 10, (256, 256), 16, torch.float32),
    WindowShape(6, 5, 2, 3, 8, (128, 128), 16, torch.bfloat16, torch.uint8, scales=1),
    WindowShape(6, 5, 2, 3, 3, (96, 64), 16, torch.float16, torch.uint8, scales=3),
)


def commit(shape: WindowShape, spoiled: str) -> None:
    """All rows are accepted; the window is sound, or ends past the sources or the caches."""
    windows = make_windows(shape, 1, "cuda")
    real = shape.requests * shape.tokens
    windows.slots[:real] = torch.arange(real, device="cuda")
    windows.num_sampled.fill_(shape.tokens)
    if spoiled == "slot":
        windows.slots[real - 1] = 2**31 + 7
    if spoiled == "rows":
        windows.options["rows"] = torch.arange(shape.rows, device="cuda") + 1
        windows.slots[:] = torch.arange(shape.rows, device="cuda")
    if spoiled == "overflow":
        windows.slots = torch.arange(2 * shape.rows, device="cuda")
        windows.num_sampled = windows.num_sampled.repeat(3)
    windows.launch()
    torch.cuda.synchronize()
    assert bool(windows.errors.any()) == bool(spoiled), (shape, spoiled, windows.errors)


def stage(num_rows: int, capacity: int, past: int) -> None:
    """Rows of 20 tokens; the last one may lie past them."""
    key, value = (
        to_device(tensor, "cuda")
        for tensor in random_kv(20, 8, (128, 128), torch.bfloat16, generator(1), fused=True)
    )
    rows = torch.arange(num_rows, device="cuda") % 20
    rows[::5] = -1
    rows[-1] = 19 + past
    buffers = torch.empty(2, capacity, 8, 128, device="cuda", dtype=torch.bfloat16)
    metadata = torch.zeros(2, dtype=torch.int32, device="cuda")
    stage_kv_cache_triton(key, value, rows, *buffers, metadata)
    torch.cuda.synchronize()
    assert bool(metadata[1]) == (past > 0 or num_rows > capacity)


def mask(requests: int, drafts: int, capacity: int) -> None:
    """Drafts given by one number and one by one."""
    sampled = torch.full((requests,), drafts + 1, dtype=torch.int32, device="cuda")
    counts = torch.full((requests,), drafts, dtype=torch.int32, device="cuda")
    accepted = torch.empty(capacity, dtype=torch.bool, device="cuda")
    out = torch.empty(requests, dtype=torch.int32, device="cuda")
    for each, number in ((counts, None), (None, drafts)):
        acceptance_mask_from_counts_triton(sampled, each, accepted, out, number)
    torch.cuda.synchronize()


def verify_attention(
    requests: list[Request],
    *,
    dtype: torch.dtype = torch.bfloat16,
    fp8: bool = False,
    programs: int | None = None,
    sliding_window: int = -1,
    **shape: int,
) -> None:
    """One step, its windows staged; the cache ends with the last block that a request owns."""
    step = make_step(requests, dtype=dtype, padding_rows=0, **shape)
    staged = stage_step(step, True)
    scales = Scales(torch.tensor([0.02]), torch.tensor([0.03])) if fp8 else None
    cache = as_e4m3_cache(step.kv_cache, scales) if scales else step.kv_cache
    output = torch.empty(step.query.shape, dtype=dtype, device="cuda")
    verify_attention_triton(
        *(to_device(tensor, "cuda") for tensor in (
            step.query, staged.key, staged.value, cache, step.query_start_loc, step.seq_lens,
            step.block_table, staged.start, staged.end,
        )),
        output,
        scale=step.scale,
        max_query_len=max(request.queries for request in requests),
        max_seq_len=int(step.seq_lens.max()),
        sliding_window=sliding_window,
        k_scale=scales.k.cuda() if scales else None,
        v_scale=scales.v.cuda() if scales else None,
        tuning=Tuning(programs=programs),
    )  # fmt: skip
    torch.cuda.synchronize()
    assert not output[: requests[0].queries].isnan().any()


def sanitize_commit() -> int:
    """Sound windows, and such as end past the sources or the caches."""
    for shape in SHAPES:
        for spoiled in ("", "slot", "rows", "overflow"):
            commit(shape, spoiled)
    return len(SHAPES) * 4


def sanitize_stage() -> int:
    """A row far past the others, further than the next allocation; more rows than there is room."""
    cases = ((6, 6, 0), (600, 600, 0), (6, 9, 0), (6, 6, 100_000), (7, 6, 0))
    for num_rows, capacity, past in cases:
        stage(num_rows, capacity, past)
    return len(cases)


def sanitize_mask() -> int:
    """Buffers that are too short, just right and too long."""
    launches = 0
    for requests, drafts in ((1, 1), (8, 4), (200, 5), (3, 40)):
        for spare in (-1, 0, 300):
            mask(requests, drafts, requests * drafts + spare)
            launches += 2
    return launches


def sanitize_verify_attention() -> int:
    """Contexts whole and cut into parts that are merged, odd head dims, both cache dtypes."""
    long = [Request(300, 5, 4), Request(0, 5, 4), Request(37, 5, 4)]
    many = [Request(40 * n % 700, 5, 4) for n in range(40)]
    cases = (
        (long, {"heads": 6, "kv_heads": 2, "head_dim": 128}),
        (long, {"heads": 6, "kv_heads": 2, "head_dim": 128, "fp8": True}),
        (long, {"heads": 7, "kv_heads": 1, "head_dim": 96, "block_size": 32, "programs": 5}),
        (many, {"heads": 6, "kv_heads": 2, "head_dim": 64, "programs": 7, "sliding_window": 90}),
        ([Request(70, 16, 15)], {"heads": 8, "kv_heads": 1, "head_dim": 256}),
    )
    for requests, options in cases:
        verify_attention(requests, **options)
    return len(cases)


KERNELS = {
    "commit": sanitize_commit,
    "stage": sanitize_stage,
    "mask": sanitize_mask,
    "verify_attention": sanitize_verify_attention,
}


def main() -> None:
    """Launch, and say so: a sanitizer that saw nothing looks the same as one that saw no fault."""
    launches = sum(KERNELS[name]() for name in sys.argv[1:] or KERNELS)
    print(f"launched {launches} kernels")


if __name__ == "__main__":
    main()
