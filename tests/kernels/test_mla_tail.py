"""The tail of a window merged into stock's attention, by reference and in Triton: both are MLA
attention by its definition. Stock's part is torch; one test has the real FlashAttention 3."""

import numpy as np
import pytest
import torch
from attention_cases import TOLERANCE, Request
from mla_cases import MlaStep, arguments, attend_slowly, check, make_mla_step

pytest.importorskip("triton")
from nwor_kernels.attention_step import StepRequests
from nwor_kernels.mla_verify_attention.reference import (
    mla_tail_reference,
    mla_verify_attention_reference,
)
from nwor_kernels.mla_verify_attention.tail import mla_tail_triton

NAN, LOWEST = float("nan"), float("-inf")


def attend_committed(step: MlaStep) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, lse) as stock gives them over the first L - s tokens, in float64.

    NaN and -inf for a row that saw no token; NaN for requests without a window.
    """
    query = step.query.double().numpy()
    output = np.full((*query.shape[:2], step.latent_dim), np.nan)
    lse = np.full(query.shape[:2], np.nan)
    staged = (step.staged.end - step.staged.start).tolist()
    for r, request in enumerate(step.requests):
        for q in range(request.queries if request.drafts else 0):
            row = int(step.paged.query_start_loc[r]) + q
            seen = request.length - staged[r] - (request.queries - 1 - q)
            lse[row] = -np.inf
            if seen > 0:
                keys = step.rows[r][:seen].double().numpy()
                scores = query[row] @ keys.T * step.scale
                lse[row] = np.logaddexp.reduce(scores, axis=1)
                output[row] = np.exp(scores - lse[row, :, None]) @ keys[:, : step.latent_dim]
    return torch.from_numpy(output), torch.from_numpy(lse)


def merge(on_triton, step: MlaStep, *, head_major=True, empty_lse=LOWEST, others=NAN, **how):
    """The output after a tail, whose rows of requests without a window held `others` before.

    Stock's sums lie in memory as FlashAttention's do, [heads, tokens].
    """
    output, lse = attend_committed(step)
    output[lse.isnan()] = others
    device, dtype = on_triton or "cpu", torch.float32 if on_triton else torch.float64
    lse = lse.masked_fill(lse == LOWEST, empty_lse).to(device, dtype)
    lse = lse.T.contiguous().T if head_major else lse
    given = arguments(step, device, dtype=None if on_triton else dtype, **how)
    given.output.copy_(output)
    if on_triton:
        mla_tail_triton(given, lse)
    else:
        mla_tail_reference(given, lse, torch.float64)
    return given.output.cpu()


def windows(queries: int, *contexts: int) -> list[Request]:
    return [Request(context, queries, queries - 1) for context in contexts]


def around(queries: int) -> list[Request]:
    """Windows whose tail begins before the first token, at it, and far behind it."""
    return windows(queries, 0, 1, queries - 1, queries, 37)


def verify(on_triton, requests, dtype=torch.float32, *, how=None, **shape):
    step = make_mla_step(requests, dtype=dtype, **shape)
    tolerance = TOLERANCE[dtype] if on_triton else 1e-12
    check(step, merge(on_triton, step, **(how or {})), attend_slowly(step), tolerance)


@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("queries", "heads", "block_size"),
    [
        (2, 2, 16),
        pytest.param(5, 16, 64, marks=pytest.mark.long),
        (3, 20, 16),  # rows of a tile are of two queries, and the last tile is not full
        pytest.param(4, 7, 64, marks=pytest.mark.long),
        pytest.param(8, 20, 16, marks=pytest.mark.long),
        (16, 2, 16),  # 31 keys
    ],
)
def test_windows(on_triton, queries, heads, block_size, whole):
    shape = {"heads": heads, "block_size": block_size, "whole": whole, "seed": queries}
    verify(on_triton, around(queries), **shape)


@pytest.mark.parametrize(
    "how", [{"head_major": False}, {"empty_lse": float("inf")}, {"empty_lse": NAN}]
)
def test_sums_of_any_strides_and_of_rows_that_saw_nothing(triton_device, how):
    verify(triton_device, around(3), torch.float16, how=how, seed=2)


def test_dims_that_are_no_powers_of_two(triton_device):
    verify(triton_device, around(3), heads=5, latent_dim=48, pe_dim=32, block_size=32, seed=3)


@pytest.mark.parametrize("whole", [True, False])
def test_requests_without_a_window_and_windows_of_unequal_length(on_triton, whole):
    windows_of = [Request(40, 3, 2), Request(0, 4, 3), Request(9, 5, 4)]
    requests = [*windows_of, Request(9, 21), Request(70, 1), Request(3, 3, 2)]
    verify(on_triton, requests, whole=whole, seed=4)


def test_padding_of_a_captured_shape_is_left_alone(triton_device):
    """Staged rows without tokens, and without query rows: no block is looked up."""
    step = make_mla_step([*windows(5, 37), Request(0, 5), Request(0, 0)], whole=False, seed=5)
    step.staged.start[1:], step.staged.end[1:] = 0, 4
    step.paged.seq_lens[1:] = 0
    step.paged.block_table[1:] = 10**6
    result = merge(triton_device, step, others=7.0)
    assert (result[5:] == 7).all()
    result[5:] = NAN
    check(step, result, attend_slowly(step), TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    ("cache_dtype", "queries", "reason"),
    [(torch.uint8, 5, "cache_dtype_uint8"), (torch.float32, 17, "window_of_17_tokens")],
)
def test_what_is_not_served_is_refused(triton_device, cache_dtype, queries, reason):
    step = make_mla_step(windows(5, 9), seed=6)
    step.cache = torch.zeros(step.cache.shape, dtype=cache_dtype)
    with pytest.raises(ValueError, match=reason):
        merge(triton_device, step, max_query_len=queries)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("queries", "heads", "latent_dim"), [(5, 16, 512), (8, 128, 512), (2, 20, 512), (16, 32, 256)]
)
def test_the_shapes_of_models(queries, heads, latent_dim, dtype):
    shape = {"heads": heads, "latent_dim": latent_dim, "pe_dim": 64, "block_size": 64, "seed": 7}
    verify(torch.device("cuda"), [*around(queries), *windows(queries, 900)], dtype, **shape)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("scheduled", [True, False])
@pytest.mark.parametrize("requests", [1, 8, 64])
def test_with_flash_attention_in_a_captured_graph(requests, scheduled, block_size):
    """FlashAttention 3 as vLLM calls it, whose schedule is made for the lengths with the window."""
    pytest.importorskip("vllm.vllm_flash_attn")
    cuda, most, queries, heads = torch.device("cuda"), 500 + 4000 // requests, 5, 16
    contexts = torch.randint(0, most, (3, requests), generator=torch.Generator().manual_seed(8))
    contexts[1] = torch.arange(requests) % 130
    step = make_mla_step(
        windows(queries, *[most] * requests), heads=heads, latent_dim=512, pe_dim=64,
        block_size=block_size, dtype=torch.bfloat16, seed=9,
    )  # fmt: skip
    given = arguments(step, cuda, cache=step.paged.kv_cache[:, 0], split_query=False)
    starts, lens, table, *_ = given.requests
    given = given._replace(
        requests=StepRequests(starts, lens, table, starts[:-1], starts[1:]), max_query_len=queries
    )
    cache, query = given.kv_cache, step.query
    parts = (given.query, given.query_pe)
    table.clamp_(max=len(cache) - 1)  # FlashAttention may look up blocks that it does not read
    schedule = flash_schedule(starts, lens, most, heads, block_size) if scheduled else None
    merged = torch.empty(*query.shape[:2], 512, dtype=torch.bfloat16, device=cuda)

    def launch():
        shorter = (lens - queries).clamp_(min=0)
        output, lse = flash_attend(parts, cache, starts, shorter, table, schedule, step.scale, most)
        mla_tail_triton(given._replace(output=output), lse.T)
        merged.copy_(output)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for number, context in enumerate(contexts):
        real = max(requests - 3 * number, 1)  # the others are padding
        lens.zero_()
        lens[:real] = context[:real].to(cuda) + queries
        starts.copy_((torch.arange(requests + 1) * queries).clamp(max=real * queries))
        if schedule is not None:
            schedule.copy_(flash_schedule(starts, lens, most, heads, block_size))
        expected = torch.full(merged.shape, NAN, dtype=torch.float64, device=cuda)
        mla_verify_attention_reference(given._replace(output=expected), torch.float64)
        merged.fill_(NAN)
        graph.replay()
        rows = slice(0, real * queries)
        error = (merged[rows].double() - expected[rows]).flatten(1).norm(dim=1)
        error /= expected[rows].flatten(1).norm(dim=1)
        worst = int(error.nan_to_num(nan=torch.inf).argmax())
        told = f"replay {number}, row {worst % queries} of a context of {context[worst // queries]}"
        assert error[worst] < TOLERANCE[torch.bfloat16], f"{told}: {error[worst]:.2e}"


def flash_schedule(starts, lens, most, heads, block_size):
    """FlashAttention's schedule of this step, as vLLM's builder makes it for full graphs."""
    from vllm.vllm_flash_attn.flash_attn_interface import get_scheduler_metadata

    return get_scheduler_metadata(
        batch_size=len(lens), max_seqlen_q=5, max_seqlen_k=most + 5, num_heads_q=heads,
        num_heads_kv=1, headdim=64, cache_seqlens=lens, qkv_dtype=torch.bfloat16, headdim_v=512,
        page_size=block_size, cu_seqlens_q=starts, causal=True, num_splits=32,
    )  # fmt: skip


def flash_attend(parts, cache, starts, lens, table, schedule, scale, most):
    """(output, sums [heads, tokens]) over these lengths, as `FlashAttnMLAImpl.forward_mqa`."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    latent, rope = cache.unsqueeze(-2).split([512, 64], -1)
    return flash_attn_varlen_func(
        q=parts[1], k=rope, v=latent, q_v=parts[0], max_seqlen_q=5, cu_seqlens_q=starts,
        max_seqlen_k=most + 5, seqused_k=lens, block_table=table, softmax_scale=scale,
        causal=True, return_softmax_lse=True, fa_version=3, scheduler_metadata=schedule,
        num_splits=32,
    )  # fmt: skip
