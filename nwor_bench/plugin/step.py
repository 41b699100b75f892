"""One step of vLLM's runner, from its start to the record of its window, kept until a drain.

With async scheduling the engine also runs windows of requests that have already finished; vLLM does
not count those. The requests' lengths show which they are, and they are counted separately.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from nwor_bench.plugin.scheduler_output import external_request_id, valid_drafts
from nwor_bench.plugin.window import WindowOutcome
from nwor_bench.records.window import WindowRecord
from nwor_bench.records.window_order import WindowPlace


class _Passed:
    def query(self) -> bool:
        return True


PASSED = _Passed()
"""The mark of a CPU, whose work is done when the host goes on."""


class DeviceClock:
    """Marks steps in a server and in interleaved batches; off elsewhere: off x off stays stock.

    Making an event takes as long as recording two, so events are used again once they were read.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream: Any = None
        self._free: list[Any] = []
        self.on = False
        self.in_server = False
        """Phases are not timed in a server."""

    def step(self) -> Any:
        """An event on the current stream, `PASSED` without CUDA; None while off."""
        if not self.on:
            return None
        if self._device.type != "cuda":
            return PASSED
        self._stream = torch.cuda.current_stream(self._device)
        return self._record()

    def phase(self, step: "Step", name: str) -> None:
        """Mark where a phase of an interleaved window ends (`durations`), or START."""
        if self._stream is not None and step.place is not None and not self.in_server:
            step.marks[name] = self._record()

    def _record(self) -> Any:
        free = self._free
        event = free.pop() if free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def release(self, step: "Step") -> None:
        """Use the events of a step again; its times were read, and those of the one before it."""
        if self._stream is not None and step.began is not None:
            self._free += [step.began, *step.marks.values()]
            step.began, step.marks = None, {}


def has_passed(mark: Any) -> bool:
    """True if the device has come to this mark; False without one. Waits for nothing."""
    return mark is not None and bool(mark.query())


def elapsed_ms(start: Any, end: Any) -> float | None:
    """Milliseconds between two events; None if one is missing. Waits for the second."""
    if start is None or end is None or end is PASSED:
        return None
    end.synchronize()
    return float(start.elapsed_time(end))


START = "start"
"""The mark of the forward's start: right before the graph is replayed, if one is."""


def durations(marks: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds of each phase, from the mark before to its own; waits for the last one.

    Args:
        marks: START, then the phases as fields of `WindowRecord`, in the order of their events.
    """
    if not marks:
        return {}
    *_, last = marks.values()
    last.synchronize()
    both = pairwise(marks.items())
    return {name: float(before.elapsed_time(end)) for (_, before), (name, end) in both}


@dataclass(slots=True)
class Step:
    """A step while the runner works on it, and then while its counts are on the device.

    Host times are in seconds.
    """

    started: float
    """When the step began, on the host's clock."""
    has_window: bool = False
    """True if a request has drafts scheduled, and for k = 0 if draft counts are interleaved."""
    scheduler_output: Any = None
    """vLLM's; None once the step has ended."""
    only_verifies: bool = False
    """True if the step only verifies windows (`window_order.only_verifies`)."""
    batch: Any = None
    """The V2 runner's window in flight (`GpuWindowBatch`); None once the step has ended."""
    ready: Any = None
    """The one like it that was ready (`ReadyWindow`); None likewise, or if it was planned."""
    descriptor: Any = None
    """vLLM's of the CUDA graph that the V2 runner's window was planned for."""
    uniform: int | None = None
    """Drafts of every request if all have as many as possible."""
    invalid_drafts: Mapping[str, int] | None = None
    """Drafts that a grammar forbids, by request."""
    num_tokens: int = 0
    """Tokens of the step."""
    req_ids: Sequence[str] = ()
    """Requests of the step in batch order."""
    drafts: np.ndarray | None = None
    """[requests] drafts of each; None for a step without drafts, which only counts tokens."""
    num_sampled: Tensor | None = None
    """[requests] int32 on the device, tokens that each request got; None for a step that died."""
    staged_tokens: int = 0
    """Drafts that were staged and committed or rejected."""
    committed_tokens: int | None = None
    """Drafts that the commit wrote in every layer, as it counted them; None: not counted."""
    certain: int | None = None
    """Rows of each request that its commit wrote beside accepted drafts; None: no commit ran."""
    decided_in_commit: bool = False
    """The commit was given vLLM's `num_sampled`, not accepted counts."""
    sealed: int = 0
    """The step's number among all steps, if it is sealed (`late_counts`); else 0."""
    ends_reading: bool = False
    """No commit has run since the last sealed step, this one included."""
    counters: Tensor | None = None
    """Flags and rows written, [2 x layers] int32, as they stand behind it, if it is sealed."""
    control_tokens: int = 0
    """Drafts of a control window; see `WindowRecord`."""
    fallback_reason: str | None = None
    """Why the window was written directly."""
    state_layers: int = 0
    """Recurrent layers whose states its commit wrote; see `StateOutcome`."""
    state_rows: int | None = None
    """Requests whose states it wrote; None: all of the step's."""
    states_reason: str | None = None
    """Why stock wrote them though it was staged."""
    path: str | None = None
    """How its window ran; see `WindowRecord`."""
    scv_path: str | None = None
    """How acceptance was decided; see `WindowRecord`."""
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
    place: WindowPlace | None = None
    """The window's place in an interleaved batch."""
    marks: dict[str, Any] = field(default_factory=dict)
    """CUDA events between the phases of an interleaved window (`durations`)."""
    host_ms: dict[str, float] = field(default_factory=dict)
    """Times that the V1 runner's hook measured on the host, by field of `WindowRecord`; they
    replace the times above."""
    finished: Collection[str] = ()
    """Requests that ended before this step."""
    restarted: Mapping[str, int] = field(default_factory=dict)
    """Requests that start again with this step, and the tokens that they have."""
    undelivered: int | None = None
    """See `WindowRecord.undelivered_tokens`."""

    def take(self, outcome: WindowOutcome) -> None:
        """Note how its window ended."""
        self.staged_tokens, self.fallback_reason, self.control_tokens = outcome


def tokens_left(
    req_ids: Sequence[str], tokens: Sequence[int], lengths: Mapping[str, int] | None
) -> np.ndarray:
    """Tokens that each request still got when a window began; none if it had finished.

    Args:
        tokens: that each request had.
        lengths: tokens that each finished request returned, by its external name; of others: inf.
    """
    ends = [(lengths or {}).get(external_request_id(req_id), np.inf) for req_id in req_ids]
    left: np.ndarray = np.maximum(np.array(ends, float) - tokens, 0)
    return left


def measured(
    step: Step,
    num_sampled: Sequence[int],
    left: np.ndarray | None,
    num_layers: int,
    *,
    steady: bool,
) -> WindowRecord:
    """Counts and times of a step with a window.

    Args:
        num_sampled: tokens that each request got; empty for a step that died, which vLLM ignores.
        left: `tokens_left`; vLLM does not count requests that have none. None: in a server, which
            needs no counts by position, and times only of interleaved windows.
        steady: False for the first windows after a prefill, whose times include the rest of it.
    """
    drafts = step.drafts
    assert drafts is not None
    accepted = accepted_of(drafts, num_sampled)
    total, total_accepted = int(drafts.sum()), int(accepted.sum())
    more: dict[str, Any] = {"undelivered_tokens": step.undelivered}
    if left is not None:
        counted = left > 0
        kept, kept_accepted = (
            valid_drafts(drafts, step.req_ids, step.invalid_drafts)[counted],
            accepted[counted],
        )
        accepted_at, drafted_at = per_position(kept, kept_accepted)
        more = {
            "uncounted_draft_tokens": total - int(kept.sum()),
            "uncounted_accepted_tokens": total_accepted - int(kept_accepted.sum()),
            "accepted_per_position": accepted_at,
            "drafts_per_position": drafted_at,
        }
        if np.isfinite(left).any():
            more["undelivered_tokens"] = int(np.maximum(kept_accepted + 1 - left[counted], 0).sum())
    if left is not None or step.place is not None:
        more |= _times(step, steady)
    place = step.place
    if place is not None:
        more |= {
            "cell_number": place.cell,
            "group": place.group,
            "run": place.run,
            "run_length": place.run_length,
            "position": place.position,
        }
    staged = step.staged_tokens
    committed = total_accepted if step.committed_tokens is None else step.committed_tokens
    return WindowRecord(
        num_reqs=int(np.count_nonzero(drafts)) or len(drafts),
        draft_tokens=total,
        accepted_tokens=total_accepted,
        staged_tokens=staged,
        committed_tokens=committed if staged else 0,
        rejected_tokens=staged - total_accepted if staged else 0,
        stage_operations=staged * num_layers,
        fallback_reason=step.fallback_reason,
        scv_path=step.scv_path,
        scv_fallback_reason=step.scv_fallback_reason,
        control_tokens=step.control_tokens,
        states_committed=step.state_layers * (step.state_rows or len(drafts)),
        states_avoided=step.state_layers * total,
        states_reason=step.states_reason,
        path=step.path if staged or step.control_tokens else None,
        **more,
    )


def _times(step: Step, steady: bool) -> dict[str, Any]:
    """The host's times if the runner's hook took them; else those from step to step."""
    wall = {"wall_ms": _ms(step.period_s) if steady else None}
    if step.host_ms:
        return wall | step.host_ms
    return wall | {
        "hook_ms": _ms(step.hook_s),
        "scv_host_ms": _ms(step.scv_s),
        "device_ms": elapsed_ms(step.began, step.ended) if steady else None,
        **(durations(step.marks) if steady else {}),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def accepted_of(drafts: np.ndarray, num_sampled: Sequence[int]) -> np.ndarray:
    """[requests] accepted drafts of each; none of a step that died."""
    sampled = np.array(num_sampled or np.zeros(len(drafts)), dtype=np.int32)
    accepted: np.ndarray = np.minimum(np.maximum(sampled - 1, 0), drafts)  # `clip` takes 5 us more
    return accepted


def per_position(
    num_draft_tokens: ArrayLike, num_accepted: ArrayLike
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Requests that accepted draft j, and requests that had a draft j, for each j.

    Args:
        num_draft_tokens, num_accepted: [requests] int each.
    """
    drafts = np.asarray(num_draft_tokens, dtype=np.int64)
    places = np.arange(drafts.max(initial=0))
    accepted = (np.asarray(num_accepted, dtype=np.int64)[:, None] > places).sum(axis=0)
    return tuple(accepted.tolist()), tuple((drafts[:, None] > places).sum(axis=0).tolist())


MAX_UNDRAINED = 10_000
"""Windows kept if none was ever drained (`vllm serve`): the latest."""

MAX_BETWEEN_DRAINS = 1_000_000
"""Windows kept between two drains of a run: more than an hour of one batch."""


@dataclass
class Accumulator:
    """Measured windows of one worker. Plain host numbers only."""

    windows: deque[WindowRecord] = field(default_factory=deque)
    """Windows since the last drain, oldest first."""
    listeners: list[Callable[[WindowRecord, WindowPlace | None], None]] = field(
        default_factory=list
    )
    """Called with every window as it is added, for the metrics of `vllm serve`."""
    drained: bool = False
    """True after the first drain: then more drains are expected."""

    @property
    def most_kept(self) -> int:
        """Most windows that wait for a drain."""
        return MAX_BETWEEN_DRAINS if self.drained else MAX_UNDRAINED

    def add(self, window: WindowRecord, place: WindowPlace | None = None) -> None:
        """Keep one finished window."""
        self.windows.append(window)
        if len(self.windows) > self.most_kept:
            self.windows.popleft()
        for listener in self.listeners:
            listener(window, place)

    def drain(self) -> list[WindowRecord]:
        """Return the windows since the last drain, oldest first, and forget them."""
        drained = list(self.windows)
        self.windows.clear()
        self.drained = True
        return drained
