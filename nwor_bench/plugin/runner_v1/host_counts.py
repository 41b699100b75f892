"""Windows of the V1 runner, counted from the token ids that it copies to the host anyway.

With async scheduling these come late and on one rank only, so LateCounts counts the windows.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nwor_bench.plugin.counts.accumulator import Accumulator, per_position
from nwor_bench.plugin.counts.pending_step import PendingStep
from nwor_bench.plugin.counts.scheduler_output import valid_drafts
from nwor_bench.plugin.runner_v1.validation import Validation, accepted_on_host
from nwor_bench.plugin.staging.window import Outcome
from nwor_bench.records.types import UNTIMED, WindowCounts, WindowTimes
from nwor_bench.workload.window_order import Turn

logger = logging.getLogger("vllm.nwor_bench")


@dataclass
class Step:
    """A window while the runner works on it."""

    scheduler_output: Any
    started: float
    num_draft_tokens: tuple[int, ...] = ()
    req_ids: tuple[str, ...] = ()
    invalid_drafts: Mapping[str, int] | None = None
    times: WindowTimes = UNTIMED
    num_sampled: Tensor | None = None
    sampled: Any = None
    """The device's mark behind `num_sampled`; None unless a server reads counts late."""
    outcome: Outcome | None = None
    committed_tokens: int = 0
    """Drafts that its commit wrote, as it counted them."""
    fallback_reason: str | None = None
    validation: Validation | None = None
    scv_fallback_reason: str | None = None
    turn: Turn | None = None

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
        drafts = sum(step.num_draft_tokens)
        valid = valid_drafts(step.num_draft_tokens, step.req_ids, step.invalid_drafts)
        accepted_at, drafted_at = per_position(valid, num_accepted)
        outcome = step.outcome or Outcome(0, 0, step.fallback_reason)
        staged = outcome.staged_tokens
        counts = WindowCounts(
            num_reqs=step.num_reqs,
            draft_tokens=drafts,
            accepted_tokens=sum(num_accepted),
            staged_tokens=staged,
            committed_tokens=step.committed_tokens if staged else 0,
            rejected_tokens=staged - sum(num_accepted) if staged else 0,
            stage_operations=staged * self._num_layers,
            uncounted_draft_tokens=drafts - int(valid.sum()),
            fallback_reason=outcome.fallback_reason,
            accepted_per_position=accepted_at,
            drafts_per_position=drafted_at,
            scv_path=step.validation.path if step.validation else None,
            scv_fallback_reason=step.scv_fallback_reason,
            control_tokens=outcome.control_tokens,
        )
        self._accumulator.add(counts, step.times, step.turn)
        if self.debug:
            _log_window(step, counts, num_accepted)

    def add_unfinished(self, step: Step, reason: str | None) -> None:
        """Record a window whose step died: its acceptance is unknown, and vLLM counts none."""
        drafts = sum(step.num_draft_tokens)
        counts = WindowCounts(
            num_reqs=step.num_reqs,
            draft_tokens=drafts,
            accepted_tokens=0,
            staged_tokens=0,
            committed_tokens=0,
            rejected_tokens=0,
            stage_operations=0,
            uncounted_draft_tokens=drafts,
            fallback_reason=reason,
        )
        self._accumulator.add(counts, step.times, step.turn)


def _log_window(step: Step, counts: WindowCounts, num_accepted: list[int]) -> None:
    logger.info(
        "nwor commit: accepted per request %s; staged %d, committed %d, rejected %d%s",
        dict(zip(step.req_ids, num_accepted, strict=True)),
        counts.staged_tokens,
        counts.committed_tokens,
        counts.rejected_tokens,
        f", fallback {counts.fallback_reason}" if counts.fallback_reason else "",
    )


def pending_step(step: Step) -> PendingStep:
    """A finished step for LateCounts; its `num_sampled` is `count_sampled`'s."""
    pending = PendingStep(
        started=step.started,
        invalid_drafts=step.invalid_drafts,
        req_ids=step.req_ids,
        drafts=np.array(step.num_draft_tokens, dtype=np.int32),
        num_sampled=step.num_sampled,
        ended=step.sampled,
        fallback_reason=step.fallback_reason,
        scv_path=step.validation.path if step.validation else None,
        scv_fallback_reason=step.scv_fallback_reason,
        times=step.times,
        turn=step.turn,
    )
    if step.outcome is not None:
        pending.staged_tokens = step.outcome.staged_tokens
        pending.committed_tokens = step.committed_tokens
        pending.control_tokens = step.outcome.control_tokens
        pending.fallback_reason = step.outcome.fallback_reason
    return pending


def count_sampled(sampled_token_ids: Tensor, discarded: Tensor, vocab_size: int) -> Tensor:
    """How many tokens each request got, without waiting for the device.

    Args:
        sampled_token_ids: [requests, width] int; ids outside of the vocabulary are padding.
        discarded: [at least requests] bool, requests whose prefill goes on: theirs do not count.
        vocab_size: size of the target's vocabulary.

    Returns:
        [requests] int32.
    """
    valid = (sampled_token_ids >= 0) & (sampled_token_ids < vocab_size)
    counts = valid.sum(dim=1, dtype=torch.int32)
    return counts.masked_fill(discarded[: len(counts)], 0)
