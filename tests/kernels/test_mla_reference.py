"""The MLA reference against attention by its definition."""

import pytest
import torch
from attention_cases import Request
from mla_cases import attend_slowly, check, make_mla_step, quantise, run

from nwor_kernels.mla_verify_attention.reference import mla_verify_attention_reference

WINDOWS = [Request(37, 5, 4), Request(0, 5, 4), Request(16, 5, 4), Request(70, 5, 4)]
MIXED = [Request(40, 3, 2), Request(9, 21, 0), Request(0, 4, 3), Request(70, 1, 0)]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("requests", [WINDOWS, MIXED])
def test_windows_beside_other_requests(requests, whole):
    step = make_mla_step(requests, whole=whole, seed=1)
    result = run(mla_verify_attention_reference, step, dtype=torch.float64, out_dtype=torch.float64)
    check(step, result, attend_slowly(step), 1e-12)


@pytest.mark.parametrize("q_scale", [None, 0.02])
def test_fp8_cache_sees_staged_rows_as_if_written(q_scale):
    step = quantise(make_mla_step(WINDOWS, seed=3), 0.017, q_scale, exactly=False)
    result = run(mla_verify_attention_reference, step, out_dtype=torch.float64)
    check(step, result, attend_slowly(step), 1e-5)
