"""Checks that the counts of interleaved batches add up.

A batch's sums cannot tell which of its cells is at fault, so each of them but off x off is INVALID.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from nwor_bench.analysis.interleaved.acceptance import acceptance_violations
from nwor_bench.analysis.window_counts import Violation, sums_that_differ
from nwor_bench.records.batch import IN_TURNS
from nwor_bench.records.cell import Cell, NworMode, cell_order
from nwor_bench.records.lines import BatchKey, batch_key
from nwor_bench.records.types import BatchRecord, Phase, WindowRecord


def interleaved_violations(
    batches: Sequence[BatchRecord],
    windows: Mapping[BatchKey, Sequence[WindowRecord]],
    *,
    exact: bool,
) -> Iterator[Violation]:
    """Counts and tokens of interleaved batches that are not as they must be.

    Args:
        batches: of every phase.
        windows: of each batch.
        exact: greedy cells must give the tokens of off x off.
    """
    whole = {
        (batch.pair, batch.block): batch
        for batch in batches
        if batch.phase in (Phase.GATE, Phase.TIMED) and batch.cell.is_baseline
    }
    timed = [batch for batch in batches if batch.phase == Phase.INTERLEAVED]
    yield from acceptance_violations(w for batch in timed for w in windows[batch_key(batch)])
    for batch in batches:
        if batch.phase not in IN_TURNS:
            continue
        own = windows[batch_key(batch)]
        for window in own:
            yield from _window(window)
        faults = [batch.rank_disagreement] if batch.rank_disagreement else []
        faults += sums_that_differ(batch, own)
        reference = whole.get((batch.pair, batch.block))
        if exact and reference is not None:
            faults += _tokens(batch, reference)
        for cell in _suspects(own):
            for text in faults:
                yield Violation(cell, f"{_place(batch)}, in which {cell.label} ran: {text}.")


def _window(window: WindowRecord) -> Iterator[Violation]:
    """A window stages all its drafts in mode stage, or fell back; none in other modes."""
    cell, staged = window.cell, window.staged_tokens
    place = f"{cell.label}, block {window.block}, batch {window.batch}, window {window.window}"
    if cell.nwor_mode is not NworMode.STAGE:
        if staged:
            yield Violation(cell, f"{place}: {staged} staged tokens in mode {cell.nwor_mode}.")
    elif window.fallback_reason is None and staged != window.draft_tokens:
        yield Violation(
            cell,
            f"{place}: {staged} staged of {window.draft_tokens} draft tokens, without a fallback.",
        )


def _tokens(batch: BatchRecord, reference: BatchRecord) -> list[str]:
    """Requests whose tokens differ from those of the same prompts in off x off alone."""
    same_work = (batch.prompt_digest, batch.output_tokens, batch.temperature) == (
        reference.prompt_digest,
        reference.output_tokens,
        0,
    )
    if not same_work:
        return []
    pairs = zip(batch.token_digests, reference.token_digests, strict=True)
    differing = sum(ours != theirs for ours, theirs in pairs)
    if not differing:
        return []
    total = len(reference.token_digests)
    return [f"{differing} of {total} requests gave other tokens than off x off alone"]


def _suspects(windows: Iterable[WindowRecord]) -> list[Cell]:
    """The batch's cells that differ from stock vLLM; off x off if it is alone."""
    cells = sorted({window.cell for window in windows}, key=cell_order)
    return [cell for cell in cells if not cell.is_baseline and cell.arm is None] or cells


def _place(batch: BatchRecord) -> str:
    return f"block {batch.block}, batch {batch.batch} ({batch.phase})"
