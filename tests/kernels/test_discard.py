"""Partial results that were merged may be dropped from L2: no output may depend on what is left.

To the memory model a discard is a write of anything, so that a launch which writes NaN instead must
give the same bits, and shows in the interpreter too which lines are given up.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import Request, arguments, make_step, stage_step
from test_verify_attention import check, run, workspace_for
from torch import Tensor

pytest.importorskip("triton")
from nwor_kernels.verify_attention.kernel import VerifyWorkspace, verify_attention_triton
from nwor_kernels.verify_attention.tuning import (
    Discard,
    Tuning,
    can_discard,
    launch_shape,
)

UNEVEN = [Request(130, 5, 4), Request(33, 3, 2), Request(50, 1, 0), Request(0, 5, 4)]
SENTINEL = 12345.0
PARTS_KEPT: dict[str, Any] = {"discard": Discard.OFF}
"""A test that reads the workspace keeps it: what a GPU leaves of discarded lines is undefined."""


def leftovers(step, device, filled: float, whole=True, **tuning: Any) -> list[Tensor]:
    """(accumulators, sums, output) of a right launch in a workspace that was full of a number."""
    workspace = workspace_for(step, device, tuning["programs"])
    for tensor in (workspace.accumulators, workspace.sums):
        tensor.fill_(filled)
    shape = Tuning(block_n=16, min_tiles=1, **PARTS_KEPT | tuning)
    output = run(step, stage_step(step, whole), device, workspace=workspace, tuning=shape)
    assert not workspace.arrived.any()
    check(step, output)
    return [workspace.accumulators.cpu(), workspace.sums.cpu(), output]


@pytest.mark.parametrize(
    "programs", [7, *(pytest.param(n, marks=pytest.mark.long) for n in (4, 40))]
)
def test_exactly_what_was_merged_is_given_up(triton_device, programs):
    """4 programs cut pairs in two, 40 cut a pair into more parts than are merged at a time."""
    step = make_step(UNEVEN, heads=6, kv_heads=2, head_dim=40, seed=21)
    tuning = {"programs": programs, "whole_pairs": 0}
    *kept, kept_output = leftovers(step, triton_device, SENTINEL, **tuning)
    *poisoned, output = leftovers(step, triton_device, SENTINEL, discard=Discard.POISON, **tuning)
    assert torch.equal(output.nan_to_num(7.0), kept_output.nan_to_num(7.0))
    for before, after in zip(kept, poisoned, strict=True):
        written = before != SENTINEL
        assert written.any()
        assert not written.all()
        assert torch.equal(after.isnan(), written)
        assert (after[~written] == SENTINEL).all()


def test_padding_rows_are_not_left(triton_device):
    """The workspace is full of NaN in their places."""
    step = make_step(UNEVEN, heads=6, kv_heads=2, head_dim=40, seed=24)
    nan = float("nan")
    accumulators, sums, _ = leftovers(step, triton_device, nan, programs=7, whole_pairs=0)
    written = ~accumulators.view(14, 16, 64).isnan()
    assert torch.equal(written.any(dim=2), written.all(dim=2))  # whole rows
    rows_of = written.all(dim=2).sum(dim=1).tolist()
    assert set(rows_of) == {0, 9, 15}  # 3 and 5 queries of 3 heads
    assert torch.equal(~sums.view(14, 32).isnan().any(dim=1), torch.tensor(rows_of) > 0)


EVEN = [Request(90, 5, 4)] * 3
BATCHES = [pytest.param(EVEN, marks=pytest.mark.long, id="even"), pytest.param(UNEVEN, id="uneven")]


def bytes_left(device, requests, *, heads=4, kv_heads=2, head_dim=32, **tuning: Any) -> int:
    """Bytes of partial results that a launch leaves in a workspace that was full of NaN."""
    step = make_step(requests, heads=heads, kv_heads=kv_heads, head_dim=head_dim, seed=8)
    left = leftovers(step, device, float("nan"), False, **tuning)[:2]
    return sum(4 * int((~tensor.isnan()).sum()) for tensor in left)


@pytest.mark.parametrize("requests", BATCHES)
@pytest.mark.parametrize(
    "programs", [4, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3, 5))]
)
def test_whole_pairs_leave_nothing(triton_device, requests, programs):
    """Six pairs for fewer programs; as long as the longest program takes at most thrice as long."""
    tuning = {"programs": programs}
    assert bytes_left(triton_device, requests, **tuning, whole_pairs=200) == 0
    cut = bytes_left(triton_device, requests, **tuning, whole_pairs=0)
    assert cut > 0 or programs in (2, 3)
    assert bytes_left(triton_device, requests, **tuning, whole_pairs=1) in (0, cut)


def test_padding_rows_of_the_last_of_several_tiles(triton_device):
    """80 query rows in tiles of 64; the other request's 10 leave its second tile empty."""
    requests = [Request(70, 16, 15), Request(40, 2, 1)]
    shape = {"heads": 5, "kv_heads": 1, "head_dim": 256, "programs": 7, "whole_pairs": 0}
    assert launch_shape(16, 5, 256, 4, triton_device, Tuning(programs=7)).row_tiles == 2
    assert bytes_left(triton_device, requests, **shape) > 0


def test_a_workspace_that_shares_a_line_with_others_is_refused():
    cpu = torch.device("cpu")
    shape = replace(launch_shape(5, 3, 40, 4, cpu, Tuning(programs=3)), discard=Discard.L2)
    room = torch.empty(6 * shape.rows * shape.dim + 64)
    first = -room.data_ptr() % 128 // 4
    aligned, shifted = room[first:], room[first + 1 :]
    arrived = torch.zeros(8, dtype=torch.int32)
    VerifyWorkspace(aligned, aligned, arrived).check(shape, pairs=8)
    for name, tensors in (("sums", (aligned, shifted)), ("accumulators", (shifted, aligned))):
        with pytest.raises(ValueError, match=f"workspace.*{name}"):
            VerifyWorkspace(*tensors, arrived).check(shape, pairs=8)
    off = replace(shape, discard=Discard.OFF)
    VerifyWorkspace(shifted, shifted, arrived).check(off, pairs=8)


def test_nothing_is_discarded_if_there_is_no_such_instruction():
    cpu = torch.device("cpu")
    assert not can_discard(cpu)
    assert launch_shape(5, 3, 128, 2, cpu, Tuning(discard=Discard.L2)).discard is Discard.OFF
    assert launch_shape(5, 3, 128, 2, cpu, Tuning(discard=Discard.POISON)).discard is Discard.POISON
    assert launch_shape(5, 3, 128, 2, cpu).discard is Discard.OFF


LAYERS = 12


class Layers:
    """Launches of several layers, one after the other, with one workspace; each its own output."""

    def __init__(self, requests: int, drafts: int, tuning: Tuning):
        cuda = torch.device("cuda")
        queries = drafts + 1
        step = make_step(
            [Request(600 + 3 * n, queries, drafts) for n in range(requests)],
            heads=24, kv_heads=8, head_dim=128, dtype=torch.bfloat16, seed=23,
        )  # fmt: skip
        staged = stage_step(step, True)
        self.workspace = workspace_for(step, cuda)
        given = arguments(step, staged, cuda, cache=step.kv_cache)._replace(max_seq_len=8192)
        self.owned, query = step.owned_rows, given.query
        self._tuning = tuning
        # Every layer has other queries: what a layer finds of the one before would be seen.
        self._steps = [
            given._replace(query=query * (1 + layer / 4), output=torch.empty_like(query))
            for layer in range(LAYERS)
        ]
        self.outputs = [each.output for each in self._steps]

    def launch(self) -> None:
        for step in self._steps:
            verify_attention_triton(step, self.workspace, self._tuning)

    def results(self, launch) -> list[Tensor]:
        for output in self.outputs:
            output.fill_(float("nan"))
        launch()
        assert not self.workspace.arrived.any()
        return [output[: self.owned].clone() for output in self.outputs]


@pytest.mark.gpu
@pytest.mark.parametrize(("requests", "drafts"), [(3, 4), (8, 4), (40, 8)])
@pytest.mark.parametrize("discard", list(Discard))
def test_the_same_bits_again_and_again_in_a_captured_graph_too(discard, requests, drafts):
    """Layer follows layer in one workspace, so that a discard that came late would be seen."""
    if discard is Discard.L2 and not can_discard(torch.device("cuda")):
        pytest.skip("this GPU has no discard.L2")
    kept = Tuning(discard=Discard.OFF, whole_pairs=0)
    plain = Layers(requests, drafts, kept)
    wanted = plain.results(plain.launch)
    assert all(result.isfinite().all() for result in wanted)
    assert not any(torch.equal(one, other) for one, other in itertools.pairwise(wanted))
    layers = Layers(requests, drafts, replace(kept, discard=discard))
    for _ in range(20):
        assert all(map(torch.equal, layers.results(layers.launch), wanted))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers.launch()
    for _ in range(50):
        assert all(map(torch.equal, layers.results(graph.replay), wanted))
    if discard is Discard.POISON:
        assert layers.workspace.accumulators.isnan().any(), "no context was cut"
