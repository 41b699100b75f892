"""One step of vLLM's runner, from its start until its counts are read and its window is measured.

With async scheduling the engine also runs windows of requests that have already finished; vLLM does
not count those. The requests' lengths show which they are, and they are counted separately.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from nwor_bench.plugin.scheduler_output import external_request_id, valid_drafts
from nwor_bench.records.types import MeasuredWindow
from nwor_bench.records.window_order import Turn


class _Passed:
    """The mark of a device that has done its work when the host goes on: a CPU's."""

    def query(self) -> bool:
        """Always: the device has come to it."""
        return True


PASSED = _Passed()


class DeviceClock:
    """Marks the steps of a server and of interleaved batches; off elsewhere, so that off x off
    stays stock."""

    def __init__(self, device: torch.device):
        self._has_events = device.type == "cuda"
        self.on = False

    def mark(self) -> Any:
        """An event on the current stream, `PASSED` without CUDA; None while off."""
        if not self.on:
            return None
        if not self._has_events:
            return PASSED
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def has_passed(mark: Any) -> bool:
    """True if the device has come to this mark; False without one. Waits for nothing."""
    return mark is not None and bool(mark.query())


def elapsed_ms(start: Any, end: Any) -> float | None:
    """Milliseconds between two events; None if one is missing. Waits for the second."""
    if start is None or end is None or end is PASSED:
        return None
    end.synchronize()
    return float(start.elapsed_time(end))


PHASES = {
    "forward_ms": ("forward_start", "sample_start"),
    "sample_ms": ("sample_start", "sample_end"),
    "mask_ms": ("sample_end", "mask_end"),
    "commit_ms": ("commit_start", "commit_end"),
}
"""Each time of a window, and the two marks that bound it.

There is no `mask_ms` if the commit decides what was accepted.
"""

Marks = dict[str, Any]


class Probe:
    """Records one event a mark while switched on."""

    def __init__(self) -> None:
        self.on = False
        self._marks: Marks = {}

    def mark(self, name: str) -> None:
        """Record an event on the current stream; nothing while off."""
        if self.on:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks[name] = event

    def take(self) -> Marks:
        """The marks of the window that has just ended."""
        marks, self._marks = self._marks, {}
        return marks


def durations(marks: Marks) -> dict[str, float]:
    """Milliseconds of every phase whose two marks were recorded; waits for the last one."""
    found = {}
    for name, (start, end) in PHASES.items():
        if start in marks and end in marks:
            marks[end].synchronize()
            found[name] = marks[start].elapsed_time(marks[end])
    return found


@dataclass(slots=True)
class Step:
    """A step while the runner works on it, and then while its counts are on the device.

    Host times are in seconds.
    """

    started: float
    """When the step began, on the host's clock."""
    has_window: bool = False
    """True if a request has drafts scheduled."""
    scheduler_output: Any = None
    """vLLM's; None once the step has ended."""
    batch: Any = None
    """The V2 runner's window in flight (`GpuWindowBatch`); None once the step has ended."""
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
    """Its number among all steps, if it is sealed (`late_counts`); else 0."""
    ends_reading: bool = False
    """No commit has run since the last sealed step, this one included."""
    counters: Tensor | None = None
    """Flags and rows written, [2 x layers] int32, as they stand behind it, if it is sealed."""
    control_tokens: int = 0
    """Drafts of a control window; see `MeasuredWindow`."""
    fallback_reason: str | None = None
    """Why the window was written directly."""
    scv_path: str | None = None
    """How acceptance was decided; see `MeasuredWindow`."""
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
    """CUDA events between the window's phases, if the probe is on."""
    host_ms: dict[str, float] = field(default_factory=dict)
    """Times that the V1 runner's hook measured on the host, by field of `MeasuredWindow`; they
    replace the times above."""
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


@dataclass(frozen=True)
class Before:
    """What was known of a window's requests when it began."""

    tokens: Sequence[int]
    """Tokens that each request had."""
    lengths: Mapping[str, int] | None
    """Tokens that each finished request returned, by its external name; None if unknown."""
    steady: bool
    """False for the first windows after a prefill, whose times include the rest of it."""

    def unfinished(self, req_ids: Sequence[str]) -> np.ndarray | slice:
        """Index of the requests that had not finished: all of them if lengths are unknown."""
        lengths = self.lengths
        if lengths is None:
            return slice(None)
        return np.array(
            [
                already < lengths.get(external_request_id(req_id), already + 1)
                for req_id, already in zip(req_ids, self.tokens, strict=True)
            ]
        )


def measured(
    step: Step, num_sampled: Sequence[int], before: Before, num_layers: int
) -> MeasuredWindow:
    """What happened to the drafts of a step with a window, and how long it took.

    Args:
        step: with `drafts`.
        num_sampled: tokens that each request got; empty for a step that died, which vLLM ignores.
        before: what was known when it began.
        num_layers: target layers, for stage operations.
    """
    drafts = step.drafts
    assert drafts is not None
    accepted = accepted_of(drafts, num_sampled)
    counted = before.unfinished(step.req_ids) if num_sampled else slice(0)
    kept = valid_drafts(drafts, step.req_ids, step.invalid_drafts)[counted]
    kept_accepted = accepted[counted]
    accepted_at, drafted_at = per_position(kept, kept_accepted)
    total, total_accepted = int(drafts.sum()), int(accepted.sum())
    staged = step.staged_tokens
    committed = total_accepted if step.committed_tokens is None else step.committed_tokens
    return MeasuredWindow(
        num_reqs=int(np.count_nonzero(drafts)),
        draft_tokens=total,
        accepted_tokens=total_accepted,
        staged_tokens=staged,
        committed_tokens=committed if staged else 0,
        rejected_tokens=staged - total_accepted if staged else 0,
        stage_operations=staged * num_layers,
        uncounted_draft_tokens=total - int(kept.sum()),
        uncounted_accepted_tokens=total_accepted - int(kept_accepted.sum()),
        fallback_reason=step.fallback_reason,
        scv_path=step.scv_path,
        scv_fallback_reason=step.scv_fallback_reason,
        control_tokens=step.control_tokens,
        accepted_per_position=accepted_at,
        drafts_per_position=drafted_at,
        **(step.host_ms or _times(step, before.steady)),
    )


def _times(step: Step, steady: bool) -> dict[str, Any]:
    """The window's times by the step's clocks, by field of `MeasuredWindow`."""
    return {
        "wall_ms": _ms(step.period_s) if steady else None,
        "hook_ms": _ms(step.hook_s),
        "scv_host_ms": _ms(step.scv_s),
        "device_ms": elapsed_ms(step.began, step.ended) if steady else None,
        **durations(step.marks),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def accepted_of(drafts: np.ndarray, num_sampled: Sequence[int]) -> np.ndarray:
    """[requests] accepted drafts of each; none of a step that died."""
    sampled = np.array(num_sampled or np.zeros(len(drafts)), dtype=np.int32)
    accepted: np.ndarray = np.clip(sampled - 1, 0, drafts)
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
