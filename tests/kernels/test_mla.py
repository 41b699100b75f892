"""MLA verification, by reference and in Triton: against attention by its definition."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from attention_cases import MIXED, TOLERANCE, WINDOWS, Request, check_replays, longest
from kernel_inputs import INTERPRETED
from mla_cases import arguments, attend_slowly, check, make_mla_step, quantise, run

pytest.importorskip("triton")
from nwor_kernels.commit.plan import CommitPlan, CommitRows, StagedSources
from nwor_kernels.mla_verify_attention.kernel import (
    create_workspace,
    launch_shape,
    mla_verify_attention_triton,
    rows_wanted,
    unsupported_reason,
)
from nwor_kernels.mla_verify_attention.reference import mla_verify_attention_reference
from nwor_kernels.verify_attention.tuning import Discard, Tuning

HALF = torch.float16 if INTERPRETED else torch.bfloat16


def attend(step, device, tuning=None, workspace=None, **how):
    """The kernel's output, in a workspace for steps like this one; `how` as in `arguments`."""
    itemsize = step.cache.element_size() if step.k_scale is None else 2
    heads, width = step.query.shape[1:]
    sizes = (heads, step.latent_dim, width - step.latent_dim, itemsize, device, tuning)
    room = create_workspace(len(step.paged.seq_lens), longest(step.paged), *sizes)
    return run(mla_verify_attention_triton, step, device, workspace or room, tuning, **how)


def verify(on_triton, step, tuning=None, **how):
    """The reference to float64's precision, Triton's kernel to its dtype's."""
    if on_triton:
        dtype = torch.bfloat16 if step.k_scale is not None else step.rows[0].dtype
        result, tolerance = attend(step, on_triton, tuning, **how), TOLERANCE[dtype]
    else:
        result = run(
            mla_verify_attention_reference, step, "cpu", torch.float64, dtype=torch.float64
        )
        tolerance = 1e-12 if step.k_scale is None else 1e-5
    check(step, result, attend_slowly(step), tolerance)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("requests", [WINDOWS, MIXED])
def test_windows_and_mixed_batches(on_triton, requests, whole):
    verify(on_triton, make_mla_step(requests, whole=whole, heads=2, seed=1))


@pytest.mark.parametrize(
    ("heads", "latent_dim", "pe_dim", "block_size"),
    [
        (5, 48, 32, 32),
        pytest.param(24, 64, 16, 64, marks=pytest.mark.long),  # 120 query rows: two tiles
        pytest.param(2, 512, 64, 16, marks=pytest.mark.long),
    ],
)
def test_shapes(triton_device, heads, latent_dim, pe_dim, block_size):
    requests = [Request(40, 5, 4), Request(3, 5, 4)]
    step = make_mla_step(
        requests, heads=heads, latent_dim=latent_dim, pe_dim=pe_dim, block_size=block_size,
        dtype=HALF, seed=2,
    )  # fmt: skip
    verify(triton_device, step)


@pytest.mark.parametrize(("programs", "min_tiles"), [(2, 1), (40, 2)])
def test_contexts_are_cut_anywhere(triton_device, programs, min_tiles):
    """Three tiles of query rows, and a context that several programs share."""
    requests = [Request(90, 3, 2), Request(33, 3, 2), Request(20, 1, 0), Request(0, 3, 2)]
    tuning = Tuning(
        rows=16, block_n=16, programs=programs, min_tiles=min_tiles, discard=Discard.POISON
    )
    verify(triton_device, make_mla_step(requests, heads=12, seed=3), tuning)


def test_a_workspace_serves_launch_after_launch(triton_device):
    """The arrival counters must be at zero again, or the second launch merges too early."""
    tuning = Tuning(block_n=16, programs=5, discard=Discard.OFF)
    workspace = create_workspace(3, 5, 2, 32, 16, 4, triton_device, tuning)
    workspace.accumulators.fill_(float("nan"))
    for seed in (4, 5):
        step = make_mla_step([Request(80, 5, 4), Request(50, 5, 4)], heads=2, seed=seed)
        verify(triton_device, step, tuning, workspace=workspace)
        assert not workspace.arrived.any()
    assert not workspace.accumulators.isnan().all(), "no context was cut"


def test_requests_without_rows_are_left_alone_though_rows_are_staged_for_them(triton_device):
    """Padding of a captured shape that stages by copy: the rows there hold anything, NaN too."""
    step = make_mla_step([Request(37, 5, 4), Request(0, 0, 0)], whole=False, heads=2, seed=6)
    step.staged.start[1], step.staged.end[1] = 0, 4
    step.paged.block_table[1] = 10**6
    verify(triton_device, step)


@pytest.mark.parametrize("q_scale", [None, pytest.param(0.02, marks=pytest.mark.long)])
def test_fp8_cache_sees_staged_rows_as_if_written(on_triton, q_scale):
    step = make_mla_step(WINDOWS, dtype=HALF, heads=2, latent_dim=64, pe_dim=32, seed=7)
    step = quantise(step, 2**-7, q_scale, exactly=INTERPRETED)  # the interpreter rounds wrongly
    # One tensor of queries, as vLLM's quantised ones are.
    verify(on_triton, step, split_query=q_scale is None)


def test_a_launch_that_does_not_fit_is_refused(triton_device):
    step = make_mla_step([Request(30, 5, 4)] * 3, seed=8)
    small = create_workspace(3, 5, 4, 32, 16, 4, triton_device, Tuning(programs=1))
    with pytest.raises(ValueError, match="workspace"):
        attend(step, triton_device, workspace=small)
    with pytest.raises(ValueError, match="window_of_17"):
        attend(step, triton_device, max_query_len=17)


def test_what_is_not_served_has_a_word():
    bf16 = torch.bfloat16
    for served, word in (
        ((512, 64, 5, bf16, torch.uint8), None),
        ((1024, 64, 5, bf16, bf16), "latent_dim_1024"),
        ((512, 0, 5, bf16, bf16), "rope_dim_0"),
        ((512, 64, 17, bf16, bf16), "window_of_17_tokens"),
        ((512, 64, 5, torch.float64, bf16), "dtype_float64"),
        ((512, 64, 5, bf16, torch.float32), "cache_dtype_float32"),
    ):
        assert unsupported_reason(*served) == word


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("heads", [1, 16, 128])
def test_tiles_fit_into_shared_memory(heads, itemsize):
    shape = launch_shape(5, heads, 512, 64, itemsize, torch.device("cpu"))
    assert shape.rows * shape.row_tiles >= 5 * heads
    tiles = (shape.rows + shape.num_stages * shape.block_n) * 576 * itemsize
    assert tiles < 227 * 1024


def test_tiles_are_small_if_there_are_few():
    cases = {(80, True): 16, (80, False): 32, (640, False): 64, (5, False): 16}
    assert {case: rows_wanted(*case) for case in cases} == cases


def test_a_workspace_has_room_for_small_and_large_launches():
    cpu = torch.device("cpu")  # taken for two multiprocessors
    workspace = create_workspace(9, 5, 16, 512, 64, 2, cpu)
    for requests in range(1, 10):
        shape = launch_shape(5, 16, 512, 64, 2, cpu, None, requests)
        workspace.check(replace(shape, discard=Discard.OFF), requests * shape.row_tiles)


MODELS = {"deepseek-v3": (128, 512), "v3 of 8 ranks and v2-lite": (16, 512),
          "mistral-small-4": (32, 256), "kimi-k2": (64, 512)}  # fmt: skip
"""Heads and latent dim; the rotary part has 64."""


def on_gpu():
    """(requests, heads, latent dim, dtype, fp8, block size) of steps of real models."""
    models = [Request(length, 5, 4) for length in (3000, 17, 0, 1111)] + [Request(9, 20, 0)]
    fp8s = (None, "rows", "rows and queries")
    for name, fp8, block_size in product(MODELS, fp8s, (16, 64)):
        case = models, *MODELS[name], torch.bfloat16, fp8, block_size
        yield pytest.param(*case, id=f"{name}, fp8 {fp8}, {block_size}")
    for dtype, queries in product((torch.float16, torch.float32), (1, 2, 16)):
        requests = [Request(length, queries, 1) for length in (700, 0, 90)]
        yield pytest.param(requests, 8, 512, dtype, None, 16, id=f"{queries} queries, {dtype}")
    # More tiles than programs, some of them cut, one far longer than all others.
    lengths = torch.randint(0, 300, (150,), generator=torch.Generator().manual_seed(11)).tolist()
    many = [Request(length, 5, 4 * (length % 7 > 0)) for length in [9000, *lengths]]
    yield pytest.param(many, 16, 512, torch.bfloat16, None, 16, id="many requests")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("requests", "heads", "latent_dim", "dtype", "fp8", "block_size"), on_gpu()
)
def test_against_the_reference_on_a_gpu(requests, heads, latent_dim, dtype, fp8, block_size):
    cuda, double = torch.device("cuda"), torch.float64
    step = make_mla_step(
        requests, heads=heads, latent_dim=latent_dim, pe_dim=64, block_size=block_size,
        dtype=dtype, seed=9,
    )  # fmt: skip
    if fp8:
        step = quantise(step, 0.013, 0.02 if "queries" in fp8 else None, exactly=False)
    expected = run(mla_verify_attention_reference, step, cuda, double, dtype=double)
    check(step, attend(step, cuda), expected, TOLERANCE[dtype])


@pytest.mark.gpu
def test_a_captured_graph_serves_other_lengths_and_is_repeatable():
    """One graph, replayed with other lengths; the same bits every time."""
    cuda = torch.device("cuda")
    step = make_mla_step([Request(1500, 5, 4)] * 3, heads=16, latent_dim=512, pe_dim=64,
                         dtype=torch.bfloat16, whole=True, seed=12)  # fmt: skip
    workspace = create_workspace(3, 5, 16, 512, 64, 2, cuda)
    given = arguments(step, cuda, cache=step.paged.kv_cache[:, 0])._replace(max_seq_len=8192)
    check_replays(mla_verify_attention_triton, mla_verify_attention_reference, given, workspace)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
def test_a_commit_leaves_what_vllms_write_leaves(vllm_cache_write, fp8):
    """Bit for bit, at 512 + 64; `vllm_cache_write` has loaded vLLM's library."""
    cuda = torch.device("cuda")
    rng = torch.Generator().manual_seed(13)
    element, nan = (torch.uint8, 0x7F) if fp8 else (torch.bfloat16, float("nan"))
    caches = [torch.full((4, 16, 576), nan, dtype=element, device=cuda) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    # The rotary part is a view of a wider row, as in vLLM.
    rows = torch.randn(2, 10, 616, generator=rng).bfloat16().to(cuda)
    latents = [row[:, :512].contiguous() for row in rows]
    rotary = [row[:, 512:576] for row in rows]
    slots = torch.tensor([33, 3, 63, 17, -1, 0, 45, 20, 21, 60], device=cuda)
    scale = torch.tensor([0.5 if fp8 else 1.0], device=cuda)
    scales, errors = [scale] * 2 if fp8 else None, torch.zeros(2, dtype=torch.int32, device=cuda)
    sources = StagedSources(*([each.unsqueeze(1) for each in part] for part in (latents, rotary)))
    counts = torch.tensor([5, 5], dtype=torch.int32, device=cuda)
    CommitPlan([cache.unsqueeze(1) for cache in caches], scales, scales).commit_windows(
        sources, CommitRows(slots, 5), counts, errors
    )
    assert not errors.any()
    for cache, stock, latent, key_pe in zip(caches, expected, latents, rotary, strict=True):
        torch.ops._C_cache_ops.concat_and_cache_mla(
            latent, key_pe, stock, slots, "fp8" if fp8 else "auto", scale
        )
        assert torch.equal(cache.view(torch.uint8), stock.view(torch.uint8))
