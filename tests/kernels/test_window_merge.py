"""A window's rows merged into stock's attention, by reference and in Triton: together attention by
its definition. Stock's part is torch, NaN for a request without committed tokens."""

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
    exact_in_e4m3,
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


def check_merge(on_triton, step: Step, whole=True, seen: Step | None = None, of=None, **how):
    """Attention over `seen` by merging a window into stock's; `of`: the dtype of the tolerance."""
    staged, seen = stage_step(step, whole), seen or step
    output, lse = attend_committed(seen, staged)
    dtype = staged.key.dtype if on_triton else torch.float64
    given = arguments(step, staged, on_triton or "cpu", dtype=dtype, **how)
    given.output.copy_(output)
    if on_triton:
        merge_window_triton(given, lse.float().to(on_triton))
    else:
        merge_window_reference(given, lse, torch.float64)
    tolerance = (of or TOLERANCE[staged.key.dtype]) if on_triton else 1e-12
    check_rows(step, given.output.cpu(), attend_slowly(seen), tolerance)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "value_dim"),
    [(2, 2, 64, 64), (6, 2, 96, 40), (8, 2, 128, 128), (16, 2, 64, 64), (6, 2, 256, 256)],
)
def test_any_heads(on_triton, heads, kv_heads, head_dim, value_dim, whole):
    step = make_step(
        UNEVEN, heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim,
        seed=heads + head_dim,
    )  # fmt: skip
    check_merge(on_triton, step, whole)


@pytest.mark.parametrize("queries", [2, 9, 16])
def test_any_window(triton_device, queries):
    windows = [Request(c, queries, queries - 1) for c in (0, 1, queries - 1, queries, 33, 100)]
    check_merge(triton_device, make_step(windows, heads=6, kv_heads=2, head_dim=64, seed=queries))


@pytest.mark.parametrize("of_query", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_an_fp8_cache(triton_device, count, of_query):
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    step = make_step(UNEVEN, heads=6, kv_heads=2, head_dim=64, dtype=dtype, seed=5)
    scales = Scales(
        torch.tensor([0.02]) if of_query else None,
        torch.tensor([2**-7, 2**-8])[:count], torch.tensor([2**-6, 2**-7])[:count],
    )  # fmt: skip
    if INTERPRETED:
        exact_in_e4m3(step, scales)
    seen, query, _ = quantised_step(step, scales)
    cache = torch.empty(step.kv_cache.shape, dtype=torch.uint8)  # only its dtype counts
    how = {"query": query, "scales": scales, "cache": cache}
    check_merge(triton_device, step, seen=seen, of=TOLERANCE[torch.bfloat16], **how)


def test_rounded_twice(triton_device):
    dtype = torch.float16 if INTERPRETED else torch.bfloat16  # it has no bf16 products
    step = make_step(UNEVEN, heads=4, kv_heads=1, head_dim=128, dtype=dtype, seed=7)
    check_merge(triton_device, step, of=2 * TOLERANCE[dtype])


def test_a_refused_shape(triton_device):
    step = make_step([Request(9, 17, 16)], heads=2, kv_heads=2, head_dim=64)
    with pytest.raises(ValueError, match="window_of_17_tokens"):
        check_merge(triton_device, step)
