"""Faults of correctness with which staging stops for good in a server."""

import re

from nwor_bench.plugin.rank_vote import DIFFERENT_COUNTS
from nwor_bench.plugin.runner_v2.refused_commits import DEVICE_REFUSED, STAGING_STOPPED
from nwor_bench.records.live_reasons import Guard
from nwor_bench.records.types import WindowCounts

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
