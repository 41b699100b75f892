"""A window's rows, merged into attention over the committed tokens: together they must be attention
by its definition, in float64.

Stock's part is torch. Its output and sums are NaN for a request without committed tokens.
"""

import numpy as np
import pytest
import torch
from attention_cases import (
    TOLERANCE,
    Request,
    Staged,
    Step,
    arguments,
    attend_slowly,
    check_rows,
    make_step,
    quantised_step,
    stage_step,
)
from kernel_inputs import INTERPRETED

pytest.importorskip("triton")
from nwor_kernels.attention_step import Scales
from nwor_kernels.window_merge.kernel import merge_window_triton
from nwor_kernels.window_merge.reference import merge_window_reference

NAN = float("nan")
UNEVEN = [Request(37, 5, 4), Request(0, 5, 4), Request(70, 1, 0), Request(130, 5, 4)]


def attend_committed(step: Step, staged: Staged) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, lse [heads, rows]) over each request's first L - s tokens, in float64.

    NaN for a row that saw no token.
    """
    query = step.query.double().numpy()
    rows, heads = query.shape[:2]
    ratio = heads // step.key[0].shape[1]
    output = np.full((rows, heads, step.value[0].shape[2]), np.nan)
    lse = np.full((heads, rows), np.nan)
    for r, request in enumerate(step.requests):
        committed = request.length - int(staged.end[r] - staged.start[r])
        first, last = step.query_start_loc[r : r + 2].tolist()
        for row in range(first, last if request.drafts else first):
            for h in range(heads if committed > 0 else 0):
                keys = step.key[r][:committed, h // ratio].double().numpy()
                values = step.value[r][:committed, h // ratio].double().numpy()
                scores = query[row, h] @ keys.T * step.scale
                lse[h, row] = np.logaddexp.reduce(scores)
                output[row, h] = np.exp(scores - lse[h, row]) @ values
    return torch.from_numpy(output), torch.from_numpy(lse)


def merge(
    function, step: Step, staged: Staged, seen: Step, device="cpu", *,
    sums_dtype=torch.float32, told=(), **how,
):  # fmt: skip
    """The output after `function`, NaN where no window is; `seen` is what attention should see."""
    output, lse = attend_committed(seen, staged)
    given = arguments(step, staged, device, **{"dtype": staged.key.dtype, **how})
    given.output.copy_(output)
    function(given, lse.to(sums_dtype).to(device), *told)
    return given.output.cpu()


@pytest.mark.parametrize("whole", [True, False])
def test_the_reference_is_attention_by_definition(whole):
    step = make_step(UNEVEN, heads=6, kv_heads=2, head_dim=8, value_dim=16, seed=1)
    staged = stage_step(step, whole)
    found = merge(
        merge_window_reference, step, staged, step,
        dtype=torch.float64, sums_dtype=torch.float64, told=(torch.float64,),
    )  # fmt: skip
    check_rows(step, found, attend_slowly(step), 1e-12)


def run_kernel(step: Step, staged: Staged, device, seen: Step | None = None, **how):
    return merge(merge_window_triton, step, staged, seen or step, device, **how)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 2), (16, 2)], ids="gqa {0[0]}".format)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (96, 40)], ids=str)
def test_any_heads(heads, dims, whole, triton_device):
    step = make_step(
        UNEVEN, heads=heads[0], kv_heads=heads[1], head_dim=dims[0], value_dim=dims[1],
        seed=heads[0] + dims[0],
    )  # fmt: skip
    staged = stage_step(step, whole)
    found = run_kernel(step, staged, triton_device)
    check_rows(step, found, attend_slowly(step), TOLERANCE[torch.float32])


@pytest.mark.parametrize("queries", [2, 9, 16])
def test_any_window(queries, triton_device):
    windows = [Request(c, queries, queries - 1) for c in (0, 1, queries - 1, queries, 33, 100)]
    step = make_step(windows, heads=6, kv_heads=2, head_dim=64, seed=queries)
    found = run_kernel(step, stage_step(step, True), triton_device)
    check_rows(step, found, attend_slowly(step), TOLERANCE[torch.float32])


@pytest.mark.parametrize("of_query", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_an_fp8_cache(count, of_query, triton_device):
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    step = make_step(UNEVEN, heads=6, kv_heads=2, head_dim=64, dtype=dtype, seed=5)
    scales = Scales(
        torch.tensor([0.02]) if of_query else None,
        torch.tensor([2**-7, 2**-8])[:count], torch.tensor([2**-6, 2**-7])[:count],
    )  # fmt: skip
    seen, query, _ = quantised_step(step, scales)
    if INTERPRETED:  # it rounds to e4m3 wrongly, so there is nothing left to round
        step.key, step.value = (
            [rows.to(dtype) for rows in each] for each in (seen.key, seen.value)
        )
        seen, query, _ = quantised_step(step, scales)
    staged = stage_step(step, True)
    cache = torch.empty(step.kv_cache.shape, dtype=torch.uint8)  # only its dtype counts
    how = {"query": query, "scales": scales, "cache": cache}
    found = run_kernel(step, staged, triton_device, seen, **how)
    check_rows(step, found, attend_slowly(seen), TOLERANCE[torch.bfloat16])


def test_rounded_twice(triton_device):
    dtype = torch.float16 if INTERPRETED else torch.bfloat16  # it has no bf16 products
    step = make_step(UNEVEN, heads=4, kv_heads=1, head_dim=128, dtype=dtype, seed=7)
    found = run_kernel(step, stage_step(step, True), triton_device)
    check_rows(step, found, attend_slowly(step), 2 * TOLERANCE[dtype])


def test_a_refused_shape(triton_device):
    step = make_step([Request(9, 17, 16)], heads=2, kv_heads=2, head_dim=64)
    with pytest.raises(ValueError, match="window_of_17_tokens"):
        run_kernel(step, stage_step(step, True), triton_device)
