"""Windows counted after the fact: the V2 runner's, and any with async scheduling.

Accepted counts stay on the device while the engine runs: a step leaves behind the tensor that
vLLM computed anyway, and draining reads all of them in one copy. Under async scheduling the
engine also runs windows of requests that have already finished; vLLM does not count those, and
here they are counted apart.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nwor_bench.plugin.accumulator import Accumulator, WindowCounts, WindowTimes, per_position
from nwor_bench.plugin.invalid_drafts import valid_drafts
from nwor_bench.plugin.probe import Marks, durations
from nwor_bench.records import SETTLING

logger = logging.getLogger("vllm.nwor_bench")

MOST_PENDING = 2_000
"""Steps kept on the device when nobody drains (`vllm serve`); then one copy reads them."""


@dataclass(slots=True)
class PendingStep:
    """A step as the host knew it; `num_sampled` [requests] int32 is still on the device.

    `drafts` [requests] is None for a step without drafts, which only tells how far each request
    has come. Times on the host in seconds.

    `period_s` is the time to the start of the next step. The host runs ahead of the device, so the
    first windows behind a prefill hold what was left of that: they get no time (SETTLING).
    `times`, where the runner has its own, stand instead of all that.
    """

    started: float
    invalid_drafts: Mapping[str, int] | None = None
    num_tokens: int = 0
    req_ids: Sequence[str] = ()
    drafts: np.ndarray | None = None
    num_sampled: Tensor | None = None
    staged_tokens: int = 0
    fallback_reason: str | None = None
    scv_path: str | None = None
    scv_fallback_reason: str | None = None
    scv_s: float | None = None
    hook_s: float = 0.0
    period_s: float | None = None
    marks: Marks = field(default_factory=dict)
    times: WindowTimes | None = None

    @property
    def is_window_alone(self) -> bool:
        """True for a step without prefill: each request runs its drafts and the token before."""
        if self.drafts is None:
            return False
        return self.num_tokens == int(self.drafts.sum()) + len(self.drafts)


class LateCounts:
    """Turns pending steps into window records when somebody asks.

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
        self._sampled_before: dict[str, int] = {}
        self._last: PendingStep | None = None
        self._alone_in_a_row = 0

    def step_started(self, now: float) -> None:
        """A step begins on the host: the one before it lasted until now."""
        last, self._last = self._last, None
        if last is not None:
            last.period_s = now - last.started

    def add(self, step: PendingStep) -> None:
        """Remember a finished step."""
        self._pending.append(step)
        self._last = step
        if len(self._pending) > MOST_PENDING:
            self.resolve(None)

    def resolve(self, output_lengths: dict[str, int] | None) -> None:
        """Read the counts of all pending steps in one copy and record their windows.

        Args:
            output_lengths: tokens that each finished request returned, by its outer name; None
                where nobody knows (`vllm serve`): every window then counts.
        """
        steps = list(self._pending)
        self._pending.clear()
        counts = _read_all([step.num_sampled for step in steps])
        for step, num_sampled in zip(steps, counts, strict=True):
            self._resolve_step(step, num_sampled, output_lengths)
        if output_lengths is not None:
            self._sampled_before.clear()
            self._last = None
            self._alone_in_a_row = 0

    def _resolve_step(
        self, step: PendingStep, num_sampled: list[int], lengths: dict[str, int] | None
    ) -> None:
        before = [self._sampled_before.get(req_id, 0) for req_id in step.req_ids]
        for req_id, already, new in zip(step.req_ids, before, num_sampled, strict=False):
            self._sampled_before[req_id] = already + new
        steady = self._alone_in_a_row >= SETTLING
        self._alone_in_a_row = self._alone_in_a_row + 1 if step.is_window_alone else 0
        if step.drafts is None:
            return
        if not steady:
            step.period_s = None
        drafts = step.drafts.tolist()
        accepted = [
            min(max(n - 1, 0), d)
            for n, d in zip(num_sampled or [0] * len(drafts), drafts, strict=True)
        ]
        counted = [
            lengths is None or already < lengths.get(outer_name(req_id), already + 1)
            for req_id, already in zip(step.req_ids, before, strict=True)
        ]
        self._record(step, drafts, accepted, counted)

    def _record(
        self, step: PendingStep, drafts: list[int], accepted: list[int], counted: list[bool]
    ) -> None:
        valid = valid_drafts(drafts, step.req_ids, step.invalid_drafts)
        kept = [n for n, counts in zip(valid, counted, strict=True) if counts]
        kept_accepted = [n for n, counts in zip(accepted, counted, strict=True) if counts]
        accepted_at, drafted_at = per_position(tuple(kept), kept_accepted)
        total, total_accepted = sum(drafts), sum(accepted)
        staged = step.staged_tokens
        counts = WindowCounts(
            num_reqs=sum(1 for n in drafts if n),
            draft_tokens=total,
            accepted_tokens=total_accepted,
            staged_tokens=staged,
            committed_tokens=total_accepted if staged else 0,
            rejected_tokens=staged - total_accepted if staged else 0,
            stage_operations=staged * self._num_layers,
            uncounted_draft_tokens=total - sum(kept),
            uncounted_accepted_tokens=total_accepted - sum(kept_accepted),
            fallback_reason=step.fallback_reason,
            scv_path=step.scv_path,
            scv_fallback_reason=step.scv_fallback_reason,
            accepted_per_position=accepted_at,
            drafts_per_position=drafted_at,
        )
        self._accumulator.add(counts, step.times or _times(step))
        if self._debug:
            logger.info("nwor window: accepted %s of %s; %s", accepted, drafts, counts)


def outer_name(req_id: str) -> str:
    """A request's name as its caller gave it: vLLM appends a random suffix after a dash."""
    return req_id.rpartition("-")[0] or req_id


def _times(step: PendingStep) -> WindowTimes:
    def ms(seconds: float | None) -> float | None:
        return None if seconds is None else seconds * 1e3

    return WindowTimes(
        wall_ms=ms(step.period_s),
        hook_ms=ms(step.hook_s),
        scv_host_ms=ms(step.scv_s),
        **durations(step.marks),
    )


def _read_all(counts: list[Tensor | None]) -> list[list[int]]:
    """Every step's counts as host lists, with one copy from the device."""
    there = [tensor for tensor in counts if tensor is not None]
    flat = torch.cat(there).tolist() if there else []
    lists: list[list[int]] = []
    for tensor in counts:
        size = 0 if tensor is None else tensor.numel()
        lists.append(flat[:size])
        flat = flat[size:]
    return lists
