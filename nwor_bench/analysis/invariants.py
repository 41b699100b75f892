"""Checks that the counts of a run add up, within a window and against vLLM's own counters."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from nwor_bench.analysis.interleaved.invariants import interleaved_violations
from nwor_bench.analysis.parity.batches import ParityRule
from nwor_bench.analysis.window_counts import (
    Violation,
    accepted,
    counted_accepted,
    counted_drafts,
    sums_that_differ,
)
from nwor_bench.records.batch import IN_TURNS
from nwor_bench.records.cell import Cell, cell_order
from nwor_bench.records.engine_status import EngineStatus
from nwor_bench.records.finished_blocks import first_tries
from nwor_bench.records.header import ParityFacts, RunHeader
from nwor_bench.records.lines import BatchKey, batch_key
from nwor_bench.records.store import RunData
from nwor_bench.records.types import BatchRecord, NworMode, WindowRecord

__all__ = [
    "CounterCheck",
    "Violation",
    "accepted",
    "counted_accepted",
    "counted_drafts",
    "counter_checks",
    "find_violations",
    "full_windows",
    "windows_by_batch",
]


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
    layers = (run.header.engine or EngineStatus()).target_layers
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
    for batches in (run.batches, *first_tries(run.superseded, run.events)):
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

    Windows may be missing where nothing is staged; in mode stage they must add up. In every mode
    the ranks of one engine must have counted the same. Interleaved batches have rules of their own.
    """
    if batch.phase in IN_TURNS:
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
    greedy = [b for b in batches if b.temperature == 0 and b.phase not in IN_TURNS]
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
    return (header.parity or ParityFacts()).rule in (None, ParityRule.EXACT)


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
