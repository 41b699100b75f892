"""Does switching harm the drafter? Windows from the same token accept what the largest k did."""

from collections.abc import Iterator, Sequence

from nwor_bench.analysis.invariants import windows_by_batch
from nwor_bench.records.lines import batch_key
from nwor_bench.records.store import RunData
from nwor_bench.records.types import BatchRecord, Phase, WindowRecord


def same_places(run: RunData) -> tuple[int, int]:
    """Windows that accepted what the largest count's window from the same token accepted, cut to
    their own count; and how many were compared.

    Of blocks of one request whose batches gave the same text: with more requests, records do not
    say where a request's window began. Equal numbers show that a drafter's cache is as good after
    switching, k = 0 included, as at one count.
    """
    windows = windows_by_batch(run)
    blocks: dict[tuple[object, ...], list[BatchRecord]] = {}
    for batch in run.batches:
        if batch.requests == 1:
            blocks.setdefault((batch.block, *batch.token_digests), []).append(batch)
    equal = compared = 0
    for batches in blocks.values():
        whole = [b for b in batches if b.phase in (Phase.GATE, Phase.TIMED) and b.cell.drafts]
        if not whole:
            continue
        most = max(whole, key=lambda batch: batch.cell.fixed_drafts)
        accepted = {at: n for at, _, n in _by_place(windows[batch_key(most)])}
        for batch in batches:
            if batch is most:
                continue
            for at, drafts, count in _by_place(windows[batch_key(batch)]):
                if drafts and at in accepted:
                    compared += 1
                    equal += count == min(accepted[at], drafts)
    return equal, compared


def _by_place(windows: Sequence[WindowRecord]) -> Iterator[tuple[int, int, int]]:
    """By window of one request: the token at which it began, its drafts and the accepted ones."""
    at = 1  # the prefill gave the first
    for window in windows:
        yield at, window.draft_tokens, window.accepted_tokens
        at += 1 + window.accepted_tokens
