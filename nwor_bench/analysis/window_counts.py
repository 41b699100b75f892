"""Counts of windows, summed as vLLM sums them, and what does not add up."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from nwor_bench.records.cell import Cell
from nwor_bench.records.types import BatchRecord, WindowRecord


@dataclass(frozen=True)
class Violation:
    """A count of one cell that does not add up, as a sentence."""

    cell: Cell
    text: str


def accepted(window: WindowRecord) -> int:
    """Accepted draft tokens of a window, whether it was staged or written directly."""
    return window.committed_tokens if window.staged_tokens else window.accepted_tokens


def counted_accepted(windows: Iterable[WindowRecord]) -> int:
    """Accepted tokens that vLLM counts too (without those of finished requests)."""
    return sum(accepted(w) - w.uncounted_accepted_tokens for w in windows)


def counted_drafts(windows: Iterable[WindowRecord]) -> int:
    """Draft tokens that vLLM counts too: staged ones, or all if none was staged."""
    return sum((w.staged_tokens or w.draft_tokens) - w.uncounted_draft_tokens for w in windows)


def sums_that_differ(batch: BatchRecord, own: Sequence[WindowRecord]) -> list[str]:
    """Sums over a batch's windows that are not those of its record, or of vLLM."""
    staged = sum(window.staged_tokens for window in own)
    committed = sum(window.committed_tokens for window in own)
    pairs = [
        ("windows", len(own), batch.windows, "its batch record"),
        ("staged tokens", staged, batch.staged_tokens, "its batch record"),
        ("committed tokens", committed, batch.committed_tokens, "its batch record"),
        ("draft tokens", sum(w.draft_tokens for w in own), batch.draft_tokens, "its batch record"),
        ("accepted tokens", sum(map(accepted, own)), batch.accepted_tokens, "its batch record"),
        ("draft tokens", counted_drafts(own), batch.vllm_draft_tokens, "vLLM"),
        ("accepted tokens", counted_accepted(own), batch.vllm_accepted_tokens, "vLLM"),
        ("accepted per position", _per_position(own), _trimmed(batch), "vLLM"),
    ]
    return [
        f"{ours} {what} in the window records, but {theirs} in {source}"
        for what, ours, theirs, source in pairs
        if theirs is not None and ours != theirs
    ]


def _per_position(windows: Iterable[WindowRecord]) -> list[int]:
    rows = [window.accepted_per_position for window in windows]
    return _without_zeros([sum(column) for column in zip_longest(*rows, fillvalue=0)])


def _trimmed(batch: BatchRecord) -> list[int] | None:
    counts = batch.vllm_accepted_per_position
    return None if counts is None else _without_zeros(list(counts))


def _without_zeros(counts: list[int]) -> list[int]:
    """Without positions that no request reached: absent on one side, 0 on the other."""
    while counts and counts[-1] == 0:
        counts = counts[:-1]
    return counts
