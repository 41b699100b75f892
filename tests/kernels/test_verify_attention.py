"""Attention of windows, by reference and in Triton: against its definition in float64.

Interpreted over small shapes; on a GPU over the grid of shapes too, with the reference in float64.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from attention_cases import (
    MIXED,
    OPTIONS,
    TOLERANCE,
    WINDOWS,
    Request,
    Staged,
    Step,
    arguments,
    as_e4m3_cache,
    attend_slowly,
    check_replays,
    check_rows,
    committed_only,
    exact_in_e4m3,
    for_heads,
    longest,
    make_step,
    quantised_step,
    stage_step,
)
from kernel_inputs import INTERPRETED
from torch import Tensor

pytest.importorskip("triton")
from nwor_kernels.attention_step import Scales
from nwor_kernels.limits import MAX_QUERY_LEN
from nwor_kernels.verify_attention.kernel import VerifyWorkspace, verify_attention_triton
from nwor_kernels.verify_attention.reference import verify_attention_varlen_reference
from nwor_kernels.verify_attention.tuning import (
    Discard,
    Tiling,
    Tuning,
    tilings,
    tuning_of,
)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
HALF = F16 if INTERPRETED else BF16
"""The interpreter multiplies bfloat16 as if it were integers."""


def workspace_for(step: Step, device: torch.device, programs: int | None = None) -> VerifyWorkspace:
    """Room for launches of steps like this one."""
    heads, head_dim = step.query.shape[1:]
    return VerifyWorkspace.create(
        max_requests=len(step.seq_lens), num_heads=heads, num_kv_heads=step.kv_cache.shape[1],
        head_dim=head_dim, value_dim=step.value[0].shape[2], max_query_len=longest(step),
        device=device, programs=programs,
    )  # fmt: skip


def run(
    step: Step,
    staged: Staged,
    device: torch.device,
    *,
    tuning: Tuning | None = None,
    workspace: VerifyWorkspace | None = None,
    **how: Any,
) -> Tensor:
    """The kernel's output, NaN where nothing was written; `how` as in `arguments`."""
    given = arguments(step, staged, device, **how)
    workspace = workspace or workspace_for(step, device, tuning and tuning.programs)
    verify_attention_triton(given, workspace, tuning)
    return given.output.cpu()


def check(step: Step, result: Tensor, dtype: torch.dtype = F32, **options: Any) -> None:
    """Rows of windows are attention by its definition, within a dtype's tolerance."""
    expected = attend_slowly(step, **options)
    check_rows(step, result, expected, 1e-6 if dtype is F64 else TOLERANCE[dtype])


def verify(
    on_triton, step, staged=None, *, tuning=None, how=None, dtype=None, seen=None, **options
):
    """Attend by either; `how` is as in `arguments`, `seen` the step that attention should see."""
    staged = staged or stage_step(step, True)
    if on_triton:
        result = run(step, staged, on_triton, tuning=tuning, **(how or {}), **options)
        dtype = dtype or step.key[0].dtype
    else:
        given = arguments(step, staged, dtype=F64, **(how or {}), **options)
        verify_attention_varlen_reference(given)
        result, dtype = given.output, F64
    check(seen or step, result, dtype, **options)


CHUNK_BESIDE = [Request(40, 3, 2), Request(9, 21, 20), Request(0, 18, 17), Request(30, 2, 1)]
"""Prefill chunks whose rows are all staged stand beside windows."""


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("requests", [WINDOWS, MIXED], ids=["windows", "mixed"])
def test_windows_and_mixed_batches(on_triton, requests, whole):
    step = make_step(requests, heads=2, kv_heads=1, seed=1)
    verify(on_triton, step, stage_step(step, whole))


@pytest.mark.parametrize("whole", [True, False])
def test_staged_chunks_beside_windows(whole):
    step = make_step(CHUNK_BESIDE, seed=1)
    verify(None, step, stage_step(step, whole))


@pytest.mark.parametrize("sliding_window", [6, 7, 64])
@pytest.mark.parametrize("whole", [True, False])
def test_sliding_windows(whole, sliding_window):
    step = make_step(WINDOWS, seed=3)
    verify(None, step, stage_step(step, whole), sliding_window=sliding_window)


def test_staged_rows_may_be_fewer_than_the_drafts(triton_device):
    """Then committed tokens come after some of the queries, and those must not see them."""
    step = make_step([Request(20, 6, 5), Request(3, 4, 3)], seed=2)
    staged = stage_step(step, False)
    staged.start += 2
    verify(triton_device, step, staged, tuning=Tuning(block_n=16))


@pytest.mark.parametrize("sliding_window", [-1, 20])
def test_requests_without_rows_are_left_alone_though_rows_are_staged_for_them(
    triton_device, sliding_window
):
    """Padding of a captured shape that stages by copy: the rows there hold anything, NaN too."""
    real = [Request(37, 3, 2), Request(80, 3, 2)]
    step = make_step([*real, Request(0, 0, 0), Request(0, 0, 0)], heads=2, kv_heads=1, seed=12)
    step.block_table[2:] = 10**6
    staged = stage_step(step, False)
    first = int(staged.start[0])
    staged.start[2:], staged.end[2:] = torch.tensor([first, 3]), torch.tensor([first + 2, 5])
    assert staged.key[3].isnan().all()
    verify(triton_device, step, staged, tuning=Tuning(block_n=16), sliding_window=sliding_window)


@pytest.mark.parametrize(
    ("programs", "min_tiles", "whole_pairs"),
    [
        (2, 1, 0),
        (2, 1, 200),
        *(
            pytest.param(n, tiles, 0, marks=pytest.mark.long)
            for n, tiles in ((1, 2), (5, 1), (40, 2))
        ),
    ],
)
def test_contexts_are_cut_anywhere(triton_device, programs, min_tiles, whole_pairs):
    """2 programs cut wherever it comes or between pairs, 5 and 40 give each pair its own."""
    requests = [Request(130, 5, 4), Request(33, 5, 4), Request(50, 1, 0), Request(0, 5, 4)]
    tuning = Tuning(block_n=16, programs=programs, min_tiles=min_tiles, whole_pairs=whole_pairs)
    verify(triton_device, make_step(requests, heads=2, kv_heads=1, seed=3), tuning=tuning)


@pytest.mark.parametrize(
    ("name", "programs"),
    [
        *((name, 5) for name in ("sinks", "window and chunk", "all")),
        *(pytest.param(name, 1, marks=pytest.mark.long) for name in OPTIONS),
        pytest.param("chunk of 3", 5, marks=pytest.mark.long),
    ],
)
def test_what_layers_add(on_triton, name, programs):
    """5 programs cut contexts: a sink counts once in all their parts."""
    tuning = Tuning(block_n=16, programs=programs, min_tiles=1)
    step = make_step(WINDOWS, heads=2, kv_heads=1, seed=18)
    verify(on_triton, step, tuning=tuning, **for_heads(OPTIONS[name], 2))


@pytest.mark.parametrize("shape", [(3, 1), (4, 2)], ids=["length", "stride"])
def test_sinks_of_another_layout_are_refused(triton_device, shape):
    step = make_step(WINDOWS, seed=1)
    wrong = torch.ones(shape, device=triton_device)[:, 0]
    with pytest.raises(ValueError, match="sinks"):
        run(step, stage_step(step, True), triton_device, sinks=wrong)


@pytest.mark.parametrize("options", [{"sliding_window": 20}, {"chunk": 24}], ids=str)
def test_nothing_is_read_before_the_first_position_that_is_seen(triton_device, options):
    """Engines free those blocks: K/V are NaN there, and numbers of blocks lead nowhere."""
    step = make_step(
        [Request(130, 5, 4), Request(47, 3, 2)], heads=2, kv_heads=1, block_size=8, seed=20
    )
    staged = stage_step(step, True)
    cache = committed_only(step, staged)
    for r, request in enumerate(step.requests):
        first = request.cached - options.get("sliding_window", 0) + 1
        if "chunk" in options:
            first = request.cached // 24 * 24
        assert first > 0
        for position in range(first):
            block, offset = step.slot(r, position)
            cache[block, :, offset] = float("nan")
        step.block_table[r, : first // 8] = 10**6
    tuning = Tuning(block_n=16, programs=5)
    verify(triton_device, step, staged, tuning=tuning, how={"cache": cache}, **options)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "dtype"),
    [
        (3, 1, 96, 32, F32),
        (4, 4, 64, 16, HALF),
        (8, 1, 64, 64, F16),
        (7, 1, 32, 128, HALF),
        (6, 1, 512, 16, HALF),  # 24 query rows in tiles of 16
        pytest.param(2, 1, 384, 16, F32, marks=pytest.mark.long),
    ],
)
def test_shapes(triton_device, heads, kv_heads, head_dim, block_size, dtype):
    step = make_step(
        [Request(40, 4, 3), Request(3, 4, 3)], heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        block_size=block_size, dtype=dtype, seed=6,
    )  # fmt: skip
    verify(triton_device, step)


@pytest.mark.parametrize("programs", [1, pytest.param(5, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "ratio", "dtype", "added"),
    [
        pytest.param(192, 128, 8, F32, {}, marks=pytest.mark.long, id="MiMo full"),
        pytest.param(192, 128, 8, HALF, {"sinks", "sliding_window"}, id="MiMo sliding"),
        pytest.param(64, 32, 3, F16, {"sinks"}, id="smaller"),
        pytest.param(40, 96, 4, F32, {"sliding_window"}, id="wider values"),
        pytest.param(32, 512, 2, F16, {}, marks=pytest.mark.long, id="widest values"),
    ],
)
def test_values_of_another_width(triton_device, head_dim, value_dim, ratio, dtype, added, programs):
    """Whole pairs by one program, and contexts that 5 programs share."""
    heads = 2 * ratio
    of_layer = {"sinks": torch.linspace(-3, 5, heads), "sliding_window": 20}
    options = {name: of_layer[name] for name in added}
    step = make_step(
        [Request(70, 5, 4), Request(3, 4, 2), Request(0, 5, 4), Request(9, 1, 0)],
        heads=heads, kv_heads=2, head_dim=head_dim, value_dim=value_dim, dtype=dtype,
        seed=22 + programs,
    )  # fmt: skip
    workspace = workspace_for(step, triton_device, programs)
    for tensor in (workspace.accumulators, workspace.sums):
        tensor.fill_(float("nan"))
    tuning = Tuning(block_n=16, programs=programs, min_tiles=1, discard=Discard.POISON)
    how = {"workspace": workspace}
    verify(triton_device, step, stage_step(step, programs == 1), tuning=tuning, how=how, **options)
    assert not workspace.arrived.any()


def test_a_cache_with_heads_innermost(triton_device):
    step = make_step(WINDOWS, seed=7)
    staged = stage_step(step, True)
    tokens_first = committed_only(step, staged).to(triton_device).transpose(1, 2).contiguous()
    verify(triton_device, step, staged, how={"cache": tokens_first.transpose(1, 2)})


@pytest.mark.parametrize("ratio", [2, 12])
def test_the_longest_window_and_more_query_rows_than_a_tile_has(triton_device, ratio):
    requests = [Request(20, MAX_QUERY_LEN, MAX_QUERY_LEN - 1), Request(3, 2, 1)]
    head_dim = 256 if ratio == 12 else 16  # 192 query rows in tiles of 64
    step = make_step(requests, heads=ratio, kv_heads=1, head_dim=head_dim, seed=8)
    verify(triton_device, step)


def test_a_workspace_serves_launch_after_launch(triton_device):
    """The arrival counters must be at zero again, or the second launch merges too early."""
    requests = [Request(80, 5, 4), Request(50, 5, 4), Request(1, 5, 4)]
    workspace = workspace_for(make_step(requests, heads=2, kv_heads=1), triton_device, 5)
    workspace.accumulators.fill_(float("nan"))
    tuning = Tuning(block_n=16, programs=5, discard=Discard.OFF)
    for seed in (9, 10):
        step = make_step(requests, heads=2, kv_heads=1, seed=seed)
        verify(triton_device, step, tuning=tuning, how={"workspace": workspace})
        assert not workspace.arrived.any()
    assert not workspace.accumulators.isnan().all(), "no context was cut"


def test_a_workspace_that_is_too_small_is_refused(triton_device):
    step = make_step(WINDOWS, seed=9)
    for requests, programs in ((3, None), (4, 1)):
        workspace = workspace_for(
            replace(step, seq_lens=step.seq_lens[:requests]), triton_device, programs
        )
        with pytest.raises(ValueError, match="workspace"):
            run(step, stage_step(step, True), triton_device, workspace=workspace)


@pytest.mark.parametrize(
    ("per_head", "fp8_query", "head_dim", "value_dim"),
    [
        (True, True, 96, 96),
        (False, False, 192, 128),
        (False, False, 32, 64),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in ((False, False, 96, 96), (False, True, 32, 32), (True, False, 32, 32))
        ),
    ],
)
def test_fp8_cache_sees_staged_tokens_as_if_written(
    on_triton, per_head, fp8_query, head_dim, value_dim
):
    k, v = ([2**-7, 2**-8], [2**-6, 2**-7]) if per_head else ([2**-8], [2**-7])
    scales = Scales(torch.tensor([0.02]) if fp8_query else None, torch.tensor(k), torch.tensor(v))
    step = make_step(WINDOWS, dtype=HALF, head_dim=head_dim, value_dim=value_dim, seed=13)
    if INTERPRETED:
        exact_in_e4m3(step, scales)
    staged = stage_step(step, True)
    seen, query, _ = quantised_step(step, scales)
    cache = as_e4m3_cache(committed_only(step, staged), scales, head_dim)
    how = {"cache": cache, "query": query, "scales": scales}
    verify(on_triton, step, staged, how=how, dtype=BF16, seen=seen)


def on_gpu():
    """(requests, dtype, heads of fp8 scales, shape, what the layer adds) of a GPU's grids."""
    grid = [Request(300, 5, 4), Request(61, 5, 4), Request(7, 1, 0), Request(0, 5, 4)]
    dtypes = [(BF16, None), (F16, None), (F32, None), (BF16, 1), (F16, 2)]
    sizes = [(16, 3), (32, 8), (64, 1), (128, 7), (16, 4), (64, 4), (16, 8)]
    for dtype, head_dim, (block_size, ratio) in product(dtypes, (64, 96, 128, 256, 512), sizes):
        yield grid, *dtype, {"heads": 2 * ratio, "head_dim": head_dim, "block_size": block_size}, {}
    # Values of another width: the launch's own shape, with what the binary takes of shared memory.
    longer = [Request(900, 5, 4), *grid[1:]]
    widths = [(192, 128, 16), (192, 128, 8), (64, 32, 4), (128, 256, 8), (512, 64, 8)]
    for dtype, (head_dim, value_dim, ratio) in product(dtypes[:4], widths):
        shape = {"heads": 2 * ratio, "head_dim": head_dim, "value_dim": value_dim}
        for added in ({}, {"sinks": torch.linspace(-3, 5, 2 * ratio), "sliding_window": 128}):
            yield longer, *dtype, shape, added
    for fp8, queries, ratio in product((None, 1), (1, 2, 8, 16), (1, 4, 8)):
        windows = [Request(length, queries, 1) for length in (700, 0, 90)]
        yield windows, BF16, fp8, {"heads": 2 * ratio, "head_dim": 128}, {}
    contexts = [Request(length, 5, 4) for length in (3000, 17, 256, 1111)]
    options = [{"sliding_window": 257}, {"softcap": 20.0}, {"chunk": 256}]
    options += [for_heads(OPTIONS[name], 6) for name in ("sinks", "all")]
    for fp8, added in product((None, 1), options):
        yield contexts, BF16, fp8, {"heads": 6, "head_dim": 128}, added
    # More pairs than programs, some of them cut, one far longer than all others.
    lengths = torch.randint(0, 300, (150,), generator=torch.Generator().manual_seed(19)).tolist()
    many = [Request(length, 5, 4 * (length % 7 > 0)) for length in [9000, *lengths]]
    yield many, BF16, None, {"heads": 6, "head_dim": 64}, {}


def shown(value: Any) -> str:
    """A part of a case's name."""
    if isinstance(value, dict):
        return (
            " ".join(f"{k} {v}" if isinstance(v, int) else k for k, v in value.items()) or "plain"
        )
    return f"{len(value)} requests" if isinstance(value, list) else str(value)


@pytest.mark.gpu
@pytest.mark.parametrize(("requests", "dtype", "fp8", "shape", "options"), on_gpu(), ids=shown)
def test_against_the_reference_on_a_gpu(requests, dtype, fp8, shape, options):
    step = make_step(requests, dtype=dtype, kv_heads=2, seed=16, **shape)
    staged = stage_step(step, True)
    if fp8:
        scales = Scales(torch.tensor([0.02]), *(torch.rand(fp8) * 0.01 + 0.005 for _ in range(2)))
        options = options | {
            "cache": as_e4m3_cache(committed_only(step, staged), scales, step.query.shape[2]),
            "query": quantised_step(step, scales)[1],
            "scales": scales,
        }
    expected = arguments(step, staged, dtype=F64, **options)
    verify_attention_varlen_reference(expected, F64)
    result = run(step, staged, torch.device("cuda"), **options)
    check_rows(step, result, expected.output, TOLERANCE[dtype])


@pytest.mark.gpu
def test_a_captured_graph_serves_other_lengths_and_is_repeatable():
    """One graph, replayed with the lengths of another step; the same bits every time."""
    long = make_step([Request(1500, 5, 4)] * 3, dtype=BF16, head_dim=64, seed=20)
    staged = stage_step(long, True)
    given = arguments(long, staged, "cuda", cache=long.kv_cache)._replace(max_seq_len=8192)
    workspace = workspace_for(long, given.output.device)
    check_replays(verify_attention_triton, verify_attention_varlen_reference, given, workspace)


@pytest.mark.parametrize(
    ("queries", "cache_bytes", "tiling", "dim"),
    [
        (5, 2, Tiling.FOUR_PROGRAMS, 64),
        (5, 1, Tiling.FOUR_PROGRAMS, 64),
        (9, 1, Tiling.ROWS_32, 64),
        (9, 2, Tiling.ROWS_32, 256),
    ],
)
def test_each_tiling_fits_the_workspace_and_is_right(
    queries, cache_bytes, tiling, dim, triton_device
):
    assert tilings(queries, 3, dim) == (Tiling.USUAL, tiling)
    windows = [Request(c, queries, queries - 1) for c in (37, 0, 130)]
    step = make_step(windows, heads=6, kv_heads=2, head_dim=dim, seed=queries)
    how = {"workspace": workspace_for(step, triton_device)}
    verify(triton_device, step, tuning=tuning_of(tiling, cache_bytes, triton_device, dim), how=how)
