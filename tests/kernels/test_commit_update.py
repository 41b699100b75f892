"""A commit with vLLM's update in one launch: both leave what two launches leave."""

import importlib.util
import inspect
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import INTERPRETED, SEEDS, assert_same, generator
from torch import Tensor

pytest.importorskip("triton")

import triton
from window_cases import Windows, WindowShape, make_windows

from nwor_kernels.commit.plan import CommitPlan, CommitRows, StagedSources
from nwor_kernels.commit.with_update import DRAFT_ARGUMENTS, UPDATE_ARGUMENTS, RequestStates

MAX_REQUESTS, LENGTH, VOCABULARY = 9, 24, 7


DRAFTS = """\
    if draft_tokens_ptr is not None:
        for i in range(num_draft_tokens):
            token = tl.load(draft_tokens_ptr + tl.program_id(0) * num_draft_tokens + i)
            tl.store(draft_tokens_out_ptr + i, token)
"""
"""What vLLM 0.33's begins with."""


@cache
def stock_update(with_drafts: bool = False) -> Any:
    """vLLM's `_post_update_kernel`; without a GPU vLLM leaves it undecorated, so its text is read.

    Only that function: importing its module takes seconds. `with_drafts`: in vLLM 0.33's form,
    made of an older one's text.
    """
    site = importlib.util.find_spec("vllm")
    if site is None or not site.submodule_search_locations:
        pytest.skip("vLLM is not here")
    if not INTERPRETED and not with_drafts:
        from vllm.v1.worker.gpu import input_batch

        return input_batch._post_update_kernel
    text = (Path(site.submodule_search_locations[0]) / "v1/worker/gpu/input_batch.py").read_text()
    body = inspect.getblock(text[text.index("def _post_update_kernel(") :].splitlines(True))
    if with_drafts and "    draft_tokens_ptr,\n" not in body:
        end = body.index("):\n")
        body[end : end + 1] = [*(f"    {name},\n" for name in DRAFT_ARGUMENTS), body[end], DRAFTS]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "stock_update.py"
        path.write_text("import triton.language as tl\n\n\n" + "".join(body))
        spec = importlib.util.spec_from_file_location("stock_update", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = triton.jit(module._post_update_kernel)
        _ = getattr(kernel, "rewriter", None)  # the interpreter reads the text when it first runs
        inspect.getsourcelines(kernel.fn)
        return kernel


def parameters_of(kernel: Any) -> tuple[str, ...]:
    """Without a GPU vLLM may leave it a plain function."""
    return tuple(inspect.signature(getattr(kernel, "fn", kernel)).parameters)


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
        mapping, sampled, counts, rejected, starts = self.step()
        computed, last, bins, bins_stride, stride, *tokens = self.states.as_arguments()
        more = (None, None, 0) if set(DRAFT_ARGUMENTS) <= set(parameters_of(stock_update())) else ()
        stock_update()[(len(mapping),)](
            mapping, computed, last, bins, bins_stride, sampled, stride, counts, rejected, starts,
            *tokens, *more,
            num_warps=1,
        )  # fmt: skip


def commit_with_update(
    windows: Windows,
    requests: Requests,
    tokens: int,
    certain: int = 0,
    with_drafts: bool = False,
) -> Any:
    """The bound launch that commits windows and updates requests."""
    plan = CommitPlan(windows.kv_caches, slot_rows=windows.slot_rows)
    return plan.bind_with_update(
        StagedSources(windows.keys, windows.values),
        CommitRows(windows.slots, tokens, certain=certain),
        windows.errors,
        written=windows.written,
        update=stock_update(with_drafts),
        states=requests.states,
    )


def assert_same_requests(ours: Requests, theirs: Requests) -> None:
    for mine, stock in zip(ours.states[:-1], theirs.states[:-1], strict=True):
        if mine is not None:
            assert_same(mine.cpu(), stock.cpu())


def test_vllms_update_is_the_one_that_is_called() -> None:
    known = UPDATE_ARGUMENTS, UPDATE_ARGUMENTS + DRAFT_ARGUMENTS
    assert parameters_of(stock_update()) in known
    assert parameters_of(stock_update(True)) == known[1]


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
    triton_device, seed, captured, tokens, layers, counted, groups, certain, with_drafts, data
) -> None:
    """Twice with one bound launch: other counts, other requests, fewer than were captured."""
    # No padding rows: a captured step has rows for its requests only.
    shape = WindowShape(captured, tokens, padding=0, layers=layers, groups=groups)
    actual = make_windows(shape, seed, triton_device)
    ours = Requests(seed, captured, tokens, counted, triton_device)
    launch = commit_with_update(actual, ours, tokens, certain, with_drafts)
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
        expected.commit_by_definition()
    assert_same_requests(ours, theirs)
    assert_same(actual.memory.cpu(), expected.memory)
    assert_same(actual.errors.cpu(), expected.errors)
    assert_same(actual.written.cpu(), expected.written)


def test_a_refused_commit_updates_the_requests_all_the_same(triton_device: torch.device) -> None:
    shape = WindowShape(3, 2, padding=0)
    windows = make_windows(shape, 5, triton_device)
    windows.slots[0] = 10**9
    ours = Requests(5, 3, 2, True, triton_device)
    theirs = Requests(5, 3, 2, True, triton_device)
    launch = commit_with_update(windows, ours, 2)
    launch(*ours.step())
    theirs.update_by_vllm()
    assert windows.memory.isnan().all()
    assert windows.errors.any()
    assert_same_requests(ours, theirs)
