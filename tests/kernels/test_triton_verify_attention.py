"""The verification kernel against attention by its definition, in float64, token by token."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from attention_cases import Request, Step, attend_slowly, make_step
from conftest import INTERPRETED
from torch import Tensor

pytest.importorskip("triton")
from nwor_kernels.fp8 import quantize_e4m3
from nwor_kernels.verify_attention.kernel import (
    MAX_QUERY_LEN,
    Tuning,
    VerifyWorkspace,
    unsupported_reason,
    verify_attention_triton,
)

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}
"""Relative to the norm of the exact result: rounding of operands, weights and output."""

WINDOWS = [Request(37, 5, 4), Request(0, 5, 4), Request(16, 5, 4), Request(130, 5, 4)]
MIXED = [Request(40, 3, 2), Request(9, 21, 0), Request(0, 4, 3), Request(70, 1, 0)]


@dataclass
class Staged:
    """What the kernel gets besides the cache: where the window's K/V are."""

    key: Tensor
    value: Tensor
    start: Tensor
    end: Tensor


def stage(step: Step, whole: bool) -> Staged:
    """The step's own K/V rows, as slices of a fused QKV output; NaN where nothing is staged."""
    heads, width = step.key[0].shape[1], step.key[0].shape[2]
    rows = step.query.shape[0]
    fused = torch.full((rows, 3 * heads * width), float("nan"), dtype=step.key[0].dtype)
    key = fused[:, heads * width : 2 * heads * width].view(rows, heads, width)
    value = fused[:, 2 * heads * width :].view(rows, heads, width)
    starts, ends = [], []
    for r, request in enumerate(step.requests):
        last = int(step.query_start_loc[r + 1])
        staged = request.queries if whole and request.drafts else request.drafts
        for back in range(staged, 0, -1):
            key[last - back] = step.key[r][request.length - back]
            value[last - back] = step.value[r][request.length - back]
        starts.append(last - staged)
        ends.append(last)
    return Staged(
        key, value, torch.tensor(starts, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32)
    )


def poisoned_cache(step: Step, staged: Staged) -> Tensor:
    """NaN wherever no committed token of a request lies: nothing else may be read."""
    cache = torch.full_like(step.kv_cache, float("nan"))
    for r, request in enumerate(step.requests):
        number = int(staged.end[r] - staged.start[r])
        for position in range(request.length - number):
            block, offset = step.slot(r, position)
            cache[block, :, offset] = step.kv_cache[block, :, offset]
    return cache


def run(step, staged, cache, device, workspace=None, tuning=None, **options):
    output = torch.full_like(step.query, float("nan"))
    on = lambda tensor: tensor.to(device)  # noqa: E731
    fused = on(staged.key.as_strided((staged.key.untyped_storage().nbytes()
              // staged.key.element_size(),), (1,), 0))  # fmt: skip
    place = lambda t: fused.as_strided(t.shape, t.stride(), t.storage_offset())  # noqa: E731
    result = on(output)
    verify_attention_triton(
        on(step.query),
        place(staged.key),
        place(staged.value),
        cache if cache.device == device else on(cache),
        on(step.query_start_loc),
        on(step.seq_lens),
        on(step.block_table),
        on(staged.start),
        on(staged.end),
        result,
        scale=step.scale,
        max_query_len=max(r.queries for r in step.requests if r.drafts),
        max_seq_len=int(step.seq_lens.max()),
        workspace=workspace,
        tuning=tuning,
        **options,
    )
    return result.cpu()


def check(step: Step, result: Tensor, expected: np.ndarray, dtype: torch.dtype, factor=1.0):
    """Rows of requests with a window are right; all other rows were left alone."""
    for r, request in enumerate(step.requests):
        rows = slice(int(step.query_start_loc[r]), int(step.query_start_loc[r + 1]))
        if not request.drafts:
            assert result[rows].isnan().all()
            continue
        wanted = torch.from_numpy(expected[rows]).double()
        error = (result[rows].double() - wanted).norm() / wanted.norm()
        assert error < TOLERANCE[dtype] * factor, f"request {r}: {error:.2e}"
    assert result[step.owned_rows :].isnan().all()


def verify(device, requests, dtype=torch.float32, whole=True, tuning=None, **shape):
    options = {name: shape.pop(name) for name in ("sliding_window", "softcap") if name in shape}
    step = make_step(requests, dtype=dtype, **shape)
    staged = stage(step, whole)
    result = run(step, staged, poisoned_cache(step, staged), device, tuning=tuning, **options)
    check(step, result, attend_slowly(step, **options), dtype)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("requests", [WINDOWS, MIXED])
def test_windows_and_mixed_batches(triton_device, requests, whole):
    verify(triton_device, requests, whole=whole, seed=1)


@pytest.mark.parametrize("programs", [1, 3, 8])
def test_shared_contexts_are_merged(triton_device, programs):
    tuning = Tuning(block_n=16, programs=programs)
    verify(triton_device, [Request(200, 5, 4), Request(33, 5, 4)], tuning=tuning, seed=2)


@pytest.mark.parametrize("sliding_window", [1, 3, 20, 64])
@pytest.mark.parametrize("programs", [1, 4])
def test_sliding_window(triton_device, sliding_window, programs):
    tuning = Tuning(block_n=16, programs=programs)
    verify(triton_device, WINDOWS, tuning=tuning, sliding_window=sliding_window, seed=3)


def test_softcap(triton_device):
    verify(triton_device, WINDOWS, softcap=0.7, seed=4)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "dtype"),
    [
        (3, 1, 96, 32, torch.float32),
        (4, 4, 64, 16, torch.bfloat16),
        (8, 1, 64, 64, torch.float16),
        (7, 1, 32, 128, torch.bfloat16),
    ],
)
def test_shapes(triton_device, heads, kv_heads, head_dim, block_size, dtype):
    if INTERPRETED and dtype is torch.bfloat16:
        dtype = torch.float16  # the interpreter multiplies bfloat16 as if it were integers
    verify(
        triton_device,
        [Request(40, 4, 3), Request(3, 4, 3)],
        dtype=dtype,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        seed=5,
    )


def test_a_cache_with_heads_innermost(triton_device):
    step = make_step(WINDOWS, seed=6)
    staged = stage(step, True)
    cache = poisoned_cache(step, staged).transpose(1, 2).contiguous().transpose(1, 2)
    check(step, run(step, staged, cache, triton_device), attend_slowly(step), torch.float32)


def test_the_longest_window(triton_device):
    requests = [Request(20, MAX_QUERY_LEN, MAX_QUERY_LEN - 1)]
    verify(triton_device, requests, heads=8, kv_heads=1, head_dim=16, seed=7)


def test_a_workspace_serves_launch_after_launch(triton_device):
    """The arrival counters must be at zero again, or the second launch merges too early."""
    requests = [Request(150, 5, 4), Request(90, 5, 4), Request(1, 5, 4)]
    workspace = VerifyWorkspace.create(
        max_requests=4, num_heads=4, num_kv_heads=2, head_dim=8, max_query_len=5,
        device=triton_device, programs=4,
    )  # fmt: skip
    tuning = Tuning(block_n=16, programs=4)
    for seed in (8, 9, 10):
        step = make_step(requests, seed=seed)
        staged = stage(step, True)
        cache = poisoned_cache(step, staged)
        result = run(step, staged, cache, triton_device, workspace, tuning)
        check(step, result, attend_slowly(step), torch.float32)
        assert not workspace.arrived.any()


def test_padding_requests_of_a_captured_shape_are_left_alone(triton_device):
    step = make_step([Request(30, 5, 4)], seed=11)
    staged = stage(step, True)
    junk = 10**6
    step.query_start_loc = torch.cat([step.query_start_loc, step.query_start_loc[-1:]])
    step.seq_lens = torch.cat([step.seq_lens, torch.zeros(1, dtype=torch.int32)])
    step.block_table = torch.cat([step.block_table, torch.full_like(step.block_table, junk)])
    last = step.query_start_loc[-1:]
    staged.start, staged.end = torch.cat([staged.start, last]), torch.cat([staged.end, last])
    result = run(step, staged, poisoned_cache(step, staged), triton_device)
    check(step, result, attend_slowly(step), torch.float32)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no e4m3 loads")
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("quantised_query", [False, True])
def test_fp8_cache_sees_staged_tokens_as_if_written(triton_device, per_head, quantised_query):
    step = make_step(WINDOWS, dtype=torch.bfloat16, head_dim=64, seed=12)
    scales = torch.tensor([0.011, 0.023]) if per_head else torch.tensor([0.017])
    staged = stage(step, True)
    exact = make_step(WINDOWS, dtype=torch.bfloat16, head_dim=64, seed=12)
    cache = poisoned_cache(step, staged)
    for r in range(len(WINDOWS)):
        for name in ("key", "value"):
            rows = getattr(step, name)[r]
            read_back = quantize_e4m3(rows, scales).double() * scales.double().reshape(1, -1, 1)
            getattr(exact, name)[r] = read_back
    both = cache.transpose(1, 2).flatten(0, 1)
    quantised = torch.cat([quantize_e4m3(half, scales) for half in both.chunk(2, dim=-1)], dim=-1)
    blocks, heads, size, width = cache.shape
    cache8 = quantised.view(torch.uint8).view(blocks, size, heads, width).transpose(1, 2)
    q_scale = None
    if quantised_query:
        q_scale = torch.tensor([0.02])
        step.query = quantize_e4m3(step.query, q_scale)
        exact.query = step.query.double() * q_scale.double()
    fp8_on = {
        "k_scale": scales.to(triton_device),
        "v_scale": scales.to(triton_device),
        "q_scale": None if q_scale is None else q_scale.to(triton_device),
    }
    kept = step.query
    step.query = kept if quantised_query else step.query
    output_like = exact.query.to(torch.bfloat16)
    result = torch.full_like(output_like, float("nan")).to(triton_device)
    verify_attention_triton(
        step.query.to(triton_device),
        staged.key.to(triton_device).contiguous(),
        staged.value.to(triton_device).contiguous(),
        cache8.contiguous().to(triton_device),
        step.query_start_loc.to(triton_device),
        step.seq_lens.to(triton_device),
        step.block_table.to(triton_device),
        staged.start.to(triton_device),
        staged.end.to(triton_device),
        result,
        scale=step.scale,
        max_query_len=5,
        max_seq_len=200,
        **fp8_on,
    )
    check(exact, result.cpu(), attend_slowly(exact), torch.bfloat16)


@pytest.mark.skipif(INTERPRETED, reason="many shapes: on a GPU only")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("ratio", [1, 3, 4, 7, 8])
def test_the_grid_of_shapes(triton_device, dtype, block_size, head_dim, ratio):
    requests = [Request(300, 5, 4), Request(61, 5, 4), Request(0, 5, 4)]
    verify(
        triton_device,
        requests,
        dtype=dtype,
        heads=2 * ratio,
        kv_heads=2,
        head_dim=head_dim,
        block_size=block_size,
        seed=13,
    )


def test_what_is_not_served_has_a_word():
    bf16, f32 = torch.bfloat16, torch.float32
    assert unsupported_reason(128, 5, bf16, bf16) is None
    assert unsupported_reason(128, 5, bf16, torch.uint8) is None
    assert unsupported_reason(512, 5, bf16, bf16) == "head_dim_512"
    assert unsupported_reason(128, 17, bf16, bf16) == "window_of_17_tokens"
    assert unsupported_reason(128, 5, torch.float64, torch.float64) == "dtype_float64"
    assert unsupported_reason(128, 5, bf16, f32) == "cache_dtype_float32"
