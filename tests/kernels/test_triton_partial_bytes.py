"""The bytes that the byte model gives to partial results, against those that the kernel writes."""

import pytest
import torch
from attention_cases import Request, make_step, stage_step
from test_triton_verify_attention import run

pytest.importorskip("triton")
from nwor_kernels.verify_attention.division import MAX_PARTS
from nwor_kernels.verify_attention.kernel import Tuning, VerifyWorkspace
from nwor_kernels.verify_attention.partials import MAX_PARTS as MODELLED_MAX_PARTS
from nwor_kernels.verify_attention.partials import partial_bytes
from nwor_kernels.verify_attention.tuning import launch_shape

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
EVEN = [Request(90, 5, 4)] * 3
UNEVEN = [Request(130, 5, 4), Request(33, 5, 4), Request(50, 1, 0), Request(0, 5, 4)]


@pytest.mark.parametrize("requests", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize(
    ("programs", "min_tiles"),
    [(1, 2), (3, 1), (4, 2), (7, 1), (13, 2), (40, 1)],
)
def test_as_many_as_the_kernel_writes(triton_device, requests, programs, min_tiles):
    step = make_step(requests, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, seed=8)
    tuning = Tuning(block_n=16, programs=programs, min_tiles=min_tiles)
    shape = launch_shape(5, HEADS // KV_HEADS, HEAD_DIM, 4, triton_device, tuning)
    workspace = VerifyWorkspace.create(
        max_requests=len(requests),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_query_len=5,
        device=triton_device,
        programs=programs,
    )
    workspace.accumulators.fill_(float("nan"))
    run(step, stage_step(step, False), triton_device, tuning=tuning, workspace=workspace)
    tiles = workspace.accumulators.view(-1, shape.rows * shape.dim)
    written = int((~torch.isnan(tiles).all(dim=1)).sum())
    found = written * 4 * shape.rows * (shape.dim + 2)
    assert found == partial_bytes(
        [r.length for r in requests], [r.drafts for r in requests], KV_HEADS, shape, programs
    )
    assert found > 0 or programs in (1, 3, 7)  # those give every pair a program of its own


def test_both_know_the_same_most_parts():
    assert MODELLED_MAX_PARTS == MAX_PARTS
