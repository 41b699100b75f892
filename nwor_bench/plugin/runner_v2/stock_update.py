"""vLLM's update of its requests after a step, which a captured window's commit can run too.

`postprocess_sampled` calls `post_update` of its module, one launch through Triton that takes the
host 17 us warm and 42 cold on an H200. The call is replaced, not the method around it.

Under full CUDA graphs a batch that generates runs the same window again and again: as many
requests, each with all its drafts, one graph. Such a window is ready: it is planned once, then only
opened. The plan, the drafts and the bound launch of the commit are found by one look-up, so that
the host calls as little as possible: between two windows vLLM pushes our code out of its caches,
where each call costs it a microsecond.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from nwor_bench.instruments.contract import Feature, lost
from nwor_bench.plugin.patching import Patch
from nwor_bench.plugin.runner_v2.plan import MAX_PLANS, GpuWindowBatch
from nwor_bench.plugin.step import Step
from nwor_kernels.commit.with_update import RequestStates, Update

ANOTHER_UPDATE = "vllm: another post_update"

CALL = "post_update"


class StockUpdate(NamedTuple):
    """The update that vLLM would launch."""

    kernel: Any
    """Triton's function."""
    caller: ModuleType
    """The module whose CALL is replaced."""


def find_update() -> StockUpdate | str:
    """vLLM's update, or why a commit cannot run it."""
    from vllm.v1.worker.gpu import input_batch, model_runner

    if (reason := lost(Feature.UPDATE)) is not None:
        return reason
    if model_runner.post_update is not input_batch.post_update:
        return ANOTHER_UPDATE
    return StockUpdate(input_batch._post_update_kernel, model_runner)


class UpdateCall(NamedTuple):
    """One call of `post_update`."""

    idx_mapping: Tensor
    """[requests] int64, each one's place among the runner's requests; negative: skipped."""
    num_computed_tokens: Tensor
    last_sampled_tokens: Tensor
    output_bin_counts: Tensor | None
    sampled_tokens: Tensor
    """[requests, k + 1] int64"""
    num_sampled: Tensor
    """[requests] int32"""
    num_rejected: Tensor
    """[requests] int32"""
    query_start_loc: Tensor | None
    """[requests + 1] int32; None without rejected tokens."""
    all_token_ids: Tensor
    total_len: Tensor
    draft_tokens: Tensor | None = None
    """Drafts from a pipeline's last stage (vLLM 0.33); then the update is vLLM's own launch."""
    draft_tokens_out: Tensor | None = None

    def of_step(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The tensors that every step brings, in the launch's order."""
        assert self.query_start_loc is not None
        return (
            self.idx_mapping,
            self.sampled_tokens,
            self.num_sampled,
            self.num_rejected,
            self.query_start_loc,
        )

    def states(self, known: RequestStates | None) -> RequestStates:
        """The tensors that it changes: `known`, if they are the same."""
        stride = self.sampled_tokens.stride(0)
        if (
            known is not None
            and known.num_computed_tokens is self.num_computed_tokens
            and known.last_sampled_tokens is self.last_sampled_tokens
            and known.output_bin_counts is self.output_bin_counts
            and known.all_token_ids is self.all_token_ids
            and known.total_len is self.total_len
            and known.sampled_tokens_stride == stride
        ):
            return known
        return RequestStates(
            self.num_computed_tokens,
            self.last_sampled_tokens,
            self.output_bin_counts,
            self.all_token_ids,
            self.total_len,
            stride,
        )


class JoiningStaging(Protocol):
    """Staging whose commit can run an update (`GpuStaging`)."""

    def open(self, batch: GpuWindowBatch) -> None:
        """Set the window that the next commit belongs to."""

    def update_in_commit(self, kernel: Any, call: UpdateCall) -> None:
        """Let the commit run this call."""

    def commit(self, slots: Tensor, accepted: Tensor) -> str:
        """Launch it."""

    def reset(self) -> None:
        """End the window."""


def compile_with_update(
    runner: Any, update: StockUpdate, staging: JoiningStaging, batches: Iterable[GpuWindowBatch]
) -> None:
    """Launch the commit of each captured window with the update once; no request is updated.

    Args:
        runner: vLLM's; its `postprocess_sampled` brings the tensors of its requests.
        batches: windows of padding.
    """
    zeros = partial(torch.zeros, device=runner.device)
    calls: list[UpdateCall] = []
    note = Patch(update.caller, CALL, lambda _: lambda *each: calls.append(UpdateCall(*each)))
    note.apply()
    try:
        for batch in batches:
            requests = len(batch.num_draft_tokens)
            counts, starts = (zeros(n, dtype=torch.int32) for n in (requests, requests + 1))
            sampled = zeros(requests, runner.num_speculative_steps + 1, dtype=torch.int64)
            nobody = torch.full((requests,), -1, device=runner.device)
            runner.postprocess_sampled(nobody, sampled, counts, counts, starts)
            staging.open(batch)
            staging.update_in_commit(update.kernel, calls.pop())
            staging.commit(batch.slots, counts)
            staging.reset()
    finally:
        note.undo()


@dataclass(slots=True)
class ReadyWindow:
    """A captured window of so many requests, which vLLM's update commits."""

    descriptor: Any
    """vLLM's of the graph that runs it."""
    num_reqs: int
    num_tokens: int
    """Tokens of the step: all rows of all requests' windows, and nothing else."""
    batch: GpuWindowBatch
    """The window's plan; its slots are a view of vLLM's buffer, so they are each step's own."""
    drafts: np.ndarray
    """[requests] int32, drafts of each; nobody changes it."""
    num_drafts: int
    path: str
    """`WindowRecord.path` of each such window."""
    bind: Callable[[UpdateCall], tuple[RequestStates, Update]]
    """Finds the launch that changes the tensors of a call, and those tensors."""
    _states: RequestStates | None = None
    _launch: Update | None = None

    @classmethod
    def of(cls, step: Step, bind: Callable[[UpdateCall], tuple[RequestStates, Update]]) -> Self:
        """A window like this step's."""
        assert step.drafts is not None
        drafts = step.drafts.copy()
        total, requests = int(drafts.sum()), len(drafts)
        about = step.descriptor, requests, step.num_tokens, step.batch, drafts, total
        return cls(*about, f"{step.batch.path}, ready", bind)

    def fits(self, input_batch: Any) -> bool:
        """True if each request of this step has all its drafts, and nothing else is run."""
        return (
            input_batch.num_draft_tokens == self.num_drafts
            and input_batch.num_tokens == self.num_tokens
        )

    def commit(self, call: UpdateCall) -> str:
        """Write the accepted rows of all layers and run vLLM's update; '' as `Staging.commit`."""
        if self._launch is None or call.states(self._states) is not self._states:
            self._states, self._launch = self.bind(call)
        self._launch(*call.of_step())
        return ""


class ReadyWindows:
    """The windows that are ready, for as long as modes and graphs stay as they are."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, int], ReadyWindow] = {}
        self._last: ReadyWindow | None = None

    def find(self, descriptor: Any, num_reqs: int) -> ReadyWindow | None:
        """The window of so many requests in this graph, if there was one before."""
        last = self._last
        if last is None or last.descriptor is not descriptor or last.num_reqs != num_reqs:
            last = self._last = self._found.get((descriptor, num_reqs))
        return last

    def add(self, window: ReadyWindow) -> None:
        """Keep a window for the steps to come."""
        if len(self._found) >= MAX_PLANS:
            self.clear()
        self._found[window.descriptor, window.num_reqs] = window

    def clear(self) -> None:
        """Plan every window again: something else than its tokens may have changed."""
        self._found.clear()
        self._last = None
