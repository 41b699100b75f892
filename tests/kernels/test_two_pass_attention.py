"""Attention in two passes, and the varlen reference, against the definition token by token."""

from functools import partial

import pytest
import torch
from attention_cases import (
    Request,
    Scales,
    as_e4m3_cache,
    attend_slowly,
    committed_only,
    make_step,
    quantised_step,
    stage_step,
)

from nwor_kernels.verify_attention import verify_attention, verify_attention_varlen_reference
from nwor_kernels.verify_attention.two_pass import (
    TwoPassRefusedError,
    merge_attention,
    verify_attention_two_pass,
)
from nwor_kernels.verify_attention.varlen_attention import torch_varlen_attention

WINDOWS = [Request(37, 5, 4), Request(0, 5, 4), Request(16, 5, 4), Request(70, 5, 4)]
MIXED = [Request(40, 3, 2), Request(9, 21, 0), Request(0, 4, 3), Request(70, 1, 0)]
CHUNK_BESIDE = [Request(40, 3, 2), Request(9, 21, 20), Request(0, 18, 17), Request(30, 2, 1)]
"""Prefill chunks whose rows are all staged stand beside windows."""


def attend(function, step, staged, *, cache=None, query=None, scales=None, **options):
    """The output, NaN where nothing was written; only committed and staged K/V are not NaN."""
    query = step.query if query is None else query
    output = torch.full(step.query.shape, float("nan"), dtype=torch.float64)
    if scales is not None:
        options |= {"k_scale": scales.k, "v_scale": scales.v, "q_scale": scales.q}
    if function is not verify_attention_varlen_reference:
        options |= {"max_query_len": max(r.queries for r in step.requests), "max_seq_len": 99}
    function(
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


both = pytest.mark.parametrize(
    "attention", [verify_attention_two_pass, verify_attention_varlen_reference]
)


@both
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("requests", [WINDOWS, MIXED, CHUNK_BESIDE])
def test_windows_beside_other_requests(attention, requests, whole):
    step = make_step(requests, seed=1)
    check(step, attend(attention, step, stage_step(step, whole)), attend_slowly(step))


def test_the_operator_is_the_reference_on_a_cpu():
    step = make_step(MIXED, seed=7)
    staged = stage_step(step, True)
    options = {"sliding_window": 6, "softcap": 0.7}
    output = attend(verify_attention, step, staged, **options)
    check(step, output, attend_slowly(step, **options))


@both
@pytest.mark.parametrize("whole", [True, False])
def test_softcap(attention, whole):
    step = make_step(WINDOWS, seed=2)
    output = attend(attention, step, stage_step(step, whole), softcap=0.7)
    check(step, output, attend_slowly(step, softcap=0.7))


@both
@pytest.mark.parametrize("sliding_window", [6, 7, 20, 64])
@pytest.mark.parametrize("whole", [True, False])
def test_sliding_window(attention, sliding_window, whole):
    step = make_step(WINDOWS, seed=3)
    options = {"staged_len": 5 if whole else 4} if attention is verify_attention_two_pass else {}
    output = attend(
        attention, step, stage_step(step, whole), sliding_window=sliding_window, **options
    )
    check(step, output, attend_slowly(step, sliding_window=sliding_window))


@pytest.mark.parametrize(
    ("staged_len", "reason"),
    [(None, "sliding_window_of_unequal_windows"), (5, "sliding_window_too_short")],
)
def test_a_sliding_window_that_two_passes_cannot_do(staged_len, reason):
    step = make_step(WINDOWS, seed=3)
    with pytest.raises(TwoPassRefusedError) as refusal:
        attend(
            verify_attention_two_pass,
            step,
            stage_step(step, True),
            sliding_window=5,
            staged_len=staged_len,
        )
    assert refusal.value.reason == reason
    assert refusal.value.args[0].startswith(reason)


@both
@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("fp8_query", [True, False])
def test_fp8_cache_sees_staged_tokens_as_if_written(attention, per_head, fp8_query):
    k, v = ([0.011, 0.023], [0.02, 0.014]) if per_head else ([0.017], [0.013])
    scales = Scales(torch.tensor(k), torch.tensor(v), torch.tensor([0.02]) if fp8_query else None)
    step = make_step(WINDOWS, seed=4)
    staged = stage_step(step, True)
    seen, query, _ = quantised_step(step, scales)
    cache = as_e4m3_cache(committed_only(step, staged), scales)
    output = attend(attention, step, staged, cache=cache, query=query, scales=scales)
    check(step, output, attend_slowly(seen))


def test_whole_windows_are_not_copied(monkeypatch):
    """Starts and ends that are views of the query starts tell that K/V lie packed already."""
    step = make_step(WINDOWS, seed=5)
    staged = stage_step(step, True)
    staged.start, staged.end = step.query_start_loc[:-1], step.query_start_loc[1:]
    given = []

    def attention(**arguments):
        given.append(arguments)
        return torch_varlen_attention(**arguments)

    output = attend(verify_attention_two_pass, step, staged, attention=attention)
    check(step, output, attend_slowly(step))
    of_context, of_window = given
    assert of_context["causal"] is False
    assert of_window["causal"] is True
    assert of_window["k"].data_ptr() == staged.key.data_ptr()


@pytest.mark.parametrize("sign", [1, -1])
def test_merge_takes_nothing_from_a_pass_that_saw_nothing(sign):
    """FlashAttention 2 reports +inf there, 3 -inf; what the output holds may be NaN."""
    out, lse = torch.randn(3, 2, 4), torch.randn(2, 3)
    nothing = torch.full_like(lse, sign * float("inf"))
    junk = torch.full_like(out, float("nan"))
    for merged in (
        merge_attention(out, lse, junk, nothing),
        merge_attention(junk, nothing, out, lse),
    ):
        torch.testing.assert_close(merged, out)


def test_merge_weighs_by_the_number_of_keys_seen():
    """Equal scores: two keys of value 1 and one of value 4 average to 2."""
    ones, fours = torch.ones(1, 1, 2), torch.full((1, 1, 2), 4.0)
    lse = torch.tensor([[[2.0]], [[1.0]]]).log()
    torch.testing.assert_close(merge_attention(ones, lse[0], fours, lse[1]), 2 * ones)


@pytest.mark.gpu
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("requests", "sliding_window"), [(WINDOWS, -1), (CHUNK_BESIDE, -1), (MIXED, -1), (WINDOWS, 20)]
)
def test_with_flash_attention(requests, sliding_window, whole):
    """vLLM's FlashAttention 3 does both passes."""
    flash = pytest.importorskip("vllm.vllm_flash_attn.flash_attn_interface")
    attention = partial(flash.flash_attn_varlen_func, return_softmax_lse=True, fa_version=3)
    step = make_step(requests, dtype=torch.bfloat16, head_dim=64, seed=6)
    staged = stage_step(step, whole)
    output = torch.full(step.query.shape, float("nan"), dtype=torch.bfloat16, device="cuda")
    tensors = (
        step.query,
        staged.key,
        staged.value,
        # Blocks that were never written are finite in an engine, and FlashAttention needs that.
        committed_only(step, staged).nan_to_num(0.0),
        step.query_start_loc,
        step.seq_lens,
        step.block_table.clamp(max=step.kv_cache.shape[0] - 1),
        staged.start,
        staged.end,
    )
    verify_attention_two_pass(
        *(tensor.cuda() for tensor in tensors),
        output,
        scale=step.scale,
        max_query_len=max(r.queries for r in requests),
        max_seq_len=128,
        sliding_window=sliding_window,
        staged_len=(5 if whole else 4) if sliding_window > 0 else None,
        attention=attention,
    )
    expected = attend_slowly(step, sliding_window=sliding_window)
    check(step, output.cpu(), expected, tolerance=1e-2)
