"""Live A/B: off and stage are interleaved in a server until it ends or a guard stops staging.

A harness's batch has only windows once its prompts are in. In a server requests come and go: a
step that is more than windows ends a group, and the rest of its turns are skipped. Turns do not
depend on what arrives, so the same share is left out of both modes.
"""

import logging
import re
from typing import Any

from nwor_bench.plugin.interleaving import Interleaving, is_windows_alone
from nwor_bench.plugin.rank_vote import DIFFERENT_COUNTS
from nwor_bench.plugin.runner_hook import RunnerHook
from nwor_bench.plugin.runner_v2.refused_commits import DEVICE_REFUSED, STAGING_STOPPED
from nwor_bench.records.live_reasons import Guard, in_words
from nwor_bench.records.types import SETTLING, NworMode, ScvMode, WindowCounts
from nwor_bench.workload.window_order import Turn

logger = logging.getLogger("vllm.nwor_bench")

_REFUSED = re.compile(rf"(^|:)commit:|{DEVICE_REFUSED}|{STAGING_STOPPED}")


def guard_of(fallback_reason: str | None) -> Guard | None:
    """The guard that a window's fallback reason shows; None for one after which staging goes on."""
    if fallback_reason is None:
        return None
    if Guard.COUNTS in fallback_reason:
        return Guard.COUNTS
    if DIFFERENT_COUNTS in fallback_reason:
        return Guard.RANKS_DIFFER
    return Guard.COMMIT_REFUSED if _REFUSED.search(fallback_reason) else None


def miscount(counts: WindowCounts) -> str | None:
    """Which counts of a window do not add up; None if all do."""
    staged, committed = counts.staged_tokens, counts.committed_tokens
    rejected, accepted = counts.rejected_tokens, counts.accepted_tokens
    if accepted > counts.draft_tokens:
        return "accepted_more_than_drafted"
    if staged != committed + rejected or min(committed, rejected) < 0:
        return "staged_is_not_committed_and_rejected"
    if staged > counts.draft_tokens:
        return "staged_more_than_drafted"
    if staged and committed != accepted:
        return "committed_is_not_accepted"
    return None


OFF, STAGE, AGAIN = 0, 1, 2
"""Numbers of the cells: off, stage, and off again for the A/A groups."""

PAIRS = [(OFF, STAGE)] * 4 + [(OFF, AGAIN)]
"""One group in five compares off with itself."""

RUN_LENGTHS = {2: 1}
"""Windows of a run: a group of eight is the shortest, and ends most often before a prefill."""

WAITED = SETTLING - 1
"""Windows without a turn behind a step that is more: the first of a group is not used either."""

SEED = "live"
"""One for all: every tensor-parallel rank draws the same turns, and traffic knows none of them."""


class LiveTurns(Interleaving):
    """The turns of a server.

    Args:
        hook: of the runner whose windows take turns.
        scv_mode: how acceptance is decided in mode stage.

    Attributes:
        stopped: the guard that stopped staging for good; None while off and stage take turns.
    """

    def __init__(self, hook: RunnerHook, scv_mode: ScvMode):
        off = (NworMode.OFF, ScvMode.OFF)
        cells = [off, (NworMode.STAGE, scv_mode), off]
        super().__init__(hook, cells, PAIRS, SEED, RUN_LENGTHS)
        self.stopped: Guard | None = None
        self._is_off = False
        self._last: Turn | None = None
        self._settling = WAITED

    def next(self, scheduler_output: Any) -> Turn | None:
        """The step's turn; None for a step that is more than windows, and where it settles.

        Windows without a turn run in the mode of the last turn.
        """
        if self.stopped is not None:
            self._switch_off()
            return None
        if not is_windows_alone(scheduler_output):
            self._skip_group()
            self._settling = WAITED
            return None
        if self._settling:
            self._settling -= 1
            return None
        self._last = self._take(next(self._turns))
        return self._last

    def _skip_group(self) -> None:
        last, self._last = self._last, None
        while last is not None and not last.is_last:
            last = next(self._turns)

    def _switch_off(self) -> None:
        """Between two steps; on every rank before the same one."""
        if not self._is_off:
            self._is_off = True
            self._hook.set_modes(NworMode.OFF, ScvMode.OFF)

    def ended(self, fallback_reason: str | None) -> None:
        """A window has ended: staging stops if its reason shows a guard.

        The reason is the ranks' common one, so all stop after the same window.
        """
        guard = guard_of(fallback_reason)
        if guard is None or self.stopped is not None:
            return
        self.stopped, self.alarm = guard, None
        logger.error(
            "nwor: %s (%s). That window was written directly. Staging has stopped for good; the "
            "server goes on in mode off. Report this: no request can cause it",
            in_words(guard),
            fallback_reason,
        )

    def check(self, counts: WindowCounts) -> None:
        """Raise the alarm if a window's counts do not add up."""
        problem = miscount(counts)
        if problem is not None:
            self._raise(problem, counts)

    def overcounted(self) -> None:
        """A request got more tokens than its drafts and one."""
        self._raise("accepted_more_than_drafted", None)

    def _raise(self, problem: str, counts: WindowCounts | None) -> None:
        if self.stopped is None and self.alarm is None:
            self.alarm = f"{Guard.COUNTS}:{problem}"
            logger.error(
                "nwor: counts of a window do not add up: %s; %s. If fewer tokens were committed "
                "than accepted, answers of the last second may be wrong, and later ones that hit "
                "their blocks in the prefix cache: restart the server",
                problem,
                counts,
            )
