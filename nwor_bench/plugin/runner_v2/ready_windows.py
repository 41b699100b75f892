"""Windows that are the same each time but for their tokens: planned once, then only opened.

Under full CUDA graphs a batch that generates runs the same window again and again: as many
requests, each with all its drafts, one graph. Then the plan, the drafts and the bound launch of the
commit are found by one look-up, so that the host calls as little as possible: between two windows
vLLM pushes our code out of its caches, where each call costs it a microsecond.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from nwor_bench.plugin.runner_v2.plan import MOST_PLANS, GpuWindowBatch
from nwor_bench.plugin.runner_v2.stock_update import UpdateCall
from nwor_bench.plugin.step import Step
from nwor_kernels.commit.with_update import RequestStates, Update


@dataclass(slots=True)
class ReadyWindow:
    """A captured window of so many requests, which vLLM's update commits."""

    descriptor: Any
    """vLLM's of the graph that runs it."""
    num_reqs: int
    num_tokens: int
    """Of the step: all rows of all requests' windows, and nothing else."""
    batch: GpuWindowBatch
    """Its slots are a view of vLLM's buffer, so they are each step's own."""
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
        if len(self._found) >= MOST_PLANS:
            self.clear()
        self._found[window.descriptor, window.num_reqs] = window

    def clear(self) -> None:
        """Plan every window again: something else than its tokens may have changed."""
        self._found.clear()
        self._last = None
