"""Checks that the counts of a run add up, within a window and against vLLM's own counters."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from nwor_bench.analysis.parity.acceptance import acceptance_violations
from nwor_bench.analysis.parity.tokens import ParityRule
from nwor_bench.records.cell import Cell, NworMode, cell_order
from nwor_bench.records.lines import BatchKey, batch_key
from nwor_bench.records.store import RunData
from nwor_bench.records.types import INTERLEAVED_PHASES, BatchRecord, Phase, WindowRecord


@dataclass(frozen=True)
class Violation:
    """A count of one cell that does not add up, as a sentence."""

    cell: Cell
    text: str


def accepted(window: WindowRecord) -> int:
    """Accepted draft tokens of a window, whether it was staged or written directly."""
    return window.committed_tokens if window.staged_tokens else window.accepted_tokens


def output_tokens(window: WindowRecord) -> float:
    """Tokens that the window's requests got: one each, and accepted drafts up to their last token.

    Requests that had finished before it gain none; they have their share of the drafts. Older runs
    do not say what lies behind a last token: there it counts.
    """
    running = 1 - window.uncounted_draft_tokens / max(window.draft_tokens, 1)
    gained = accepted(window) - window.uncounted_accepted_tokens - (window.undelivered_tokens or 0)
    return window.num_reqs * running + gained


def counted_accepted(windows: Iterable[WindowRecord]) -> int:
    """Accepted tokens that vLLM counts too (without those of finished requests)."""
    return sum(accepted(w) - w.uncounted_accepted_tokens for w in windows)


def counted_drafts(windows: Iterable[WindowRecord]) -> int:
    """Draft tokens that vLLM counts too: staged ones, or all if none was staged."""
    return sum((w.staged_tokens or w.draft_tokens) - w.uncounted_draft_tokens for w in windows)


def sums_that_differ(batch: BatchRecord, windows: Sequence[WindowRecord]) -> list[str]:
    """Sums over a batch's windows that are not those of its record, or of vLLM."""
    staged = sum(window.staged_tokens for window in windows)
    committed = sum(window.committed_tokens for window in windows)
    drafts = sum(window.draft_tokens for window in windows)
    per_position = batch.vllm_accepted_per_position
    theirs_per_position = None if per_position is None else _without_zeros(per_position)
    pairs = [
        ("windows", len(windows), batch.windows, "its batch record"),
        ("staged tokens", staged, batch.staged_tokens, "its batch record"),
        ("committed tokens", committed, batch.committed_tokens, "its batch record"),
        ("draft tokens", drafts, batch.draft_tokens, "its batch record"),
        ("accepted tokens", sum(map(accepted, windows)), batch.accepted_tokens, "its batch record"),
        ("draft tokens", counted_drafts(windows), batch.vllm_draft_tokens, "vLLM"),
        ("accepted tokens", counted_accepted(windows), batch.vllm_accepted_tokens, "vLLM"),
        ("accepted per position", _per_position(windows), theirs_per_position, "vLLM"),
    ]
    return [
        f"{ours} {what} in the window records, but {theirs} in {source}"
        for what, ours, theirs, source in pairs
        if theirs is not None and ours != theirs
    ]


def _per_position(windows: Iterable[WindowRecord]) -> list[int]:
    rows = [window.accepted_per_position for window in windows]
    return _without_zeros([sum(column) for column in zip_longest(*rows, fillvalue=0)])


def _without_zeros(counts: Sequence[int]) -> list[int]:
    """Without positions that no request reached: absent on one side, 0 on the other."""
    reached = max((at for at, count in enumerate(counts, 1) if count), default=0)
    return list(counts[:reached])


@dataclass(frozen=True)
class CounterCheck:
    """One counter of one cell: ours from the windows, vLLM's from its metrics.

    Sums over the cell's batches, of every phase, in which vLLM's counter was read. A side that was
    not measured is None.
    """

    cell: Cell
    counter: str
    ours: int | None
    vllm: int | None

    @property
    def agrees(self) -> bool | None:
        """None if one side was not measured."""
        return None if self.ours is None or self.vllm is None else self.ours == self.vllm


def windows_by_batch(run: RunData) -> dict[BatchKey, list[WindowRecord]]:
    """Each batch's windows, in the order in which they ran."""
    groups: dict[BatchKey, list[WindowRecord]] = {batch_key(b): [] for b in run.batches}
    for window in run.windows:
        groups[batch_key(window)].append(window)
    return groups


def full_windows(
    batches: Iterable[BatchRecord], windows: Mapping[BatchKey, Sequence[WindowRecord]]
) -> list[WindowRecord]:
    """Windows with all requests of their batch; later windows have fewer."""
    return [
        window
        for batch in batches
        for window in windows[batch_key(batch)]
        if window.num_reqs == batch.requests
    ]


def find_violations(run: RunData) -> list[Violation]:
    """Counts that do not add up, each with the cell that it makes INVALID.

    Interrupted blocks that ran again are checked too: an interruption does not excuse a fault.
    """
    every = replace(
        run,
        batches=(*run.batches, *run.superseded),
        windows=(*run.windows, *run.superseded_windows),
    )
    windows = windows_by_batch(every)
    # Greedy cells must give the tokens of off x off; older runs do not name their rule. By another
    # rule other tokens are allowed, and the run checked them.
    exact = run.header.parity.rule in (None, ParityRule.EXACT)
    whole = {
        (batch.pair, batch.block): batch
        for batch in every.batches
        if exact and batch.phase in (Phase.GATE, Phase.TIMED) and batch.cell.is_baseline
    }
    layers = run.header.engine.target_layers
    found = []
    for batch in every.batches:
        ran = windows[batch_key(batch)]
        found += [Violation(w.cell, text) for w in ran for text in _window_faults(w, batch, layers)]
        found += _batch_violations(batch, ran, whole.get((batch.pair, batch.block)))
    timed = (batch for batch in every.batches if batch.phase == Phase.INTERLEAVED)
    in_order = (window for batch in timed for window in windows[batch_key(batch)])
    found += [Violation(cell, text) for cell, text in acceptance_violations(in_order)]
    found += _prompt_violations(run)
    for batches in (run.batches, *run.first_tries()) if exact else ():
        found += _output_violations(batches)
    return found


def counter_checks(run: RunData) -> list[CounterCheck]:
    """Our counters beside vLLM's for every cell, in `cell_order`."""
    windows = windows_by_batch(run)
    checks = []
    for cell in sorted({batch.cell for batch in run.batches}, key=cell_order):
        read = [b for b in run.batches if b.cell == cell and b.vllm_draft_tokens is not None]
        counted = [window for batch in read for window in windows[batch_key(batch)]]
        for counter, ours, theirs in (
            ("draft tokens", counted_drafts(counted), [b.vllm_draft_tokens for b in read]),
            ("accepted tokens", counted_accepted(counted), [b.vllm_accepted_tokens for b in read]),
        ):
            known = [value for value in theirs if value is not None]
            total = sum(known) if known and len(known) == len(theirs) else None
            checks.append(CounterCheck(cell, counter, ours if counted else None, total))
    return checks


def _window_faults(window: WindowRecord, batch: BatchRecord, layers: int | None) -> Iterator[str]:
    """Counts of one window that do not add up. In an interleaved batch it also stages all its
    drafts in mode stage, or fell back, and none in other modes."""
    cell, staged = window.cell, window.staged_tokens
    place = f"{cell.label}, block {window.block}, batch {window.batch}, window {window.window}"
    if staged != window.committed_tokens + window.rejected_tokens:
        yield (
            f"{place}: {staged} staged tokens, but {window.committed_tokens} committed and "
            f"{window.rejected_tokens} rejected."
        )
    if layers is not None and window.stage_operations != staged * layers:
        yield (
            f"{place}: {window.stage_operations} stage operations, but {staged} staged tokens "
            f"in {layers} target layers."
        )
    if batch.phase not in INTERLEAVED_PHASES:
        return
    if cell.nwor_mode is not NworMode.STAGE:
        if staged:
            yield f"{place}: {staged} staged tokens in mode {cell.nwor_mode}."
    elif window.fallback_reason is None and staged != window.draft_tokens:
        drafts = window.draft_tokens
        yield f"{place}: {staged} staged of {drafts} draft tokens, without a fallback."


def _batch_violations(
    batch: BatchRecord, windows: Sequence[WindowRecord], reference: BatchRecord | None
) -> Iterator[Violation]:
    """Counts of one batch that do not add up.

    In every mode the ranks of one engine must have counted the same. Windows may be missing if
    nothing is staged; in mode stage, and in an interleaved batch, they must add up.

    Args:
        batch: of any phase.
        windows: of the batch.
        reference: off x off on the same block, whose tokens an interleaved batch must give.
    """
    faults = [batch.rank_disagreement] if batch.rank_disagreement else []
    place = f"block {batch.block}, batch {batch.batch} ({batch.phase})"
    if batch.phase not in INTERLEAVED_PHASES:
        if batch.nwor_mode == NworMode.STAGE and not faults:
            faults = sums_that_differ(batch, windows)
        for text in faults:
            yield Violation(batch.cell, f"{batch.cell.label}, {place}: {text}.")
        return
    faults += sums_that_differ(batch, windows)
    if reference is not None and _same_work(batch, reference):
        differing = _differing(batch.token_digests, reference.token_digests)
        of = f"{differing} of {len(reference.token_digests)} requests"
        faults += [f"{of} gave other tokens than off x off in whole batches"] if differing else []
    for cell in _suspects(windows):
        for text in faults:
            yield Violation(cell, f"{place}, in which {cell.label} ran: {text}.")


def _same_work(batch: BatchRecord, reference: BatchRecord) -> bool:
    ours = batch.prompt_digest, batch.output_tokens, batch.temperature
    return ours == (reference.prompt_digest, reference.output_tokens, 0)


def _differing(tokens: Sequence[str], expected: Sequence[str]) -> int:
    """Requests whose tokens differ."""
    return sum(ours != theirs for ours, theirs in zip_longest(tokens, expected))


def _suspects(windows: Iterable[WindowRecord]) -> list[Cell]:
    """The batch's cells that differ from stock vLLM; off x off if it is the only one."""
    cells = sorted({window.cell for window in windows}, key=cell_order)
    acting = [cell for cell in cells if not cell.is_baseline]
    return [cell for cell in acting if cell.arm is None or cell.drafts is not None] or cells


def _prompt_violations(run: RunData) -> Iterator[Violation]:
    """Blocks whose cells had different prompts, so that their ratio means nothing."""
    first: dict[tuple[str, str, int], BatchRecord] = {}
    for batch in run.batches:
        other = first.setdefault((batch.pair, batch.phase, batch.block), batch)
        if batch.prompt_digest != other.prompt_digest:
            place = f"{batch.cell.label}, block {batch.block} ({batch.phase})"
            text = f"{place}: its prompts are not those of {other.cell.label}."
            yield Violation(batch.cell, text)


def _output_violations(batches: Iterable[BatchRecord]) -> Iterator[Violation]:
    """Greedy batches whose output differs between the cells of a block, timed ones too."""
    greedy = [b for b in batches if b.temperature == 0 and b.phase not in INTERLEAVED_PHASES]
    baseline = {
        (batch.pair, batch.phase, batch.block): batch.token_digests
        for batch in greedy
        if batch.cell.is_baseline
    }
    for batch in greedy:
        expected = baseline.get((batch.pair, batch.phase, batch.block), batch.token_digests)
        if differing := _differing(batch.token_digests, expected):
            text = (
                f"{batch.cell.label}, block {batch.block} ({batch.phase}): {differing} of "
                f"{len(expected)} requests gave other tokens than off x off."
            )
            yield Violation(batch.cell, text)
