"""The bytes that the byte model gives to partial results, against those that the kernel writes."""

from dataclasses import replace

import pytest
from attention_cases import Request, make_step, stage_step
from test_triton_verify_attention import run

pytest.importorskip("triton")
from nwor_kernels.verify_attention.division import MAX_PARTS
from nwor_kernels.verify_attention.kernel import Tuning, VerifyWorkspace
from nwor_kernels.verify_attention.partials import MAX_PARTS as MODELLED_MAX_PARTS
from nwor_kernels.verify_attention.partials import busy_programs, partial_bytes
from nwor_kernels.verify_attention.tuning import launch_shape

EVEN = [Request(90, 5, 4)] * 3
UNEVEN = [Request(130, 5, 4), Request(33, 3, 2), Request(50, 1, 0), Request(0, 5, 4)]


def check_bytes(device, requests, tuning, *, heads=4, kv_heads=2, head_dim=32) -> int:
    """Bytes of the workspace that a launch overwrites, held to the model."""
    step = make_step(requests, heads=heads, kv_heads=kv_heads, head_dim=head_dim, seed=8)
    queries, ratio = max(request.queries for request in requests), heads // kv_heads
    shape = launch_shape(queries, ratio, head_dim, 4, device, tuning)
    workspace = VerifyWorkspace.create(
        max_requests=len(requests), num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        max_query_len=queries, device=device, programs=tuning.programs,
    )  # fmt: skip
    for left in (workspace.accumulators, workspace.sums):
        left.fill_(float("nan"))
    run(step, stage_step(step, False), device, tuning=tuning, workspace=workspace)
    found = sum(4 * int((~t.isnan()).sum()) for t in (workspace.accumulators, workspace.sums))
    rows = [request.queries * ratio for request in requests]
    assert found == partial_bytes(
        [r.length for r in requests], [r.drafts for r in requests], rows, kv_heads, shape,
        shape.programs,
    )  # fmt: skip
    return found


@pytest.mark.parametrize("requests", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize(
    ("programs", "min_tiles"),
    [
        (4, 2),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in ((1, 2), (3, 1), (7, 1), (13, 2))
        ),
        pytest.param(40, 1, marks=pytest.mark.long),
    ],
)
def test_as_many_as_the_kernel_writes(triton_device, requests, programs, min_tiles):
    tuning = Tuning(
        block_n=16, programs=programs, min_tiles=min_tiles, skip_padding=False, whole_pairs=0
    )
    found = check_bytes(triton_device, requests, tuning)
    assert found > 0 or programs in (1, 3, 7)  # those give every pair a program of its own
    less = check_bytes(triton_device, requests, replace(tuning, skip_padding=True))
    assert less < found or found == 0


@pytest.mark.parametrize("requests", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize(
    "programs", [4, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3, 5))]
)
def test_whole_pairs_leave_nothing(triton_device, requests, programs):
    """Six pairs for fewer programs; as long as the longest program takes at most thrice as long."""
    tuning = Tuning(block_n=16, programs=programs, min_tiles=1, skip_padding=False, whole_pairs=200)
    assert check_bytes(triton_device, requests, tuning) == 0
    cut = check_bytes(triton_device, requests, replace(tuning, whole_pairs=0))
    assert cut > 0 or programs in (2, 3)
    assert check_bytes(triton_device, requests, replace(tuning, whole_pairs=1)) in (0, cut)


def test_padding_rows_of_the_last_of_several_tiles(triton_device):
    """80 query rows in tiles of 64; the other request's 10 leave its second tile empty."""
    requests = [Request(70, 16, 15), Request(40, 2, 1)]
    shape = {"heads": 5, "kv_heads": 1, "head_dim": 256}
    tuning = Tuning(block_n=16, programs=7, min_tiles=1, skip_padding=False, whole_pairs=0)
    assert launch_shape(16, 5, 256, 4, triton_device, tuning).row_tiles == 2
    found = check_bytes(triton_device, requests, tuning, **shape)
    assert check_bytes(triton_device, requests, replace(tuning, skip_padding=True), **shape) < found


def test_every_request_has_its_query_rows(triton_device):
    shape = launch_shape(5, 2, 32, 4, triton_device, Tuning(programs=4))
    with pytest.raises(ValueError, match=r"zip\(\)"):
        partial_bytes([90, 90], [4, 4], [10], 2, shape, 4)


@pytest.mark.parametrize(
    ("programs", "whole_pairs", "busy"),
    [
        (4, 200, 3),  # whole pairs: two each for three programs, the fourth has none
        (4, 0, 4),  # cut: 6 pairs of 6 steps, 9 a program
        (5, 0, 5),  # 8 a program: the last has 4
        (7, 0, 6),  # as many programs as pairs, and one left over
        (13, 0, 12),  # two programs a pair
    ],
)
def test_programs_without_a_step(triton_device, programs, whole_pairs, busy):
    """Three requests of 80 tokens and 4 drafts, two K/V heads, steps of 16: 6 pairs of 6 steps."""
    tuning = Tuning(block_n=16, programs=programs, min_tiles=1, whole_pairs=whole_pairs)
    shape = launch_shape(5, 2, 32, 4, triton_device, tuning)
    assert busy_programs([84] * 3, [4] * 3, 2, shape, programs) == busy


def test_both_know_the_same_most_parts():
    assert MODELLED_MAX_PARTS == MAX_PARTS
