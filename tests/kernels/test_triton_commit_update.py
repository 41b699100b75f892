"""A commit with vLLM's update in one launch: both leave what two launches leave."""

from inspect import signature
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import SEEDS, assert_same, generator
from torch import Tensor

pytest.importorskip("triton")

from vllm_update import stock_update
from window_cases import WindowShape, make_windows

from nwor_kernels.commit.plan import CommitPlan, CommitRows, StagedSources
from nwor_kernels.commit.with_update import DRAFT_ARGUMENTS, UPDATE_ARGUMENTS, RequestStates

MAX_REQUESTS, LENGTH, VOCABULARY = 9, 24, 7


class Requests:
    """A runner's requests, and one step of some of them; equal seeds give equal ones."""

    def __init__(self, seed: int, requests: int, tokens: int, counted: bool, device: Any):
        rng = generator(seed)
        random = lambda high, *shape: torch.randint(0, high, shape, generator=rng)  # noqa: E731
        self.num_sampled = random(tokens + 1, requests).int().to(device)
        rejected = tokens - self.num_sampled.cpu() - random(2, requests)
        self.num_rejected = rejected.clamp(min=0).int().to(device)
        chosen = torch.randperm(MAX_REQUESTS, generator=rng)[:requests]
        chosen[torch.rand(requests, generator=rng) < 0.2] = -1
        self.idx_mapping = chosen.to(device)
        self.sampled_tokens = random(VOCABULARY, requests, tokens).to(device)
        lengths = torch.cat((torch.zeros(1, dtype=torch.int64), random(tokens + 1, requests)))
        self.query_start_loc = lengths.cumsum(0).int().to(device)
        bins = random(50, MAX_REQUESTS, VOCABULARY).int().to(device) if counted else None
        self.states = RequestStates(
            random(100, MAX_REQUESTS).int().to(device),
            random(VOCABULARY, MAX_REQUESTS, 1).to(device),
            bins,
            random(VOCABULARY, MAX_REQUESTS, LENGTH).int().to(device),
            random(LENGTH - tokens, MAX_REQUESTS).int().to(device),
            tokens,
        )

    def step(self) -> tuple[Tensor, ...]:
        """What every step brings, in the order of the launch."""
        return (
            self.idx_mapping,
            self.sampled_tokens,
            self.num_sampled,
            self.num_rejected,
            self.query_start_loc,
        )

    def update_by_vllm(self) -> None:
        """Launch vLLM's kernel as vLLM does."""
        states = self.states
        bins = states.output_bin_counts
        stock_update()[(len(self.idx_mapping),)](
            self.idx_mapping,
            states.num_computed_tokens,
            states.last_sampled_tokens,
            bins,
            0 if bins is None else bins.stride(0),
            self.sampled_tokens,
            self.sampled_tokens.stride(0),
            self.num_sampled,
            self.num_rejected,
            self.query_start_loc,
            states.all_token_ids,
            states.all_token_ids.stride(0),
            states.total_len,
            num_warps=1,
        )


def test_vllms_update_is_the_one_that_is_called() -> None:
    kernel = stock_update()  # without a GPU vLLM may leave it a plain function
    found = tuple(signature(getattr(kernel, "fn", kernel)).parameters)
    assert found in (UPDATE_ARGUMENTS, UPDATE_ARGUMENTS + DRAFT_ARGUMENTS)


@examples(12)
@given(
    seed=SEEDS,
    captured=st.integers(1, 6),
    tokens=st.integers(2, 4),
    layers=st.integers(1, 3),
    counted=st.booleans(),
    groups=st.sampled_from((0, 0, 2)),
    certain=st.sampled_from((0, -1)),
    with_drafts=st.booleans(),
    data=st.data(),
)
def test_one_launch_leaves_what_two_leave(
    triton_device: torch.device,
    seed: int,
    captured: int,
    tokens: int,
    layers: int,
    counted: bool,
    groups: int,
    certain: int,
    with_drafts: bool,
    data: st.DataObject,
) -> None:
    """Twice with one bound launch: other counts, other requests, fewer than were captured."""
    # No padding rows: a captured step has rows for its requests only.
    shape = WindowShape(captured, tokens, padding=0, layers=layers, groups=groups)
    actual = make_windows(shape, seed, triton_device)
    ours = Requests(seed, captured, tokens, counted, triton_device)
    launch = CommitPlan(actual.kv_caches, slot_rows=actual.slot_rows).bind_with_update(
        StagedSources(actual.keys, actual.values),
        CommitRows(actual.slots, tokens, certain=certain),
        actual.errors,
        written=actual.written,
        update=stock_update(with_drafts),
        states=ours.states,
    )
    expected = make_windows(shape, seed, "cpu")
    expected.options["certain"] = certain
    theirs = Requests(seed, captured, tokens, counted, triton_device)
    for more in range(2):
        requests = data.draw(st.integers(1, captured))
        step = Requests(seed + 1 + more, requests, tokens, counted, triton_device)
        launch(*step.step())
        step.states = theirs.states
        step.update_by_vllm()
        # A request past the end of a step commits nothing.
        expected.num_sampled = torch.zeros(captured, dtype=torch.int32)
        expected.num_sampled[:requests] = step.num_sampled.cpu()
        expected.commit_by_reference()
    for mine, stock in zip(ours.states[:-1], theirs.states[:-1], strict=True):
        if isinstance(mine, Tensor) and isinstance(stock, Tensor):
            assert_same(mine.cpu(), stock.cpu())
    assert_same(actual.memory.cpu(), expected.memory)
    assert_same(actual.errors.cpu(), expected.errors)
    assert_same(actual.written.cpu(), expected.written)


def test_a_refused_commit_updates_the_requests_all_the_same(triton_device: torch.device) -> None:
    shape = WindowShape(3, 2, padding=0)
    windows = make_windows(shape, 5, triton_device)
    windows.slots[0] = 10**9
    ours = Requests(5, 3, 2, True, triton_device)
    theirs = Requests(5, 3, 2, True, triton_device)
    launch = CommitPlan(windows.kv_caches).bind_with_update(
        StagedSources(windows.keys, windows.values),
        CommitRows(windows.slots, 2),
        windows.errors,
        written=windows.written,
        update=stock_update(),
        states=ours.states,
    )
    launch(*ours.step())
    theirs.update_by_vllm()
    assert windows.memory.isnan().all()
    assert windows.errors.any()
    assert_same(ours.states.total_len.cpu(), theirs.states.total_len.cpu())
    assert_same(ours.states.all_token_ids.cpu(), theirs.states.all_token_ids.cpu())
