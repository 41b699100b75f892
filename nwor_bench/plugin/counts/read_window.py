"""A window whose counts have reached the host, and the records made of it.

With async scheduling the engine also runs windows of requests that have already finished; vLLM does
not count those. The requests' lengths show which they are, and they are counted apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from nwor_bench.plugin.counts.accumulator import per_position
from nwor_bench.plugin.counts.pending_step import PendingStep
from nwor_bench.plugin.counts.scheduler_output import external_request_id, valid_drafts
from nwor_bench.plugin.observe.device_times import elapsed_ms
from nwor_bench.records.types import UNTIMED, WindowCounts, WindowTimes


@dataclass(slots=True)
class ReadWindow:
    """A window whose counts are on the host, not yet recorded."""

    step: PendingStep
    drafts: np.ndarray
    """[requests] drafts of each."""
    num_sampled: np.ndarray
    """[requests] int32, tokens that each request got."""
    before: list[int]
    """Tokens that each request had when the window began."""
    steady: bool
    """False for the first windows after a prefill, whose times include the rest of it."""
    phases: dict[str, float]
    """Milliseconds of each phase, by field of `WindowTimes`."""

    @property
    def has_overcount(self) -> bool:
        """True if a request got more tokens than its drafts and one."""
        return bool((self.num_sampled > self.drafts + 1).any())

    @property
    def accepted(self) -> np.ndarray:
        """[requests] accepted drafts of each."""
        return np.clip(self.num_sampled - 1, 0, self.drafts)

    def counts(self, num_layers: int, output_lengths: Mapping[str, int] | None) -> WindowCounts:
        """What happened to the window's drafts.

        Args:
            num_layers: target layers, for stage operations.
            output_lengths: tokens that each finished request returned, by its external name; None
                if unknown.
        """
        step, drafts, accepted = self.step, self.drafts, self.accepted
        kept, kept_accepted = valid_drafts(drafts, step.req_ids, step.invalid_drafts), accepted
        if output_lengths is not None:
            counted = self._unfinished(output_lengths)
            kept, kept_accepted = kept[counted], accepted[counted]
        accepted_at, drafted_at = per_position(kept, kept_accepted)
        total, total_accepted = int(drafts.sum()), int(accepted.sum())
        staged = step.staged_tokens
        committed = total_accepted if step.committed_tokens is None else step.committed_tokens
        return WindowCounts(
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
        )

    def _unfinished(self, output_lengths: Mapping[str, int]) -> np.ndarray:
        """[requests] bool, those that had not finished when the window began."""
        return np.array(
            [
                already < output_lengths.get(external_request_id(req_id), already + 1)
                for req_id, already in zip(self.step.req_ids, self.before, strict=True)
            ]
        )

    def times(self) -> WindowTimes:
        """How long the window took: the runner's own times, or those of the step's clocks."""
        step = self.step
        return step.times or replace(
            UNTIMED,
            wall_ms=_ms(step.period_s) if self.steady else None,
            hook_ms=_ms(step.hook_s),
            scv_host_ms=_ms(step.scv_s),
            device_ms=elapsed_ms(step.began, step.ended) if self.steady else None,
            **self.phases,
        )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
