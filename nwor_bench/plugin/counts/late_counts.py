"""Windows counted late: the V2 runner's, and the V1 runner's with async scheduling.

Accepted counts stay on the device while the engine runs: each step leaves the tensor that vLLM
computed anyway, and one copy reads those of many steps. With async scheduling the engine also runs
windows of requests that have already finished; vLLM does not count those, and here they are counted
apart. The requests' lengths show which they are. So counts may be read earlier, to bound what waits
on the device, but windows are recorded when they are drained.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add
from typing import Any

import numpy as np
from torch import Tensor

from nwor_bench.plugin.counts.accumulator import Accumulator, per_position
from nwor_bench.plugin.counts.reading import Coming, SideReader, read_all
from nwor_bench.plugin.counts.scheduler_output import valid_drafts
from nwor_bench.plugin.observe.device_clock import elapsed_ms, has_passed
from nwor_bench.plugin.observe.phases import Marks, durations
from nwor_bench.records.types import SETTLING, UNTIMED, WindowCounts, WindowTimes
from nwor_bench.workload.window_order import Turn

logger = logging.getLogger("vllm.nwor_bench")

MOST_PENDING = 2_000
"""Steps whose counts wait on the device; then one copy reads them."""


@dataclass(slots=True)
class PendingStep:
    """A finished step whose counts are still on the device. Host times in seconds."""

    started: float
    """When the step began, on the host's clock."""
    invalid_drafts: Mapping[str, int] | None = None
    """Drafts that a grammar forbids, by request."""
    num_tokens: int = 0
    """Tokens of the step."""
    req_ids: Sequence[str] = ()
    """Requests of the step in batch order."""
    drafts: np.ndarray | None = None
    """[requests] drafts of each; None for a step without drafts, which only counts tokens."""
    num_sampled: Tensor | None = None
    """[requests] int32 on the device, tokens that each request got."""
    staged_tokens: int = 0
    """Drafts that were staged and committed or rejected."""
    control_tokens: int = 0
    """Drafts of a control window; see `WindowCounts`."""
    fallback_reason: str | None = None
    """Why the window was written directly."""
    scv_path: str | None = None
    """How acceptance was decided; see `WindowCounts`."""
    scv_fallback_reason: str | None = None
    """Why it was not decided as the SCV mode says."""
    scv_s: float | None = None
    """Host time of that decision."""
    hook_s: float = 0.0
    """Host time that the hooks added."""
    period_s: float | None = None
    """Time to the start of the next step. The host runs ahead of the device, so the first windows
    after a prefill include the rest of that prefill: they get no time (SETTLING)."""
    began: Any = None
    """CUDA event of the step's start; None unless the device's clock is on."""
    ended: Any = None
    """CUDA event of the next step's start; the V1 runner's is behind `num_sampled`."""
    turn: Turn | None = None
    """The window's turn in an interleaved batch."""
    marks: Marks = field(default_factory=dict)
    """CUDA events between the window's phases, where the probe is on."""
    times: WindowTimes | None = None
    """Times that the runner measured itself; they override the times above."""
    finished: Collection[str] = ()
    """Requests that ended before this step."""
    restarted: Mapping[str, int] = field(default_factory=dict)
    """Requests that start again with this step, and the tokens that they have."""

    @property
    def is_window_alone(self) -> bool:
        """True for a step without prefill: each request runs its drafts and the token before."""
        if self.drafts is None:
            return False
        return self.num_tokens == int(self.drafts.sum()) + len(self.drafts)


@dataclass(slots=True)
class _ReadWindow:
    """A window whose counts are on the host, not yet recorded.

    `before` are the tokens that each request had when the window began.
    """

    step: PendingStep
    num_sampled: np.ndarray
    before: list[int]
    steady: bool
    phases: dict[str, float]


class LateCounts:
    """Turns pending steps into window records.

    Args:
        accumulator: receives the records.
        num_layers: target layers, for stage operations.
        debug: log every window.
    """

    def __init__(self, accumulator: Accumulator, num_layers: int, debug: bool = False):
        self._accumulator = accumulator
        self._num_layers = num_layers
        self._debug = debug
        self._pending: deque[PendingStep] = deque()
        self._arrived: deque[tuple[PendingStep, list[int]]] = deque()
        self._sampled_before: dict[str, int] = {}
        self._finished: set[str] = set()
        self._restarted: dict[str, int] = {}
        self._last: PendingStep | None = None
        self._alone_in_a_row = 0
        self._also: Tensor | None = None
        self._take_also: Callable[[list[int]], None] | None = None
        self._reader = SideReader()
        self._coming: tuple[list[PendingStep], Coming] | None = None
        self.on_overcount: Callable[[], None] | None = None
        """Called where a request got more tokens than its drafts and one."""

    @property
    def is_reading(self) -> bool:
        """True while counts are on their way to the host."""
        return self._coming is not None

    @property
    def requests_known(self) -> int:
        """Requests whose tokens are still counted: their end has not been read."""
        return len(self._sampled_before)

    def read_with(self, tensor: Tensor, take: Callable[[list[int]], None]) -> None:
        """Read `tensor` [n] int32, on the steps' device, with every copy of counts."""
        self._also, self._take_also = tensor, take

    def step_started(self, now: float, mark: Any = None) -> None:
        """A step begins on the host: the one before it lasted until now.

        `mark` is the CUDA event of its start, where steps are timed on the device too.
        """
        last, self._last = self._last, None
        if last is not None:
            last.period_s = now - last.started
            last.ended = mark

    def went_idle(self) -> None:
        """No step follows the last one: the time to the next one is no time of it."""
        self._last = None

    def note_requests(self, finished: Collection[str], restarted: Mapping[str, int]) -> None:
        """Note the requests that a step ends and restarts (see `scheduler_output`)."""
        if finished:
            self._finished.update(finished)
        if restarted:
            self._restarted.update(restarted)

    def add(self, step: PendingStep) -> None:
        """Remember a finished step."""
        if self._finished:
            step.finished, self._finished = self._finished, set()
        if self._restarted:
            step.restarted, self._restarted = self._restarted, {}
        self._pending.append(step)
        self._last = step
        if len(self._pending) > MOST_PENDING:
            self._read_pending()

    def resolve(self, output_lengths: dict[str, int] | None) -> None:
        """Read the counts of all pending steps in one copy and record their windows.

        Args:
            output_lengths: tokens that each finished request returned, by its external name; None
                if unknown (`vllm serve`): every window then counts.
        """
        self._read_pending()
        self._record_arrived(len(self._arrived), output_lengths)
        self._forget(self._finished)  # all of their steps have been counted
        self._finished = set()
        if output_lengths is not None:
            self._sampled_before.clear()
            self._last = None
            self._alone_in_a_row = 0

    def read_finished(self) -> None:
        """Read the counts of steps that the device has finished, in two calls; waits for nothing.

        The first call begins a copy, a later one takes it. Needs the marks of `step_started`.
        """
        if self._coming is not None:
            if self._coming[1].is_there():
                self._take_coming()
            return
        steps = []
        while self._pending and has_passed(self._pending[0].ended):
            steps.append(self._pending.popleft())
        if steps:
            counts = [step.num_sampled for step in steps]
            self._coming = (steps, self._reader.begin(counts, self._also))

    def settle(self, most: int) -> None:
        """Count at most so many of the steps that have been read; every window counts."""
        self._record_arrived(min(most, len(self._arrived)), None)

    def _record_arrived(self, number: int, lengths: dict[str, int] | None) -> None:
        for _ in range(number):
            window = self._count(*self._arrived.popleft())
            if window is not None:
                self._settle(window, lengths)

    def _take_coming(self) -> None:
        assert self._coming is not None
        (steps, coming), self._coming = self._coming, None
        self._take(steps, coming.lists())

    def _read_pending(self) -> None:
        """Bring all pending counts to the host, in one copy."""
        if self._coming is not None:
            self._take_coming()
        steps = list(self._pending)
        self._pending.clear()
        self._take(steps, read_all([step.num_sampled for step in steps], self._also))

    def _take(self, steps: list[PendingStep], lists: list[list[int]]) -> None:
        if self._take_also is not None and len(lists) > len(steps):
            self._take_also(lists.pop())
        for step, num_sampled in zip(steps, lists, strict=True):
            step.num_sampled = None
            self._arrived.append((step, num_sampled))
        self._record_arrived(len(self._arrived) - self._accumulator.most_kept, None)

    def _forget(self, req_ids: Collection[str]) -> None:
        for req_id in req_ids:
            self._sampled_before.pop(req_id, None)

    def _count(self, step: PendingStep, num_sampled: list[int]) -> _ReadWindow | None:
        """Add up each request's tokens, in the steps' order; the window, if the step is one."""
        known = self._sampled_before
        self._forget(step.finished)
        known.update(step.restarted)
        step.finished, step.restarted = (), {}
        before = [known.get(req_id, 0) for req_id in step.req_ids]
        known.update(zip(step.req_ids, map(add, before, num_sampled), strict=False))
        steady = self._alone_in_a_row >= SETTLING
        self._alone_in_a_row = self._alone_in_a_row + 1 if step.is_window_alone else 0
        if step.drafts is None:
            return None
        sampled = np.array(num_sampled or [0] * len(step.drafts), dtype=np.int32)
        return _ReadWindow(step, sampled, before, steady, durations(step.marks))

    def _settle(self, window: _ReadWindow, lengths: dict[str, int] | None) -> None:
        """Record one window; requests that had finished before it are counted apart."""
        step, sampled = window.step, window.num_sampled
        assert step.drafts is not None
        if not window.steady:
            step.period_s = step.began = None
        if self.on_overcount is not None and bool((sampled > step.drafts + 1).any()):
            self.on_overcount()
        accepted = np.clip(sampled - 1, 0, step.drafts)
        counted = None
        if lengths is not None:
            counted = np.array(
                [
                    already < lengths.get(external_request_id(req_id), already + 1)
                    for req_id, already in zip(step.req_ids, window.before, strict=True)
                ]
            )
        self._record(window, step.drafts, accepted, counted)

    def _record(
        self,
        window: _ReadWindow,
        drafts: np.ndarray,
        accepted: np.ndarray,
        counted: np.ndarray | None,
    ) -> None:
        """Record a window; `counted` [requests] bool are those that vLLM counts, None: all."""
        step = window.step
        kept, kept_accepted = valid_drafts(drafts, step.req_ids, step.invalid_drafts), accepted
        if counted is not None:
            kept, kept_accepted = kept[counted], accepted[counted]
        accepted_at, drafted_at = per_position(kept, kept_accepted)
        total, total_accepted = int(drafts.sum()), int(accepted.sum())
        staged = step.staged_tokens
        counts = WindowCounts(
            num_reqs=int(np.count_nonzero(drafts)),
            draft_tokens=total,
            accepted_tokens=total_accepted,
            staged_tokens=staged,
            committed_tokens=total_accepted if staged else 0,
            rejected_tokens=staged - total_accepted if staged else 0,
            stage_operations=staged * self._num_layers,
            uncounted_draft_tokens=total - int(kept.sum()),
            uncounted_accepted_tokens=total_accepted - int(kept_accepted.sum()),
            fallback_reason=step.fallback_reason,
            scv_path=step.scv_path,
            scv_fallback_reason=step.scv_fallback_reason,
            control_tokens=step.control_tokens,
            accepted_per_position=accepted_at,
            drafts_per_position=drafted_at,
        )
        self._accumulator.add(counts, step.times or _times(window), step.turn)
        if self._debug:
            logger.info("nwor window: accepted %s of %s; %s", accepted, drafts, counts)


def external_request_id(req_id: str) -> str:
    """The caller's name of a request: vLLM appends a dash and a random suffix."""
    return req_id.rpartition("-")[0] or req_id


def _times(window: _ReadWindow) -> WindowTimes:
    step = window.step

    def ms(seconds: float | None) -> float | None:
        return None if seconds is None else seconds * 1e3

    return replace(
        UNTIMED,
        wall_ms=ms(step.period_s),
        hook_ms=ms(step.hook_s),
        scv_host_ms=ms(step.scv_s),
        device_ms=elapsed_ms(step.began, step.ended),
        **window.phases,
    )
