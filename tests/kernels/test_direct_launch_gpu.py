"""What kernels write that the real driver launched directly, eagerly and in a CUDA graph."""

import random
from typing import Any

import pytest
import torch
from kernel_inputs import assert_same

pytest.importorskip("triton")
from window_cases import WindowShape, make_windows

from nwor_kernels import direct_launch, launch
from nwor_kernels.commit.plan import CommitPlan, StagedSources
from nwor_kernels.direct_launch import refusals
from nwor_kernels.mask.kernel import bind_mask
from nwor_kernels.mask.reference import acceptance_mask_from_counts_reference

pytestmark = pytest.mark.gpu


@pytest.fixture
def driver_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each direct launch from now on; refusals start at none."""
    calls: list[int] = []
    original = direct_launch.prepare

    def counted(*arguments: Any) -> Any:
        by_driver = original(*arguments)

        def run(address: int, number: int) -> None:
            calls.append(number)
            by_driver(address, number)

        return run

    monkeypatch.setattr(launch, "prepare", counted)
    refusals.clear()
    return calls


def capture(run: Any, counts: torch.Tensor) -> torch.cuda.CUDAGraph:
    """A graph of one launch with these counts, whatever they hold when it is replayed."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run(counts)
    return graph


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("layers", "groups"), [(1, 0), (28, 0), (28, 7)])
def test_a_commit_launched_directly_equals_the_reference(driver_calls, captured, layers, groups):
    shape = WindowShape(5, 4, layers=layers, widths=(64, 64), dtype=torch.bfloat16, groups=groups)
    for seed in random.sample(range(2**32), 3):
        expected, actual = make_windows(shape, seed, "cpu"), make_windows(shape, seed, "cuda")
        sources = StagedSources(actual.keys, actual.values)
        run = CommitPlan(actual.kv_caches, slot_rows=actual.slot_rows).bind(
            sources,
            actual.slots,
            actual.errors,
            certain=0,
            tokens_per_request=shape.tokens,
            written=actual.written,
        )
        nothing = torch.zeros_like(actual.num_sampled)
        run(nothing)  # through Triton, and commits nothing
        assert actual.memory.isnan().all()
        if captured:
            given = torch.zeros_like(actual.num_sampled)
            graph = capture(run, given)
            given.copy_(actual.num_sampled)
            graph.replay()
        else:
            run(actual.num_sampled)
        expected.commit_by_reference()
        assert_same(actual.memory.cpu(), expected.memory)
        assert_same(actual.errors.cpu(), expected.errors)
        assert_same(actual.written.cpu(), expected.written)
    assert driver_calls == [shape.requests] * 3
    assert not refusals


@pytest.mark.parametrize("captured", [False, True])
def test_a_mask_launched_directly_equals_the_reference(driver_calls, captured):
    most, drafts = 9, 5
    for requests in (1, 6, most):
        mask = torch.empty(most * drafts, dtype=torch.bool, device="cuda")
        num_accepted = torch.empty(most, dtype=torch.int32, device="cuda")
        run = bind_mask(mask, num_accepted, drafts)
        given = torch.zeros(requests, dtype=torch.int32, device="cuda")
        run(given)  # through Triton
        graph = capture(run, given) if captured else None
        for _ in range(3):
            counts = torch.randint(0, drafts + 2, (requests,), dtype=torch.int32)
            mask.fill_(True)
            num_accepted.fill_(-7)
            given.copy_(counts)
            run(given) if graph is None else graph.replay()
            wanted = torch.full((requests * drafts,), True), torch.full((requests,), -7).int()
            acceptance_mask_from_counts_reference(counts, None, *wanted, drafts)
            assert mask[: requests * drafts].tolist() == wanted[0].tolist()
            assert num_accepted[:requests].tolist() == wanted[1].tolist()
            assert (num_accepted[requests:] == -7).all()
    assert len(driver_calls) == (3 if captured else 9)
    assert not refusals


def test_a_direct_launch_runs_on_the_current_stream(driver_calls):
    """Behind a long wait on that stream it has not run when the default stream is empty."""
    mask = torch.empty(4, dtype=torch.bool, device="cuda")
    num_accepted = torch.zeros(2, dtype=torch.int32, device="cuda")
    run = bind_mask(mask, num_accepted, 2)
    counts = torch.tensor([3, 2], dtype=torch.int32, device="cuda")
    run(counts)
    num_accepted.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        run(counts)
    assert num_accepted.tolist() == [0, 0]
    assert not stream.query()
    stream.synchronize()
    assert num_accepted.tolist() == [2, 1]
    assert len(driver_calls) == 1
