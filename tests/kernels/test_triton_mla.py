"""The MLA verification kernel against attention by its definition, and the commit of latent rows.

Interpreted on the CPU over small latents; on a GPU over the shapes of real models too.
"""

from dataclasses import replace

import pytest
import torch
from attention_cases import MIXED, TOLERANCE, WINDOWS, Request, longest
from kernel_inputs import INTERPRETED
from mla_cases import arguments, attend_slowly, check, make_mla_step, quantise, run

pytest.importorskip("triton")
from nwor_kernels.commit.plan import CommitPlan, CommitRows, StagedSources
from nwor_kernels.commit.reference import LayerCaches, commit_windows_reference
from nwor_kernels.mla_verify_attention.kernel import (
    create_workspace,
    launch_shape,
    mla_verify_attention_triton,
    rows_wanted,
    unsupported_reason,
)
from nwor_kernels.mla_verify_attention.reference import mla_verify_attention_reference
from nwor_kernels.verify_attention.tuning import Discard, Tuning

MODELS = {"deepseek-v3": (128, 512, 64), "v3 of 8 ranks": (16, 512, 64), "v2-lite": (16, 512, 64),
          "mistral-small-4": (32, 256, 64), "kimi-k2": (64, 512, 64)}  # fmt: skip


def attend(step, device, tuning=None, workspace=None, **how):
    """The kernel's output, in a workspace for steps like this one; `how` as in `arguments`."""
    itemsize = step.cache.element_size() if step.k_scale is None else 2
    heads, width = step.query.shape[1:]
    sizes = (heads, step.latent_dim, width - step.latent_dim, itemsize, device, tuning)
    room = create_workspace(len(step.paged.seq_lens), longest(step.paged), *sizes)
    return run(mla_verify_attention_triton, step, device, workspace or room, tuning, **how)


def verify(device, requests, dtype=torch.float32, tuning=None, **shape):
    step = make_mla_step(requests, dtype=dtype, **shape)
    result = attend(step, device, tuning)
    check(step, result, attend_slowly(step), TOLERANCE[dtype])


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("requests", [WINDOWS, MIXED])
def test_windows_and_mixed_batches(triton_device, requests, whole):
    verify(triton_device, requests, whole=whole, heads=2, seed=1)


@pytest.mark.parametrize(
    ("heads", "latent_dim", "pe_dim", "block_size"),
    [
        (5, 48, 32, 32),
        pytest.param(24, 64, 16, 64, marks=pytest.mark.long),  # 120 query rows: two tiles
        pytest.param(2, 512, 64, 16, marks=pytest.mark.long),
    ],
)
def test_shapes(triton_device, heads, latent_dim, pe_dim, block_size):
    shape = {"latent_dim": latent_dim, "pe_dim": pe_dim, "block_size": block_size, "seed": 2}
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    verify(triton_device, [Request(40, 5, 4), Request(3, 5, 4)], dtype, heads=heads, **shape)


@pytest.mark.parametrize(("programs", "min_tiles"), [(2, 1), (40, 2)])
def test_contexts_are_cut_anywhere(triton_device, programs, min_tiles):
    """40 query rows in three tiles, and a context that several programs share."""
    requests = [Request(130, 5, 4), Request(33, 5, 4), Request(50, 1, 0), Request(0, 5, 4)]
    tuning = Tuning(
        rows=16, block_n=16, programs=programs, min_tiles=min_tiles, discard=Discard.POISON
    )
    verify(triton_device, requests, tuning=tuning, heads=8, seed=3)


def test_a_workspace_serves_launch_after_launch(triton_device):
    """The arrival counters must be at zero again, or the second launch merges too early."""
    tuning = Tuning(block_n=16, programs=5, discard=Discard.OFF)
    workspace = create_workspace(3, 5, 2, 32, 16, 4, triton_device, tuning)
    workspace.accumulators.fill_(float("nan"))
    for seed in (4, 5):
        step = make_mla_step([Request(80, 5, 4), Request(50, 5, 4)], heads=2, seed=seed)
        result = attend(step, triton_device, tuning, workspace=workspace)
        check(step, result, attend_slowly(step), TOLERANCE[torch.float32])
        assert not workspace.arrived.any()
    assert not workspace.accumulators.isnan().all(), "no context was cut"


def test_requests_without_rows_are_left_alone_though_rows_are_staged_for_them(triton_device):
    """Padding of a captured shape that stages by copy: the rows there hold anything, NaN too."""
    step = make_mla_step([Request(37, 5, 4), Request(0, 0, 0)], whole=False, heads=2, seed=6)
    step.staged.start[1], step.staged.end[1] = 0, 4
    step.paged.block_table[1] = 10**6
    result = attend(step, triton_device)
    check(step, result, attend_slowly(step), TOLERANCE[torch.float32])


@pytest.mark.parametrize("q_scale", [None, pytest.param(0.02, marks=pytest.mark.long)])
def test_fp8_cache_sees_staged_rows_as_if_written(triton_device, q_scale):
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    step = make_mla_step(WINDOWS, dtype=dtype, heads=2, latent_dim=64, pe_dim=32, seed=7)
    step = quantise(step, 2**-7, q_scale, exactly=INTERPRETED)  # the interpreter rounds wrongly
    # One tensor of queries, as vLLM's quantised ones are.
    result = attend(step, triton_device, split_query=q_scale is None)
    check(step, result, attend_slowly(step), TOLERANCE[torch.bfloat16])


def test_a_launch_that_does_not_fit_is_refused(triton_device):
    step = make_mla_step([Request(30, 5, 4)] * 3, seed=8)
    small = create_workspace(3, 5, 4, 32, 16, 4, triton_device, Tuning(programs=1))
    with pytest.raises(ValueError, match="workspace"):
        attend(step, triton_device, workspace=small)
    with pytest.raises(ValueError, match="window_of_17"):
        attend(step, triton_device, max_query_len=17)


def test_what_is_not_served_has_a_word():
    bf16 = torch.bfloat16
    assert unsupported_reason(512, 64, 5, bf16, torch.uint8) is None
    assert unsupported_reason(1024, 64, 5, bf16, bf16) == "latent_dim_1024"
    assert unsupported_reason(512, 0, 5, bf16, bf16) == "rope_dim_0"
    assert unsupported_reason(512, 64, 17, bf16, bf16) == "window_of_17_tokens"
    assert unsupported_reason(512, 64, 5, torch.float64, bf16) == "dtype_float64"
    assert unsupported_reason(512, 64, 5, bf16, torch.float32) == "cache_dtype_float32"


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("heads", [1, 16, 128])
def test_tiles_fit_into_shared_memory(heads, itemsize):
    shape = launch_shape(5, heads, 512, 64, itemsize, torch.device("cpu"))
    assert shape.rows * shape.row_tiles >= 5 * heads
    tiles = (shape.rows + shape.num_stages * shape.block_n) * 576 * itemsize
    assert tiles < 227 * 1024


@pytest.mark.parametrize(
    ("folded", "is_small", "rows"),
    [(80, True, 16), (80, False, 32), (640, False, 64), (5, False, 16)],
)
def test_tiles_are_small_if_there_are_few(folded, is_small, rows):
    assert rows_wanted(folded, is_small) == rows


def test_a_workspace_has_room_for_small_and_large_launches():
    cpu = torch.device("cpu")  # taken for two multiprocessors
    workspace = create_workspace(9, 5, 16, 512, 64, 2, cpu)
    for requests in range(1, 10):
        shape = launch_shape(5, 16, 512, 64, 2, cpu, None, requests)
        workspace.check(replace(shape, discard=Discard.OFF), requests * shape.row_tiles)


def check_on_gpu(step, tolerance, **options):
    """Against the reference in float64 on the GPU; test_attention_references.py holds that."""
    cuda = torch.device("cuda")
    double = torch.float64
    expected = run(mla_verify_attention_reference, step, cuda, double, dtype=double)
    check(step, attend(step, cuda, **options), expected, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("fp8", [None, "rows", "rows and queries"])
@pytest.mark.parametrize("model", MODELS)
def test_the_shapes_of_models(model, fp8, block_size):
    heads, latent_dim, pe_dim = MODELS[model]
    requests = [Request(length, 5, 4) for length in (3000, 17, 0, 1111)] + [Request(9, 20, 0)]
    step = make_mla_step(
        requests, heads=heads, latent_dim=latent_dim, pe_dim=pe_dim, block_size=block_size,
        dtype=torch.bfloat16, seed=9,
    )  # fmt: skip
    if fp8:
        step = quantise(step, 0.013, 0.02 if "queries" in fp8 else None, exactly=False)
    check_on_gpu(step, TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("queries", [1, 2, 16])
def test_every_length_of_window(queries, dtype):
    requests = [Request(700, queries, 1), Request(0, queries, 1), Request(90, queries, 1)]
    step = make_mla_step(requests, heads=8, latent_dim=512, pe_dim=64, dtype=dtype, seed=10)
    check_on_gpu(step, TOLERANCE[dtype])


@pytest.mark.gpu
def test_many_requests_of_unequal_length():
    """More tiles than programs, some of them cut, one far longer than all others."""
    lengths = torch.randint(0, 300, (150,), generator=torch.Generator().manual_seed(11)).tolist()
    requests = [Request(length, 5, 4 * (length % 7 > 0)) for length in [9000, *lengths]]
    step = make_mla_step(
        requests, heads=16, latent_dim=512, pe_dim=64, dtype=torch.bfloat16, seed=11
    )
    check_on_gpu(step, TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
def test_a_captured_graph_serves_other_lengths_and_is_repeatable():
    """One graph, replayed with other lengths; the same bits every time."""
    cuda = torch.device("cuda")
    step = make_mla_step([Request(1500, 5, 4)] * 3, heads=16, latent_dim=512, pe_dim=64,
                         dtype=torch.bfloat16, whole=True, seed=12)  # fmt: skip
    workspace = create_workspace(3, 5, 16, 512, 64, 2, cuda)
    given = arguments(step, cuda, cache=step.paged.kv_cache[:, 0])._replace(max_seq_len=8192)
    lens, output = given.requests.seq_lens, given.output

    def launch():
        mla_verify_attention_triton(given, workspace)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for lengths in ([1505, 1505, 1505], [5, 900, 64], [6, 5, 1000]):
        lens.copy_(torch.tensor(lengths))
        expected = torch.full(output.shape, float("nan"), dtype=torch.float64, device=cuda)
        mla_verify_attention_reference(given._replace(output=expected), torch.float64)
        seen = []
        for _ in range(20):
            output.fill_(float("nan"))
            graph.replay()
            seen.append(output[:15].clone())
        assert all(torch.equal(seen[0], other) for other in seen)
        error = (seen[0].double() - expected[:15]).norm() / expected[:15].norm()
        assert error < TOLERANCE[torch.bfloat16]
        assert not workspace.arrived.any()


def latent_window(device, dtype, fp8, *, layers=2, latent_dim=32, pe_dim=16):
    """(caches of NaN, rows, slots, scales) of a window whose fifth row is padding."""
    rng = torch.Generator().manual_seed(13)
    element = torch.uint8 if fp8 else dtype
    nan = 0x7F if fp8 else float("nan")
    width = latent_dim + pe_dim
    caches = [torch.full((4, 16, width), nan, dtype=element, device=device) for _ in range(layers)]
    # The rotary part is a view of a wider row, as in vLLM.
    rows = torch.randn(layers, 10, width + 40, generator=rng).to(dtype).to(device)
    if fp8 and INTERPRETED:
        rows = rows.float().clamp(-1, 1).mul(8).round().div(8).to(dtype)  # e4m3 holds them
    slots = torch.tensor([33, 3, 63, 17, -1, 0, 45, 20, 21, 60], device=device)
    scales = [torch.tensor([0.5], device=device) for _ in range(layers)] if fp8 else None
    sources = (
        [row[:, :latent_dim].contiguous().unsqueeze(1) for row in rows],
        [row[:, latent_dim:width].unsqueeze(1) for row in rows],
    )
    return caches, sources, slots, scales


def commit_latents(caches, sources, slots, scales, counts):
    """The production launch over caches seen as one head of latent and rotary part."""
    views = [cache.unsqueeze(1) for cache in caches]
    errors = torch.zeros(len(caches), dtype=torch.int32, device=slots.device)
    CommitPlan(views, scales, scales).commit_windows(
        StagedSources(*sources), CommitRows(slots, 5), counts, errors
    )
    assert not errors.any()


@pytest.mark.parametrize("fp8", [False, True])
def test_one_commit_writes_latents_and_rotary_parts(triton_device, fp8):
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    caches, sources, slots, scales = latent_window(triton_device, dtype, fp8)
    expected = [cache.clone() for cache in caches]
    counts = torch.tensor([3, 5], dtype=torch.int32, device=triton_device)
    commit_latents(caches, sources, slots, scales, counts)
    accepted = torch.tensor([True] * 3 + [False] * 2 + [True] * 5, device=triton_device)
    errors = torch.zeros(2, dtype=torch.int32, device=triton_device)
    commit_windows_reference(
        sources, LayerCaches([cache.unsqueeze(1) for cache in expected], scales, scales), slots,
        accepted, errors,
    )  # fmt: skip
    for ours, theirs in zip(caches, expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
def test_a_commit_leaves_what_vllms_write_leaves(vllm_cache_write, fp8):
    """Bit for bit, at 512 + 64; `vllm_cache_write` has loaded vLLM's library."""
    cuda = torch.device("cuda")
    dims = {"latent_dim": 512, "pe_dim": 64}
    caches, sources, slots, scales = latent_window(cuda, torch.bfloat16, fp8, **dims)
    expected = [cache.clone() for cache in caches]
    counts = torch.tensor([5, 5], dtype=torch.int32, device=cuda)
    commit_latents(caches, sources, slots, scales, counts)
    for number, cache in enumerate(expected):
        latent, key_pe = (part[number].squeeze(1) for part in sources)
        scale = scales[number] if scales else torch.ones(1, device=cuda)
        torch.ops._C_cache_ops.concat_and_cache_mla(
            latent, key_pe, cache, slots, "fp8" if fp8 else "auto", scale
        )
        assert torch.equal(caches[number].view(torch.uint8), cache.view(torch.uint8))
