"""Launch every kernel once per interesting shape, for compute-sanitizer to watch.

    PYTHONPATH=.:kernels:tests/kernels PYTORCH_NO_CUDA_MEMORY_CACHING=1 \\
        compute-sanitizer --tool memcheck --error-exitcode 9 \\
        python tests/kernels/sanitize_kernels.py

Without PyTorch's cache each tensor is an allocation of its own, so that an access past its end
is seen. Nothing is compared here: the tests do that.
"""

import torch
from kernel_inputs import generator, random_kv, to_device
from window_cases import WindowShape, make_windows

from nwor_kernels.mask.kernel import acceptance_mask_from_counts_triton, acceptance_mask_triton
from nwor_kernels.stage.kernel import stage_kv_cache_triton

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
    """From ids and from counts, drafts told by number and one by one."""
    ids = torch.randint(-1, 9, (requests, drafts + 1), device="cuda")
    sampled = torch.full((requests,), drafts + 1, dtype=torch.int32, device="cuda")
    counts = torch.full((requests,), drafts, dtype=torch.int32, device="cuda")
    accepted = torch.empty(capacity, dtype=torch.bool, device="cuda")
    out = torch.empty(requests, dtype=torch.int32, device="cuda")
    for each, number in ((counts, None), (None, drafts)):
        acceptance_mask_triton(ids, each, 8, accepted, out, number)
        acceptance_mask_from_counts_triton(sampled, each, accepted, out, number)
    torch.cuda.synchronize()


def main() -> None:
    """Launch, and say so: a sanitizer that saw nothing looks the same as one that saw no fault."""
    launches = 0
    for shape in SHAPES:
        for spoiled in ("", "slot", "rows", "overflow"):
            commit(shape, spoiled)
            launches += 1
    far = 100_000  # further than the next allocation
    for num_rows, capacity, past in ((6, 6, 0), (600, 600, 0), (6, 9, 0), (6, 6, far), (7, 6, 0)):
        stage(num_rows, capacity, past)
        launches += 1
    for requests, drafts in ((1, 1), (8, 4), (200, 5), (3, 40)):
        for spare in (-1, 0, 300):
            mask(requests, drafts, requests * drafts + spare)
            launches += 4
    print(f"launched {launches} kernels")


if __name__ == "__main__":
    main()
