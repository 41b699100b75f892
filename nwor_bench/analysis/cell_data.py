"""A run's records, gathered by cell; and why a cell's mode never fired."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nwor_bench.analysis.invariants import accepted, windows_by_batch
from nwor_bench.analysis.parity.kv import KV_EVENT, KvVerdict, why_missing
from nwor_bench.analysis.parity.local import LOCAL_EVENT
from nwor_bench.analysis.parity.tokens import EXACT, REFERENCE, ParityRule
from nwor_bench.records.cell import AA, INTERLEAVED, Cell, NworMode, ScvMode, cell_order
from nwor_bench.records.fallback_reasons import NO_CUDA, SLOWER_THAN_STOCK
from nwor_bench.records.lines import BatchKey, batch_key
from nwor_bench.records.store import RunData
from nwor_bench.records.types import BatchRecord, Phase, Verdict, WindowRecord

SCV_COUNTERS = (
    "scv_device_validations",
    "scv_graph_hits",
    "scv_graph_captures",
    "scv_fallback_count",
)

OFF_BY_CHOICE = "stock's write and attention are faster here, so staging is off by choice"
"""Reason of a cell all of whose windows were written directly, since that was measured faster."""


@dataclass(frozen=True)
class GateResults:
    """What the gate recorded of one cell beside its tokens; events as in the records."""

    kv: Mapping[str, Any] | None = None
    """The last comparison of its cache; None if there was none."""
    local: Mapping[str, Any] | None = None
    """The last check of its layers on their own inputs; None if there was none."""
    interleaved_kv: tuple[Mapping[str, Any], ...] = ()
    """Comparisons of the cache after interleaved batches in which it staged."""
    rule: str | None = None
    """The run's rule of tokens; see `ParityRule`."""
    checks_layers: bool = False
    """The run's gate checks layers; those of older versions did not."""


@dataclass(frozen=True)
class CellData:
    """One cell's records.

    Attributes:
        cell: the cell that the records belong to.
        batches: all its batches, of every phase.
        timed: batches of phase "timed", the only ones behind times of whole batches.
        windows: the windows of the timed batches.
        gated: the windows of its first gate batch, which count if nothing of it was timed.
        interleaved: its own windows in interleaved batches; they count as the timed ones do.
        interleaved_counters: SCV's counters over them.
        gate: what the gate recorded of it.
        found_later: first output mismatch found after the batch was stored, or in a block that
            was interrupted and run again; None if there is none.
        ungated: paths on which it was timed and that none of its gate's windows took.
    """

    cell: Cell
    batches: list[BatchRecord]
    timed: list[BatchRecord]
    windows: list[WindowRecord]
    found_later: str | None = None
    interleaved: list[WindowRecord] = field(default_factory=list)
    interleaved_counters: Counter[str] = field(default_factory=Counter)
    gate: GateResults = GateResults()
    gated: list[WindowRecord] = field(default_factory=list)
    ungated: tuple[str, ...] = ()

    @property
    def counted(self) -> list[WindowRecord]:
        """The windows behind its counts."""
        return [*self.windows, *self.interleaved] if self.measured else self.gated

    @property
    def counted_batches(self) -> list[BatchRecord]:
        """The whole batches behind its counts: the timed ones, or else the gate's."""
        if self.measured:
            return self.timed
        return [batch for batch in self.batches if batch.phase == Phase.GATE][:1]

    @property
    def counts_from(self) -> str | None:
        """The phase that its counts are from; None if it ran in neither."""
        if self.measured:
            return str(Phase.TIMED)
        return str(Phase.GATE) if self.counted_batches else None

    @property
    def draft_tokens(self) -> int:
        """Draft tokens in its counted windows."""
        whole = sum(batch.draft_tokens for batch in self.counted_batches)
        return whole + sum(window.draft_tokens for window in self.interleaved)

    @property
    def accepted_tokens(self) -> int:
        """Accepted ones of these."""
        whole = sum(batch.accepted_tokens for batch in self.counted_batches)
        return whole + sum(accepted(window) for window in self.interleaved)

    @property
    def num_windows(self) -> int:
        """Number of its counted windows."""
        return sum(batch.windows for batch in self.counted_batches) + len(self.interleaved)

    @property
    def is_baseline(self) -> bool:
        """True for off x off."""
        return self.cell.is_baseline

    @property
    def measured(self) -> bool:
        """True if it was timed, in whole batches or interleaved."""
        return bool(self.timed or self.interleaved)

    @property
    def is_aa(self) -> bool:
        """True for the second off x off."""
        return self.cell.arm == AA

    @property
    def staged(self) -> int:
        """Draft tokens staged in its counted windows."""
        return sum(window.staged_tokens for window in self.counted)

    @property
    def controlled(self) -> int:
        """Draft tokens that mode control wrote directly, in its counted windows."""
        return sum(window.control_tokens for window in self.counted)

    @property
    def parity(self) -> str | None:
        """INVALID if any batch is; else the weakest parity of the checked batches."""
        values = {batch.parity for batch in self.batches if batch.parity is not None}
        if self.found_later is not None or Verdict.INVALID in values:
            return str(Verdict.INVALID)
        weaker = sorted(values - {EXACT, REFERENCE})
        return weaker[0] if weaker else max(values, default=None)

    @property
    def first_mismatch(self) -> str | None:
        """Where its output first differed from that of off x off, in words.

        A difference that makes the cell INVALID comes before an explained one.
        """
        if self.found_later is not None:
            return self.found_later
        invalid_first = sorted(self.batches, key=lambda batch: batch.parity != Verdict.INVALID)
        return next((batch.first_mismatch for batch in invalid_first if batch.first_mismatch), None)

    @property
    def fallbacks(self) -> dict[str, int]:
        """Windows written directly although the mode is stage, by reason."""
        counts: Counter[str] = Counter()
        for batch in self.counted_batches:
            counts.update(batch.fallbacks)
        counts.update(w.fallback_reason for w in self.interleaved if w.fallback_reason)
        return dict(sorted(counts.items()))

    @property
    def scv_counters(self) -> dict[str, int]:
        """SCV's own counters over the counted batches."""
        return {
            name: sum(b.scv_counters.get(name, 0) for b in self.counted_batches)
            + self.interleaved_counters[name]
            for name in SCV_COUNTERS
        }

    @property
    def scv_fallbacks(self) -> dict[str, int]:
        """Windows that SCV did not validate as its mode asks, by reason."""
        reasons = (window.scv_fallback_reason for window in self.counted)
        return dict(sorted(Counter(reason for reason in reasons if reason).items()))

    @property
    def cannot_fire(self) -> str | None:
        """Why its SCV mode cannot fire on this machine, as the gate proved; such a cell is not
        timed. None if it may fire."""
        reasons = {window.scv_fallback_reason for window in self.gated if window.draft_tokens}
        return "it cannot run without CUDA" if reasons == {NO_CUDA} else None

    @property
    def scv_status(self) -> str:
        """ "off", "ok", "INEFFECTIVE" (it never ran as asked) or "not measured"."""
        if self.cell.scv_mode is ScvMode.OFF:
            return "off"
        if self.counts_from is None:
            return "not measured"
        counters = self.scv_counters
        validated = counters["scv_graph_hits"] + counters["scv_device_validations"]
        fired = validated > counters["scv_fallback_count"]
        return "ok" if fired else str(Verdict.INEFFECTIVE)


def gather_cells(run: RunData) -> list[CellData]:
    """The cells that ran, by pair, then NWOR mode, then SCV mode (off first)."""
    windows = windows_by_batch(run)
    found_later = _found_later(run)
    interleaved = _own_windows(run, windows, {Phase.INTERLEAVED})
    in_gate = _compared_windows(run, windows)
    counters, gates = _interleaved_counters(run), _gate_results(run, windows)
    cells = []
    known = {batch.cell for batch in run.batches} | found_later.keys() | interleaved.keys()
    for cell in sorted(known, key=cell_order):
        batches = [batch for batch in run.batches if batch.cell == cell]
        timed = [batch for batch in batches if batch.phase == Phase.TIMED]
        whole = [window for batch in timed for window in windows[batch_key(batch)]]
        first = next((batch for batch in batches if batch.phase == Phase.GATE), None)
        shared = interleaved.get(cell, [])
        cells.append(
            CellData(
                cell,
                batches,
                timed,
                whole,
                found_later.get(cell),
                shared,
                counters.get(cell.label, Counter()),
                gates(cell),
                [] if first is None else windows[batch_key(first)],
                ungated_paths(in_gate.get(cell, []), [*whole, *shared]),
            )
        )
    return cells


def _gate_results(
    run: RunData, windows: Mapping[BatchKey, Sequence[WindowRecord]]
) -> Callable[[Cell], GateResults]:
    """What the gate recorded, by cell."""
    of = {
        kind: {Cell.from_names(e): e for e in run.events if e.get("event") == kind}
        for kind in (KV_EVENT, LOCAL_EVENT)
    }
    acted = {
        (batch.batch, window.cell)
        for batch in run.batches
        if batch.phase == Phase.INTERLEAVED_GATE
        for window in windows[batch_key(batch)]
        if window.staged_tokens or window.control_tokens
    }
    interleaved = [
        event
        for event in run.events
        if event.get("event") == KV_EVENT and event.get("arm") == INTERLEAVED
    ]
    rule = run.header.parity.rule

    def results(cell: Cell) -> GateResults:
        batches = [batch for batch, acting in acted if acting == cell]
        compared = [e for e in interleaved if batches and e.get("batch", batches[0]) in batches]
        kv, local = of[KV_EVENT].get(cell), of[LOCAL_EVENT].get(cell)
        return GateResults(kv, local, tuple(compared), rule, bool(of[LOCAL_EVENT]))

    return results


def _own_windows(
    run: RunData, windows: Mapping[BatchKey, Sequence[WindowRecord]], phases: Collection[Phase]
) -> dict[Cell, list[WindowRecord]]:
    """The windows of these phases' batches, by their own cells."""
    by_cell: dict[Cell, list[WindowRecord]] = defaultdict(list)
    for batch in run.batches:
        if batch.phase in phases:
            for window in windows[batch_key(batch)]:
                by_cell[window.cell].append(window)
    return dict(by_cell)


def _compared_windows(
    run: RunData, windows: Mapping[BatchKey, Sequence[WindowRecord]]
) -> dict[Cell, list[WindowRecord]]:
    """The gate's windows by their own cells, without those of batches after which nobody compared
    the cache, and nothing stands in for that (`why_missing`)."""
    exact = run.header.parity.rule == ParityRule.EXACT
    missed = {
        event.get("batch")
        for event in run.events
        if event.get("event") == KV_EVENT
        and event["verdict"] == KvVerdict.NOT_RUN
        and why_missing(event, equal_tokens=exact, layers=True) is not None
    }
    by_cell = _own_windows(run, windows, {Phase.GATE, Phase.INTERLEAVED_GATE})
    return {cell: [w for w in gated if w.batch not in missed] for cell, gated in by_cell.items()}


def ungated_paths(gated: Iterable[WindowRecord], timed: Iterable[WindowRecord]) -> tuple[str, ...]:
    """Paths of a cell's timed windows that none of its gate's windows took.

    Only windows with as many requests as any of their batch count. As requests end, a batch has
    windows of every smaller size for a moment, so chance decides which of them a gate has.
    Windows without a path (written directly, or of an older version) need no gate.
    """
    windows, largest = list(timed), dict[tuple[str, int, int], int]()
    for window in windows:
        key = batch_key(window)
        largest[key] = max(window.num_reqs, largest.get(key, 0))
    known = {None, *(window.path for window in gated)}
    full = (w.path for w in windows if w.num_reqs == largest[batch_key(w)])
    return tuple(dict.fromkeys(path for path in full if path is not None and path not in known))


def _interleaved_counters(run: RunData) -> dict[str, Counter[str]]:
    """SCV's counters in interleaved batches, by the cell's label."""
    counters: dict[str, Counter[str]] = defaultdict(Counter)
    for event in run.events:
        if event.get("event") == Phase.INTERLEAVED:
            for label, counts in event["cells"].items():
                counters[label].update(counts.get("scv_counters") or {})
    return dict(counters)


def _found_later(run: RunData) -> dict[Cell, str]:
    """Cells that broke parity in a superseded batch or by an event, with the first mismatch."""
    mismatches: dict[Cell, str] = {}
    for batch in run.superseded:
        if batch.parity == Verdict.INVALID:
            mismatches.setdefault(batch.cell, batch.first_mismatch or "its output differs")
    for event in run.events:
        if event.get("event") == "parity_broken":
            mismatches.setdefault(Cell.from_names(event), event["reason"])
    return mismatches


def idle_reason(cell: CellData) -> str | None:
    """Why the cell's mode never fired, or None if it did or nothing ran yet."""
    mode, ran = cell.cell.nwor_mode, cell.counts_from is not None
    if ran and not cell.draft_tokens and (cell.cell.drafts or mode is NworMode.STAGE):
        return "no draft token was proposed"
    if ran and mode is NworMode.STAGE and not cell.staged:
        if cell.fallbacks.keys() == {SLOWER_THAN_STOCK}:
            return OFF_BY_CHOICE
        return f"no draft token was staged{_most_common(cell.fallbacks)}"
    if ran and mode is NworMode.CONTROL and not cell.controlled:
        return "attention read no draft token from the window"
    if cell.cannot_fire is not None and not cell.measured:
        return cell.cannot_fire
    return idle_scv(cell) if mode is NworMode.OFF else None


def idle_scv(cell: CellData) -> str | None:
    """Why the cell's SCV mode never fired, or None if it did or is off."""
    if cell.scv_status != Verdict.INEFFECTIVE:
        return None
    return f"SCV validated no window as asked{_most_common(cell.scv_fallbacks)}"


def _most_common(reasons: dict[str, int]) -> str:
    ranked = Counter(reasons).most_common(1)
    return f" (most often: {ranked[0][0]})" if ranked else ""
