"""Analysis of a run's records, computed once for every reader.

Counters and times come from the batches of phase "timed" and their windows, and from a cell's own
windows in interleaved batches; the counts of a cell that was never timed are its gate's. A batch of
any phase can break parity. A value that was not measured is None, not 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from nwor_bench.analysis.cell_data import CellData, gather_cells
from nwor_bench.analysis.draft_rates import Rate, Worth
from nwor_bench.analysis.dram import CellBytes, cell_bytes
from nwor_bench.analysis.effects import PairEffect, Split, effects_over_off, pair_effects, splits
from nwor_bench.analysis.findings.finding import Evidence, Finding
from nwor_bench.analysis.findings.table import find_all
from nwor_bench.analysis.invariants import Violation, find_violations
from nwor_bench.analysis.paired import by_block
from nwor_bench.analysis.verdicts import OPEN, with_verdicts
from nwor_bench.analysis.worth import Measured, refused_arms, worth_of
from nwor_bench.records.cell import Count, NworMode
from nwor_bench.records.store import RunData
from nwor_bench.records.types import AA, BatchRecord, Cell, CellResult, Verdict, WindowRecord
from nwor_bench.stats.interval import Interval, flat
from nwor_bench.stats.paired import mean_of


@dataclass(frozen=True)
class Analysis:
    """A run and everything that follows from its records.

    `findings`, `splits` and `dram` are computed when first read: a check of the stopping rule
    needs only `cells`.
    """

    run: RunData
    gathered: tuple[CellData, ...]
    """The records by cell, in `cell_order`."""
    effects: tuple[PairEffect, ...]
    """Effects of interleaved pairs; empty for a run of whole batches."""
    violations: tuple[Violation, ...]
    """Counts that do not add up."""
    cells: tuple[CellResult, ...]
    """One summary a cell that ran, by pair, then NWOR mode, then SCV mode (off first)."""
    worth: Worth | None = None
    """Which draft counts pay, by this run alone; None if none is timed, or modes are compared."""

    @property
    def measured(self) -> Measured:
        """What its draft counts are worked out from."""
        return Measured(self.run, self.effects, refused_arms(self.cells))

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Reasons to trust the numbers less, the severest first."""
        return tuple(find_all(Evidence(self.run, self.cells, effects_over_off(self.effects))))

    @cached_property
    def splits(self) -> tuple[Split, ...]:
        """Effects of staging cells in two parts."""
        return tuple(splits(self.effects, self.cells))

    @cached_property
    def dram(self) -> tuple[CellBytes, ...]:
        """Counted DRAM bytes; empty if none were counted."""
        return tuple(cell_bytes(self.run))

    @property
    def noise_floor(self) -> dict[str, Any] | None:
        """The A/A arm's, as in run.json; None if it has no interval."""
        return noise_floor(self.cells)


def analyse(run: RunData) -> Analysis:
    """Everything that a run's records say."""
    gathered, effects = gather_cells(run), pair_effects(run)
    violations = find_violations(run)
    first: dict[Cell, str] = {}
    for violation in violations:
        first.setdefault(violation.cell, violation.text)
    over_off = effects_over_off(effects)
    results: list[CellResult] = []
    for _, group in groupby(gathered, key=lambda data: data.cell.pair):
        cells = list(group)
        faults = [first.get(cell.cell) for cell in cells]
        results += with_verdicts(
            cells,
            [_result(cell, trusted=cell.cell not in first) for cell in cells],
            _baseline(cells, first),
            faults,
            over_off,
            checks_only=run.header.checks_only,
        )
    parts = tuple(gathered), tuple(effects), tuple(violations), tuple(results)
    analysis = Analysis(run, *parts)
    if run.header.spec.draft_counts is None or run.header.checks_speculation:
        return analysis
    worth = worth_of([analysis.measured])
    rates = {rate.count: rate for rate in worth.rates}
    return replace(analysis, worth=worth, cells=tuple(_by_tokens(cell, rates) for cell in results))


def _by_tokens(cell: CellResult, rates: Mapping[Count, Rate]) -> CellResult:
    """A draft count's verdict is that of tokens per second: its windows take longer in any case."""
    rate = rates.get(cell.cell.drafts or 0)
    if rate is None or cell.verdict in (Verdict.INVALID, Verdict.INEFFECTIVE):
        return cell
    sure, verdict = rate.ratio, rate.verdict
    if cell.nwor_mode != NworMode.OFF:
        if cell.interleaved is None:  # its values were not compared
            return cell
        sure, verdict = rate.staged, rate.stage_verdict or str(Verdict.NOT_MEASURED)
    value = None if sure is None else Interval.unbounded(sure.value, sure.count)
    reason = cell.reason if sure is None else None
    return replace(cell, verdict=verdict, reason=reason, rate=value, sure_rate=sure)


def noise_floor(cells: Sequence[CellResult]) -> dict[str, Any] | None:
    """The A/A arm's noise floor, for run.json; None if it has no interval.

    `half_width` is half its interval; `floor` is the interval's largest distance from 1. An effect
    below `floor` may be noise. Both are fractions.
    """
    for cell in cells:
        if cell.arm == AA and cell.ratio is not None and cell.ratio.is_bounded:
            return {
                "cell": cell.label,
                "compared": cell.compared,
                "blocks": cell.batches,
                **flat(cell.ratio),
                "half_width": cell.ratio.half_width,
                "floor": cell.ratio.distance,
                "smallest_effect": cell.smallest_effect,
                "verdict": cell.verdict,
                **({} if cell.interleaved is None else {"groups": cell.groups}),
            }
    return None


def _baseline(cells: Sequence[CellData], violations: Mapping[Cell, str]) -> CellData | None:
    """off x off, if its output and counts can be trusted."""
    for cell in cells:
        if cell.is_baseline and cell.parity != Verdict.INVALID and cell.cell not in violations:
            return cell
    return None


def _result(cell: CellData, *, trusted: bool) -> CellResult:
    """Counts and times, not yet compared; `trusted` if the counts add up."""
    return CellResult(
        pair=cell.cell.pair,
        nwor_mode=cell.cell.nwor_mode,
        scv_mode=cell.cell.scv_mode,
        arm=cell.cell.names["arm"],
        batches=len(cell.timed),
        windows=cell.num_windows,
        requests=sum(batch.requests for batch in cell.counted_batches),
        output_tokens=sum(batch.output_tokens for batch in cell.counted_batches),
        counts_from=cell.counts_from,
        parity=cell.parity,
        scv_status=cell.scv_status,
        fallbacks=cell.fallbacks,
        scv_fallbacks=cell.scv_fallbacks,
        **_counts(cell),
        **_bytes(cell),
        **_acceptance(cell),
        **_times(cell, trusted=trusted and cell.parity != Verdict.INVALID),
        ratio=None,
        verdict=OPEN,
    )


def _counts(cell: CellData) -> dict[str, Any]:
    counts = {
        "draft_tokens": cell.draft_tokens,
        "accepted_tokens": cell.accepted_tokens,
        "nwor_total_staged": cell.staged,
        "nwor_total_committed": sum(window.committed_tokens for window in cell.counted),
        "nwor_total_rejected": sum(window.rejected_tokens for window in cell.counted),
        "nwor_stage_operations": sum(window.stage_operations for window in cell.counted),
        # Each token once, however many layers staged it.
        "nwor_unique_tokens": cell.staged,
        "nwor_fallback_count": sum(cell.fallbacks.values()),
        **cell.scv_counters,
    }
    return dict(counts) if cell.counts_from else dict.fromkeys(counts)


def _bytes(cell: CellData) -> dict[str, Any]:
    return {
        "bytes_staged": _known_sum([window.bytes_staged for window in cell.counted]),
        "bytes_committed": _known_sum([window.bytes_committed for window in cell.counted]),
        "bytes_avoided": _known_sum([window.bytes_avoided for window in cell.counted]),
        **{
            name: _known_sum([getattr(window, name) for window in cell.counted])
            for name in ("state_bytes_committed", "state_bytes_avoided")
        },
    }


def _acceptance(cell: CellData) -> dict[str, Any]:
    """Acceptance by position is None or empty unless every window recorded its positions.

    Windows without a draft that vLLM counts (their requests had finished) have none to record.
    """
    drafts, accepted = cell.draft_tokens, cell.accepted_tokens
    length: float | None = None
    rates: tuple[float, ...] = ()
    counted = [w for w in cell.counted if w.draft_tokens > w.uncounted_draft_tokens]
    if counted and all(window.drafts_per_position for window in counted):
        drafted, taken = by_position(counted)
        # Requests with a draft at the first position: a request's windows.
        length = 1 + sum(taken) / drafted[0] if drafted[0] else None
        rates = tuple(_shares(counted))
    return {
        "acceptance_rate": _ratio(accepted, drafts),
        "mean_accepted_per_window": _ratio(accepted, cell.num_windows),
        "acceptance_length": length,
        "acceptance_per_position": rates,
    }


def _times(cell: CellData, *, trusted: bool) -> dict[str, Any]:
    """Times in ms and tokens per second; all None for an INVALID cell."""
    latencies = [batch.latency_ms for batch in cell.timed] if trusted else []
    walls = (window.wall_ms for window in (cell.windows or cell.interleaved) if trusted)
    windows = [wall_ms for wall_ms in walls if wall_ms is not None]
    tokens = sum(batch.output_tokens for batch in cell.timed)
    return {
        "latency_ms_p50": float(np.percentile(latencies, 50)) if latencies else None,
        "latency_ms_p95": float(np.percentile(latencies, 95)) if latencies else None,
        "window_ms_mean": float(np.mean(windows)) if windows else None,
        "tokens_per_s": _ratio(1000 * tokens, sum(latencies)),
        **request_percentiles(cell.timed if trusted else []),
    }


def by_position(windows: Sequence[WindowRecord]) -> tuple[list[int], list[int]]:
    """[j]: requests with a draft j over all windows, and those whose draft j was accepted."""
    drafted = [0] * max((len(window.drafts_per_position) for window in windows), default=0)
    accepted = [0] * len(drafted)
    for window in windows:
        for sums, row in (
            (drafted, window.drafts_per_position),
            (accepted, window.accepted_per_position),
        ):
            for position, count in enumerate(row):
                sums[position] += count
    return drafted, accepted


def acceptance_changes(cell: CellData, baseline: CellData) -> list[Interval]:
    """By position, how much larger a cell's share of accepted drafts is than the baseline's, from
    the blocks in which both drafted it."""
    ours, theirs = by_block(cell), by_block(baseline)
    blocks = sorted(ours.keys() & theirs.keys())
    shares = [(_shares(ours[block][1]), _shares(theirs[block][1])) for block in blocks]
    rows = [[a - b for a, b in zip(*both, strict=False)] for both in shares]
    positions = max(map(len, rows), default=0)
    return [mean_of(np.array([row[j] for row in rows if len(row) > j])) for j in range(positions)]


def _shares(windows: Sequence[WindowRecord]) -> list[float]:
    """Share of the drafts that were accepted, by position."""
    return [a / d for d, a in zip(*by_position(windows), strict=True) if d]


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None


def _known_sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


MIN_SAMPLES = {50: 1, 95: 20, 99: 100}
"""Samples that a percentile needs: below, it would be one of the largest values."""

METRICS = ("ttft", "tpot")

PERCENTILES = tuple(f"{metric}_ms_p{point}" for metric in METRICS for point in MIN_SAMPLES)
"""Names of the percentiles in batches.csv, cells.csv and JSON."""


def request_percentiles(batches: Sequence[BatchRecord]) -> dict[str, float | None]:
    """Each of `PERCENTILES` over all samples of the batches; None if these are too few."""
    times = [batch.request_times for batch in batches if batch.request_times is not None]
    samples = {
        metric: np.array([ms for t in times for ms in getattr(t, f"{metric}_ms")], dtype=float)
        for metric in METRICS
    }
    return {
        f"{metric}_ms_p{point}": float(np.percentile(samples[metric], point))
        if len(samples[metric]) >= least
        else None
        for metric in METRICS
        for point, least in MIN_SAMPLES.items()
    }
