"""Checks that the counts of a run add up, within a window and against vLLM's own counters."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from nwor_bench.analysis.parity.acceptance import acceptance_violations
from nwor_bench.analysis.parity.tokens import ParityRule
from nwor_bench.records.cell import Cell, NworMode, cell_order
from nwor_bench.records.header import RunHeader
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
    layers = run.header.engine.target_layers
    every = replace(
        run,
        batches=(*run.batches, *run.superseded),
        windows=(*run.windows, *run.superseded_windows),
    )
    windows = windows_by_batch(every)
    found = [v for window in every.windows for v in _window_violations(window, layers)]
    found += [v for batch in every.batches for v in _batch_violations(batch, windows)]
    found += interleaved_violations(every.batches, windows, exact=_is_exact(run.header))
    found += _prompt_violations(run)
    for batches in (run.batches, *run.first_tries()):
        found += _output_violations(run.header, batches)
    return found


def counter_checks(run: RunData) -> list[CounterCheck]:
    """Our counters beside vLLM's for every cell, in `cell_order`."""
    windows = windows_by_batch(run)
    cells = sorted({batch.cell for batch in run.batches}, key=cell_order)
    checks = []
    for cell in cells:
        batches = [b for b in run.batches if b.cell == cell]
        checks += _cell_counters(cell, batches, windows)
    return checks


def _window_violations(window: WindowRecord, layers: int | None) -> list[Violation]:
    cell = window.cell
    place = f"{cell.label}, block {window.block}, batch {window.batch}, window {window.window}"
    staged = window.staged_tokens
    settled = window.committed_tokens + window.rejected_tokens
    found = []
    if staged != settled:
        found.append(
            f"{place}: {staged} staged tokens, but {window.committed_tokens} committed and "
            f"{window.rejected_tokens} rejected."
        )
    if layers is not None and window.stage_operations != staged * layers:
        found.append(
            f"{place}: {window.stage_operations} stage operations, but {staged} staged tokens "
            f"in {layers} target layers."
        )
    return [Violation(cell, text) for text in found]


def _batch_violations(
    batch: BatchRecord, windows: dict[BatchKey, list[WindowRecord]]
) -> list[Violation]:
    """Counts of one batch that do not add up.

    Windows may be missing if nothing is staged; in mode stage they must add up. In every mode
    the ranks of one engine must have counted the same. Interleaved batches have rules of their own.
    """
    if batch.phase in INTERLEAVED_PHASES:
        return []
    cell = batch.cell
    place = f"{cell.label}, block {batch.block}, batch {batch.batch} ({batch.phase})"
    if batch.rank_disagreement:
        return [Violation(cell, f"{place}: {batch.rank_disagreement}.")]
    if batch.nwor_mode != NworMode.STAGE:
        return []
    own = windows[batch_key(batch)]
    return [Violation(cell, f"{place}: {text}.") for text in sums_that_differ(batch, own)]


def _prompt_violations(run: RunData) -> list[Violation]:
    """Blocks whose cells had different prompts, so that their ratio means nothing."""
    found = []
    first: dict[tuple[str, str, int], BatchRecord] = {}
    for batch in run.batches:
        other = first.setdefault((batch.pair, batch.phase, batch.block), batch)
        if batch.prompt_digest != other.prompt_digest:
            text = (
                f"{batch.cell.label}, block {batch.block} ({batch.phase}): its prompts are "
                f"not those of {other.cell.label}."
            )
            found.append(Violation(batch.cell, text))
    return found


def _output_violations(header: RunHeader, batches: Iterable[BatchRecord]) -> list[Violation]:
    """Greedy batches whose output differs between the cells of a block, timed ones too."""
    if not _is_exact(header):
        return []  # other tokens are allowed; the run checked them
    greedy = [b for b in batches if b.temperature == 0 and b.phase not in INTERLEAVED_PHASES]
    baseline = {
        (batch.pair, batch.phase, batch.block): batch.token_digests
        for batch in greedy
        if batch.cell.is_baseline
    }
    found = []
    for batch in greedy:
        expected = baseline.get((batch.pair, batch.phase, batch.block), batch.token_digests)
        differing = sum(a != b for a, b in zip(batch.token_digests, expected, strict=False))
        differing += abs(len(batch.token_digests) - len(expected))
        if differing:
            text = (
                f"{batch.cell.label}, block {batch.block} ({batch.phase}): {differing} of "
                f"{len(expected)} requests gave other tokens than off x off."
            )
            found.append(Violation(batch.cell, text))
    return found


def _is_exact(header: RunHeader) -> bool:
    """True if greedy cells must give the tokens of off x off; older runs do not say."""
    return header.parity.rule in (None, ParityRule.EXACT)


def _cell_counters(
    cell: Cell, batches: list[BatchRecord], windows: dict[BatchKey, list[WindowRecord]]
) -> list[CounterCheck]:
    read = [b for b in batches if b.vllm_draft_tokens is not None]
    own = [w for b in read for w in windows[batch_key(b)]]
    counts = {
        "draft tokens": (counted_drafts(own), [b.vllm_draft_tokens for b in read]),
        "accepted tokens": (counted_accepted(own), [b.vllm_accepted_tokens for b in read]),
    }
    return [
        CounterCheck(cell, name, ours if own else None, _total(theirs))
        for name, (ours, theirs) in counts.items()
    ]


def _total(values: list[int | None]) -> int | None:
    """The sum, or None if there is nothing to add or one part was not measured."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


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
    in_order = (window for batch in timed for window in windows[batch_key(batch)])
    for cell, text in acceptance_violations(in_order):
        yield Violation(cell, text)
    for batch in batches:
        if batch.phase not in INTERLEAVED_PHASES:
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
    """Requests whose tokens differ from those of the same prompts in whole batches of off x off."""
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
    return [f"{differing} of {total} requests gave other tokens than off x off in whole batches"]


def _suspects(windows: Iterable[WindowRecord]) -> list[Cell]:
    """The batch's cells that differ from stock vLLM; off x off if it is the only one."""
    cells = sorted({window.cell for window in windows}, key=cell_order)
    own = [cell for cell in cells if not cell.is_baseline]
    return [cell for cell in own if cell.arm is None or cell.drafts is not None] or cells


def _place(batch: BatchRecord) -> str:
    return f"block {batch.block}, batch {batch.batch} ({batch.phase})"
