"""Windows of the V1 runner, counted from what it brings to the host anyway."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput

from nwor_bench.plugin.accumulator import Accumulator, WindowCounts, WindowTimes, per_position
from nwor_bench.plugin.validation import Validation, accepted_on_host
from nwor_bench.plugin.window import Outcome

logger = logging.getLogger("vllm.nwor_bench")


@dataclass
class Step:
    """A window while the runner works on it."""

    scheduler_output: Any
    started: float
    num_draft_tokens: tuple[int, ...] = ()
    req_ids: tuple[str, ...] = ()
    invalid_drafts: Mapping[str, int] | None = None
    times: WindowTimes = field(default_factory=WindowTimes)
    outcome: Outcome | None = None
    fallback_reason: str | None = None
    validation: Validation | None = None
    scv_fallback_reason: str | None = None

    @property
    def num_reqs(self) -> int:
        """Requests that have drafts in this window."""
        return sum(1 for drafts in self.num_draft_tokens if drafts)


class HostCounts:
    """Turns finished steps into window records.

    Args:
        accumulator: receives the records.
        num_layers: target layers, for stage operations.
        vocab_size: sampled ids from it on are padding.
        debug: log every window.

    Attributes:
        debug: as given; it may be switched at any time.
    """

    def __init__(self, accumulator: Accumulator, num_layers: int, vocab_size: int, debug: bool):
        self._accumulator = accumulator
        self._num_layers = num_layers
        self._vocab_size = vocab_size
        self.debug = debug

    def add(self, step: Step, sampled_token_ids: list[list[int]]) -> None:
        """Record a window, given each request's sampled ids."""
        num_accepted = accepted_on_host(sampled_token_ids, step.num_draft_tokens, self._vocab_size)
        invalid_drafts = step.invalid_drafts or {}
        forbidden = [invalid_drafts.get(req_id, 0) for req_id in step.req_ids]
        valid = [n - invalid for n, invalid in zip(step.num_draft_tokens, forbidden, strict=True)]
        accepted_at, drafted_at = per_position(tuple(valid), num_accepted)
        counts = WindowCounts(
            num_reqs=step.num_reqs,
            draft_tokens=sum(step.num_draft_tokens),
            accepted_tokens=sum(num_accepted),
            uncounted_draft_tokens=sum(forbidden),
            fallback_reason=step.fallback_reason,
            scv_path=step.validation.path if step.validation else None,
            scv_fallback_reason=step.scv_fallback_reason,
            accepted_per_position=accepted_at,
            drafts_per_position=drafted_at,
        )
        outcome = step.outcome
        if outcome is not None:
            counts.staged_tokens = outcome.staged_tokens
            counts.committed_tokens = outcome.committed_tokens or 0
            counts.rejected_tokens = outcome.rejected_tokens or 0
            counts.stage_operations = outcome.staged_tokens * self._num_layers
            counts.fallback_reason = outcome.fallback_reason
        self._accumulator.add(counts, step.times)
        if self.debug:
            _log_window(step, counts, num_accepted)

    def add_unfinished(self, step: Step, reason: str | None) -> None:
        """Record a window whose step died: what it accepted is unknown, and vLLM counts none."""
        drafts = sum(step.num_draft_tokens)
        counts = WindowCounts(
            num_reqs=step.num_reqs,
            draft_tokens=drafts,
            accepted_tokens=0,
            uncounted_draft_tokens=drafts,
            fallback_reason=reason,
        )
        self._accumulator.add(counts, step.times)


def _log_window(step: Step, counts: WindowCounts, num_accepted: list[int]) -> None:
    logger.info(
        "nwor commit: accepted per request %s; staged %d, committed %d, rejected %d%s",
        dict(zip(step.req_ids, num_accepted, strict=True)),
        counts.staged_tokens,
        counts.committed_tokens,
        counts.rejected_tokens,
        f", fallback {counts.fallback_reason}" if counts.fallback_reason else "",
    )


def when_sampled(output: Any, record: Callable[[list[list[int]]], None]) -> None:
    """Hand the sampled ids on: now, or with async scheduling when the engine takes its result."""
    if not isinstance(output, AsyncModelRunnerOutput):
        record(output.sampled_token_ids)
        return
    get_output = output.get_output

    def get_and_record() -> Any:
        result = get_output()
        record(result.sampled_token_ids)
        return result

    output.get_output = get_and_record
