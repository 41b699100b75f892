"""The varlen reference against attention by its definition, token by token."""

import pytest
import torch
from attention_cases import (
    OPTIONS,
    Request,
    Scales,
    as_e4m3_cache,
    attend_slowly,
    committed_only,
    for_heads,
    make_step,
    quantised_step,
    stage_step,
)

from nwor_kernels.verify_attention.reference import verify_attention_varlen_reference

WINDOWS = [Request(37, 5, 4), Request(0, 5, 4), Request(16, 5, 4), Request(70, 5, 4)]
MIXED = [Request(40, 3, 2), Request(9, 21, 0), Request(0, 4, 3), Request(70, 1, 0)]
CHUNK_BESIDE = [Request(40, 3, 2), Request(9, 21, 20), Request(0, 18, 17), Request(30, 2, 1)]
"""Prefill chunks whose rows are all staged stand beside windows."""


def attend(step, staged, *, cache=None, query=None, scales=None, **options):
    """The output, NaN where nothing was written; only committed and staged K/V are not NaN."""
    query = step.query if query is None else query
    output = torch.full(step.query.shape, float("nan"), dtype=torch.float64)
    if scales is not None:
        options |= {"k_scale": scales.k, "v_scale": scales.v, "q_scale": scales.q}
    verify_attention_varlen_reference(
        query,
        staged.key,
        staged.value,
        committed_only(step, staged) if cache is None else cache,
        step.query_start_loc,
        step.seq_lens,
        step.block_table,
        staged.start,
        staged.end,
        output,
        scale=step.scale,
        **options,
    )
    return output


def check(step, output, expected, tolerance=1e-6):
    """Requests with drafts are right, everything else was left alone."""
    for r, request in enumerate(step.requests):
        rows = slice(int(step.query_start_loc[r]), int(step.query_start_loc[r + 1]))
        if request.drafts:
            wanted = torch.from_numpy(expected[rows])
            assert (output[rows] - wanted).norm() < tolerance * wanted.norm(), f"request {r}"
        else:
            assert output[rows].isnan().all()
    assert output[step.owned_rows :].isnan().all()


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("requests", [WINDOWS, MIXED, CHUNK_BESIDE])
def test_windows_beside_other_requests(requests, whole):
    step = make_step(requests, seed=1)
    check(step, attend(step, stage_step(step, whole)), attend_slowly(step))


@pytest.mark.parametrize("whole", [True, False])
def test_softcap(whole):
    step = make_step(WINDOWS, seed=2)
    output = attend(step, stage_step(step, whole), softcap=0.7)
    check(step, output, attend_slowly(step, softcap=0.7))


@pytest.mark.parametrize("sliding_window", [6, 7, 20, 64])
@pytest.mark.parametrize("whole", [True, False])
def test_sliding_window(sliding_window, whole):
    step = make_step(WINDOWS, seed=3)
    output = attend(step, stage_step(step, whole), sliding_window=sliding_window)
    check(step, output, attend_slowly(step, sliding_window=sliding_window))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_what_layers_add(name):
    step, options = make_step(WINDOWS, seed=5), for_heads(OPTIONS[name], 4)
    output = attend(step, stage_step(step, True), **options)
    check(step, output, attend_slowly(step, **options))


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("fp8_query", [True, False])
def test_fp8_cache_sees_staged_tokens_as_if_written(per_head, fp8_query):
    k, v = ([0.011, 0.023], [0.02, 0.014]) if per_head else ([0.017], [0.013])
    scales = Scales(torch.tensor(k), torch.tensor(v), torch.tensor([0.02]) if fp8_query else None)
    step = make_step(WINDOWS, seed=4)
    staged = stage_step(step, True)
    seen, query, _ = quantised_step(step, scales)
    cache = as_e4m3_cache(committed_only(step, staged), scales)
    output = attend(step, staged, cache=cache, query=query, scales=scales)
    check(step, output, attend_slowly(seen))
