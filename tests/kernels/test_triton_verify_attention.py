"""The verification kernel against attention by its definition, in float64.

Interpreted on the CPU, token by token over small shapes; on a GPU over the grid of shapes too, with
the varlen reference (itself held to the definition in test_attention_references.py) in float64.
"""

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
    check_rows,
    committed_only,
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
    fastest_tiling,
    pipeline,
    programs_on,
    row_tiling,
    tilings,
    tuning_of,
    unsupported_reason,
)

GRID_REQUESTS = [Request(300, 5, 4), Request(61, 5, 4), Request(7, 1, 0), Request(0, 5, 4)]


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


def check(step: Step, result: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """`check_rows` with the tolerance of a dtype."""
    check_rows(step, result, expected, TOLERANCE[dtype])


def pop_options(shape: dict) -> dict:
    """What a layer adds to plain attention, taken out of `shape`."""
    names = ("sliding_window", "softcap", "chunk", "sinks")
    return {name: shape.pop(name) for name in names if name in shape}


def verify(device, requests, dtype=torch.float32, whole=True, tuning=None, **shape):
    options = pop_options(shape)
    step = make_step(requests, dtype=dtype, **shape)
    result = run(step, stage_step(step, whole), device, tuning=tuning, **options)
    check(step, result, torch.from_numpy(attend_slowly(step, **options)), dtype)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("requests", [WINDOWS, MIXED])
def test_windows_and_mixed_batches(triton_device, requests, whole):
    verify(triton_device, requests, whole=whole, seed=1)


def test_staged_rows_may_be_fewer_than_the_drafts(triton_device):
    """Then committed tokens come after some of the queries, and those must not see them."""
    step = make_step([Request(20, 6, 5), Request(3, 4, 3)], seed=2)
    staged = stage_step(step, False)
    staged.start += 2
    result = run(step, staged, triton_device, tuning=Tuning(block_n=16))
    check(step, result, torch.from_numpy(attend_slowly(step)), torch.float32)


def test_requests_without_rows_are_left_alone_though_rows_are_staged_for_them(triton_device):
    """Padding of a captured shape that stages by copy: the rows there hold anything, NaN too."""
    real = [Request(37, 5, 4), Request(130, 5, 4)]
    step = make_step([*real, Request(0, 0, 0), Request(0, 0, 0)], seed=12)
    step.block_table[2:] = 10**6
    staged = stage_step(step, False)
    first = int(staged.start[0])
    staged.start[2:], staged.end[2:] = torch.tensor([first, 5]), torch.tensor([first + 4, 9])
    assert staged.key[5].isnan().all()
    for sliding_window in (-1, 20):
        options = {"sliding_window": sliding_window}
        result = run(step, staged, triton_device, tuning=Tuning(block_n=16), **options)
        expected = torch.from_numpy(attend_slowly(step, **options))
        check(step, result, expected, torch.float32)


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
    verify(triton_device, requests, tuning=tuning, heads=2, kv_heads=1, seed=3)


@pytest.mark.parametrize(
    ("name", "programs"),
    [
        *((name, 5) for name in ("sinks", "window and chunk", "all")),
        *(pytest.param(name, 1, marks=pytest.mark.long) for name in OPTIONS),
        pytest.param("chunk of 3", 5, marks=pytest.mark.long),
    ],
)
def test_what_layers_add(triton_device, name, programs):
    """5 programs cut contexts: a sink counts once in all their parts."""
    tuning = Tuning(block_n=16, programs=programs, min_tiles=1)
    options = for_heads(OPTIONS[name], 2)
    verify(triton_device, WINDOWS, heads=2, kv_heads=1, seed=18, tuning=tuning, **options)


@pytest.mark.parametrize("shape", [(3, 1), (4, 2)], ids=["length", "stride"])
def test_sinks_of_another_layout_are_refused(triton_device, shape):
    step = make_step(WINDOWS, seed=1)
    wrong = torch.ones(shape, device=triton_device)[:, 0]
    with pytest.raises(ValueError, match="sinks"):
        run(step, stage_step(step, True), triton_device, sinks=wrong)


@pytest.mark.parametrize("options", [{"sliding_window": 20}, {"chunk": 24}], ids=str)
def test_nothing_is_read_before_the_first_position_that_is_seen(triton_device, options):
    """Engines free those blocks: K/V are NaN there, and numbers of blocks lead nowhere."""
    requests = [Request(130, 5, 4), Request(47, 3, 2)]
    step = make_step(requests, heads=2, kv_heads=1, block_size=8, seed=20)
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
    expected = torch.from_numpy(attend_slowly(step, **options))
    result = run(
        step, staged, triton_device, cache=cache, tuning=Tuning(block_n=16, programs=5), **options
    )
    check(step, result, expected, torch.float32)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "dtype"),
    [
        (3, 1, 96, 32, torch.float32),
        (4, 4, 64, 16, torch.bfloat16),
        (8, 1, 64, 64, torch.float16),
        (7, 1, 32, 128, torch.bfloat16),
        (6, 1, 512, 16, torch.bfloat16),  # 24 query rows in tiles of 16
        pytest.param(2, 1, 384, 16, torch.float32, marks=pytest.mark.long),
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
        seed=6,
    )


UNEQUAL = [
    pytest.param(192, 128, 8, torch.float32, {}, id="MiMo full"),
    pytest.param(192, 128, 8, torch.bfloat16, {"sinks", "sliding_window"}, id="MiMo sliding"),
    pytest.param(64, 32, 3, torch.float16, {"sinks"}, id="smaller"),
    pytest.param(40, 96, 4, torch.float32, {"sliding_window"}, id="wider values"),
    pytest.param(32, 512, 2, torch.float16, {}, marks=pytest.mark.long, id="widest values"),
]
"""(head dim, value dim, query heads of a K/V head, dtype, what the layer adds)."""


@pytest.mark.parametrize("programs", [1, 5])
@pytest.mark.parametrize(("head_dim", "value_dim", "ratio", "dtype", "added"), UNEQUAL)
def test_values_of_another_width(triton_device, head_dim, value_dim, ratio, dtype, added, programs):
    """Whole pairs by one program, and contexts that 5 programs share."""
    if INTERPRETED and dtype is torch.bfloat16:
        dtype = torch.float16
    heads = 2 * ratio
    of_layer = {"sinks": torch.linspace(-3, 5, heads), "sliding_window": 20}
    options = {name: of_layer[name] for name in added}
    requests = [Request(70, 5, 4), Request(3, 4, 2), Request(0, 5, 4), Request(9, 1, 0)]
    shape = {"heads": heads, "kv_heads": 2, "head_dim": head_dim, "value_dim": value_dim}
    step = make_step(requests, dtype=dtype, seed=22 + programs, **shape)
    staged = stage_step(step, programs == 1)
    workspace = workspace_for(step, triton_device, programs)
    for tensor in (workspace.accumulators, workspace.sums):
        tensor.fill_(float("nan"))
    tuning = Tuning(block_n=16, programs=programs, min_tiles=1, discard=Discard.POISON)
    result = run(step, staged, triton_device, workspace=workspace, tuning=tuning, **options)
    check(step, result, torch.from_numpy(attend_slowly(step, **options)), dtype)
    assert not workspace.arrived.any()


def test_a_cache_with_heads_innermost(triton_device):
    step = make_step(WINDOWS, seed=7)
    staged = stage_step(step, True)
    tokens_first = committed_only(step, staged).to(triton_device).transpose(1, 2).contiguous()
    result = run(step, staged, triton_device, cache=tokens_first.transpose(1, 2))
    check(step, result, torch.from_numpy(attend_slowly(step)), torch.float32)


@pytest.mark.parametrize("ratio", [2, 12])
def test_the_longest_window_and_more_query_rows_than_a_tile_has(triton_device, ratio):
    requests = [Request(20, MAX_QUERY_LEN, MAX_QUERY_LEN - 1), Request(3, 2, 1)]
    head_dim = 256 if ratio == 12 else 16  # 192 query rows in tiles of 64
    shape = {"heads": ratio, "kv_heads": 1, "head_dim": head_dim, "seed": 8}
    verify(triton_device, requests, torch.float32, **shape)


def test_a_workspace_serves_launch_after_launch(triton_device):
    """The arrival counters must be at zero again, or the second launch merges too early."""
    requests = [Request(80, 5, 4), Request(50, 5, 4), Request(1, 5, 4)]
    workspace = workspace_for(make_step(requests, heads=2, kv_heads=1), triton_device, 5)
    workspace.accumulators.fill_(float("nan"))
    for seed in (9, 10, 11):
        step = make_step(requests, heads=2, kv_heads=1, seed=seed)
        tuning = Tuning(block_n=16, programs=5, discard=Discard.OFF)
        staged = stage_step(step, True)
        result = run(step, staged, triton_device, workspace=workspace, tuning=tuning)
        check(step, result, torch.from_numpy(attend_slowly(step)), torch.float32)
        assert not workspace.arrived.any()
    assert not workspace.accumulators.isnan().all(), "no context was cut"


def test_a_workspace_that_is_too_small_is_refused(triton_device):
    step = make_step(WINDOWS, seed=9)
    small = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "max_query_len": 5}
    for requests, programs in ((3, None), (4, 1)):
        workspace = VerifyWorkspace.create(
            max_requests=requests, device=triton_device, programs=programs, **small
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
    triton_device, per_head, fp8_query, head_dim, value_dim
):
    k, v = ([2**-7, 2**-8], [2**-6, 2**-7]) if per_head else ([2**-8], [2**-7])
    scales = Scales(torch.tensor([0.02]) if fp8_query else None, torch.tensor(k), torch.tensor(v))
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    step = make_step(WINDOWS, dtype=dtype, head_dim=head_dim, value_dim=value_dim, seed=13)
    rounded, _, _ = quantised_step(step, scales)
    if INTERPRETED:  # it rounds to e4m3 wrongly, so there is nothing left to round
        step.key, step.value = (
            [part.to(dtype) for part in parts] for parts in (rounded.key, rounded.value)
        )
    staged = stage_step(step, True)
    seen, query, _ = quantised_step(step, scales)
    cache = as_e4m3_cache(committed_only(step, staged), scales, head_dim)
    result = run(step, staged, triton_device, cache=cache, query=query, scales=scales)
    check(step, result, torch.from_numpy(attend_slowly(seen)), torch.bfloat16)


def check_on_gpu(requests, dtype, *, fp8=None, tuning=None, **shape):
    """A whole step against the varlen reference in float64, on the GPU."""
    options = pop_options(shape)
    step = make_step(requests, dtype=dtype, **shape)
    staged = stage_step(step, True)
    if fp8:
        scales = Scales(torch.tensor([0.02]), *(torch.rand(fp8) * 0.01 + 0.005 for _ in range(2)))
        options |= {
            "cache": as_e4m3_cache(committed_only(step, staged), scales, step.query.shape[2]),
            "query": quantised_step(step, scales)[1],
            "scales": scales,
        }
    expected = arguments(step, staged, dtype=torch.float64, **options)
    verify_attention_varlen_reference(expected, torch.float64)
    result = run(step, staged, torch.device("cuda"), tuning=tuning, **options)
    check(step, result, expected.output, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "ratio"),
    [(192, 128, 16), (192, 128, 8), (64, 32, 4), (128, 256, 8), (512, 64, 8)],
)
@pytest.mark.parametrize(
    ("dtype", "fp8"),
    [(torch.bfloat16, None), (torch.float16, None), (torch.float32, None), (torch.bfloat16, 1)],
)
def test_the_grid_of_values_of_another_width(dtype, fp8, head_dim, value_dim, ratio):
    """The launch's own shape, with what the binary takes of shared memory."""
    requests = [Request(900, 5, 4), Request(61, 5, 4), Request(7, 1, 0), Request(0, 5, 4)]
    shape = {"heads": 2 * ratio, "kv_heads": 2, "head_dim": head_dim, "value_dim": value_dim}
    added = {"sinks": torch.linspace(-3, 5, 2 * ratio), "sliding_window": 128}
    check_on_gpu(requests, dtype, fp8=fp8, seed=16, **shape)
    check_on_gpu(requests, dtype, fp8=fp8, seed=17, **shape, **added)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256, 512])
@pytest.mark.parametrize(
    ("block_size", "ratio"), [(16, 3), (32, 8), (64, 1), (128, 7), (16, 4), (64, 4), (16, 8)]
)
@pytest.mark.parametrize(
    ("dtype", "fp8"),
    [(torch.bfloat16, None), (torch.float16, None), (torch.float32, None), (torch.bfloat16, 1),
     (torch.float16, 2)],
)  # fmt: skip
def test_the_grid_of_shapes_and_dtypes(dtype, fp8, block_size, head_dim, ratio):
    shape = {"heads": 2 * ratio, "kv_heads": 2, "head_dim": head_dim, "block_size": block_size}
    check_on_gpu(GRID_REQUESTS, dtype, fp8=fp8, seed=16, **shape)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [None, 1])
@pytest.mark.parametrize("queries", [1, 2, 8, 16])
@pytest.mark.parametrize("ratio", [1, 4, 8])
def test_every_length_of_window(queries, ratio, fp8):
    requests = [Request(700, queries, 1), Request(0, queries, 1), Request(90, queries, 1)]
    shape = {"heads": 2 * ratio, "kv_heads": 2, "head_dim": 128}
    check_on_gpu(requests, torch.bfloat16, fp8=fp8, seed=17, **shape)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 257},
        {"softcap": 20.0},
        {"chunk": 256},
        *(for_heads(OPTIONS[name], 6) for name in ("sinks", "all")),
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("fp8", [None, 1])
def test_options_over_long_contexts(options, fp8):
    requests = [Request(length, 5, 4) for length in (3000, 17, 256, 1111)]
    shape = {"heads": 6, "kv_heads": 2, "head_dim": 128}
    check_on_gpu(requests, torch.bfloat16, fp8=fp8, seed=18, **shape, **options)


@pytest.mark.gpu
def test_many_requests_of_unequal_length():
    """More pairs than programs, some of them cut, one far longer than all others."""
    lengths = torch.randint(0, 300, (150,), generator=torch.Generator().manual_seed(19)).tolist()
    requests = [Request(length, 5, 4 * (length % 7 > 0)) for length in [9000, *lengths]]
    shape = {"heads": 6, "kv_heads": 2, "head_dim": 64}
    check_on_gpu(requests, torch.bfloat16, seed=19, **shape)


@pytest.mark.gpu
def test_a_captured_graph_serves_other_lengths_and_is_repeatable():
    """One graph, replayed with the lengths of another step; the same bits every time."""
    long = make_step([Request(1500, 5, 4)] * 3, dtype=torch.bfloat16, head_dim=64, seed=20)
    staged = stage_step(long, True)
    given = arguments(long, staged, "cuda", cache=long.kv_cache)._replace(max_seq_len=8192)
    lens, output = given.requests.seq_lens, given.output
    workspace = workspace_for(long, output.device)

    def launch():
        verify_attention_triton(given, workspace)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for lengths in ([1505, 1505, 1505], [5, 900, 64], [6, 5, 1000]):
        lens.copy_(torch.tensor(lengths))
        expected = torch.full_like(output, float("nan"), dtype=torch.float64)
        verify_attention_varlen_reference(given._replace(output=expected), torch.float64)
        seen = []
        for _ in range(50):
            output.fill_(float("nan"))
            graph.replay()
            seen.append(output.clone())
        assert all(torch.equal(seen[0][:15], other[:15]) for other in seen)
        error = (seen[0][:15].double() - expected[:15]).norm() / expected[:15].norm()
        assert error < TOLERANCE[torch.bfloat16]
        assert not workspace.arrived.any()


@pytest.mark.parametrize(
    ("rows", "dim", "cache_bytes", "kib", "chosen"),
    [
        (16, 64, 2, 227, (64, 3)),
        (16, 128, 2, 227, (32, 3)),
        (64, 256, 4, 227, (32, 2)),  # 3 stages took 232 KiB
        (16, 512, 2, 227, (32, 3)),
        (16, 512, 1, 227, (32, 3)),
        (16, 512, 4, 227, (32, 2)),
        (16, 512, 2, 99, (16, 2)),  # an sm_89's
        (16, 512, 4, 164, (16, 2)),  # an A100's: the least that there is
    ],
)
def test_steps_and_stages_fit_the_shared_memory(rows, dim, cache_bytes, kib, chosen):
    assert pipeline(rows, dim, cache_bytes, kib * 1024) == chosen


@pytest.mark.parametrize(
    ("rows", "dim", "pairs", "programs"),
    [
        (64, 128, None, 264),
        (64, 128, 64, 264),
        (64, 128, 32, 132),
        (16, 128, 32, 264),  # small parts are cheap to merge
        (64, 256, 64, 132),
    ],
)
def test_few_pairs_are_not_cut_into_many_parts(rows, dim, pairs, programs):
    assert programs_on(132, rows, dim, pairs) == programs


@pytest.mark.parametrize(
    ("ratio", "dim", "rows", "tiles"),
    [(3, 128, 16, 1), (4, 128, 64, 1), (8, 64, 64, 1), (16, 128, 128, 1), (8, 512, 16, 3)],
)
def test_query_rows_fill_a_matrix_instruction(ratio, dim, rows, tiles):
    assert row_tiling(5, ratio, dim) == (rows, tiles, dim)


def test_what_is_not_served_has_a_word():
    bf16, f32 = torch.bfloat16, torch.float32
    assert unsupported_reason(128, 5, bf16, bf16) is None
    assert unsupported_reason(128, 5, bf16, torch.uint8) is None
    assert unsupported_reason(512, 5, bf16, bf16) is None
    assert unsupported_reason(520, 5, bf16, bf16) == "head_dim_520"
    assert unsupported_reason(192, 5, bf16, bf16, 128) is None
    assert unsupported_reason(128, 5, bf16, bf16, 1024) == "head_dim_1024"
    assert unsupported_reason(128, 17, bf16, bf16) == "window_of_17_tokens"
    assert unsupported_reason(128, 5, torch.float64, torch.float64) == "dtype_float64"
    assert unsupported_reason(128, 5, bf16, f32) == "cache_dtype_float32"


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
    staged = stage_step(step, True)
    tuning = tuning_of(tiling, cache_bytes, triton_device, dim)
    result = run(
        step, staged, triton_device, tuning=tuning, workspace=workspace_for(step, triton_device)
    )
    check_rows(step, result, attend_slowly(step), TOLERANCE[torch.float32])


def test_the_table_for_steps_that_were_not_measured():
    """What won on an H200 (132 multiprocessors), of 8 K/V heads and of head dims 128 and 256."""
    for queries, cache_bytes, requests, head_dim, expected in (
        (5, 2, 8, 128, Tiling.USUAL),
        (5, 2, 64, 128, Tiling.FOUR_PROGRAMS),
        (5, 1, 256, 128, Tiling.FOUR_PROGRAMS),
        (5, 2, 64, 256, Tiling.USUAL),
        (9, 2, 64, 128, Tiling.USUAL),
        (9, 1, 8, 128, Tiling.ROWS_32),
    ):
        found = fastest_tiling(queries, 3, head_dim, cache_bytes, requests * 8, 132)
        assert found is expected, (queries, cache_bytes, requests, head_dim)
    assert fastest_tiling(5, 8, 128, 1, 512, 132) is Tiling.USUAL
