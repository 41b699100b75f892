"""Reasons on the /metrics of a live A/B: why a group is left out, why staging has stopped."""

from enum import StrEnum


class LeftOut(StrEnum):
    """Why a group does not count; label `reason` of nwor_live_groups_left_out_total."""

    INTERRUPTED = "interrupted"
    FALLBACK = "fallback"
    BATCH_SIZE = "batch_size"
    UNTIMED = "untimed"


class Guard(StrEnum):
    """Why staging has stopped for good; label `reason` of nwor_live_staging_stopped_total."""

    COMMIT_REFUSED = "commit_refused"
    COUNTS = "counts_do_not_add_up"
    RANKS_DIFFER = "ranks_differ"


IN_WORDS = {
    LeftOut.INTERRUPTED: "interrupted by a step that is more than windows",
    LeftOut.FALLBACK: "with a staged window that was written directly",
    LeftOut.BATCH_SIZE: "with a batch size that changed its class",
    LeftOut.UNTIMED: "with a window that has no time",
    Guard.COMMIT_REFUSED: "a commit was refused",
    Guard.COUNTS: "counts of a window do not add up",
    Guard.RANKS_DIFFER: "tensor-parallel ranks accepted different drafts",
}
"""Why a group is left out, behind its number; a guard, as the end of a sentence."""


def in_words(reason: str) -> str:
    """The reason for people; one that is not known stays as it is."""
    return next((words for known, words in IN_WORDS.items() if known == reason), reason)
