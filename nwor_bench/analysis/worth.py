"""What the runs of one pair say of draft counts, by batch size: times, tokens and rates. Pure.

Times are compared in groups of neighbouring windows. Tokens come from whole batches at one draft
count, because a window begins where the one before it ended: at k = 4 fewer begin inside easy text
than at k = 1, so the tokens of windows of an interleaved batch are not those of a server that runs
one k. At temperature 0 all counts run the same text, and a request's acceptance does not depend on
who runs beside it: requests of all batch sizes are pooled, each prompt once (`draft_tokens`). The
error of tokens is a jackknife over prompts, that of times the groups'. Synthetic acceptance is what
its rates say, without an error. Adaptive verification accepts as much as its batch size lets it
(`engine_times`).

A staged count is compared with the same count in mode off, in groups of both. The gate has shown
that their tokens are the same, so the ratio of tokens/s is that of times.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from nwor_bench.analysis.draft_rates import AtSize, CountArm, Worth, noise_floor, worth_at
from nwor_bench.analysis.draft_tokens import PromptTokens, named_rates, requests_of
from nwor_bench.analysis.effects import DEVICE_MS, PairEffect
from nwor_bench.analysis.engine_times import adaptive_tokens, block_times
from nwor_bench.records.cell import ADAPTIVE, Cell, NworMode, count_order, fixed_counts
from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult, Phase, Verdict, WindowRecord
from nwor_bench.records.window_order import compared
from nwor_bench.stats.interval import Interval
from nwor_bench.stats.paired import mean_of
from nwor_bench.stats.robust import robust_location

MIN_FULL = 0.75
"""Share of a batch's requests that a group needs."""


def batch_size(run: RunData) -> int:
    """Requests of each batch of a run."""
    return int((run.header.scenario or {})["requests"])


@dataclass(frozen=True)
class Measured:
    """One run of draft counts: its batch size, its records and what its groups give."""

    run: RunData
    effects: Sequence[PairEffect]
    refused: Mapping[CountArm, str] = field(default_factory=dict)
    """See `AtSize`."""

    @property
    def requests(self) -> int:
        """Requests of a batch."""
        return batch_size(self.run)


def refused_arms(cells: Sequence[CellResult]) -> dict[CountArm, str]:
    """Verdicts of cells that have no time to trust: INVALID and INEFFECTIVE ones, and those that
    were not compared with their reference: AMBIGUOUS, as a check that they need did not run, or
    NOT MEASURED, as only the gate ran them."""
    return {
        arm_of(cell.cell): str(Verdict.NOT_MEASURED if _only_checked(cell) else cell.verdict)
        for cell in cells
        if cell.verdict in (Verdict.INVALID, Verdict.INEFFECTIVE)
        or (cell.interleaved is None and cell.compared is None and not cell.cell.is_baseline)
    }


def _only_checked(cell: CellResult) -> bool:
    return cell.verdict == Verdict.AMBIGUOUS and cell.counts_from == Phase.GATE


def arm_of(cell: Cell) -> CountArm:
    """The cell's draft count, and whether it is staged."""
    return CountArm(cell.drafts, cell.stock_twin is not None)


def broken_arms(runs: Sequence[Measured]) -> set[CountArm]:
    """What failed its checks in any of the runs: it is INVALID at every batch size, because wrong
    output at one shows a fault that another may have without showing it."""
    return {arm for data in runs for arm, why in data.refused.items() if why == Verdict.INVALID}


def worth_of(runs: Sequence[Measured]) -> Worth:
    """What the runs of one pair say, by batch size; those of one size are groups of engines, each
    with plain decoding of its own."""
    ran = {batch.cell.drafts for data in runs for batch in data.run.batches}
    known = [k for k in ran if k is not None and k != 0]
    counts, broken = sorted(known, key=count_order), broken_arms(runs)
    fixed = [k for k in fixed_counts(counts) if CountArm(k) not in broken]
    invalid = dict.fromkeys(broken, str(Verdict.INVALID))
    by_size: dict[int, list[Measured]] = {}
    for data in (replace(one, refused={**one.refused, **invalid}) for one in runs):
        by_size.setdefault(data.requests, []).append(data)
    records = {size: [data.run for data in group] for size, group in by_size.items()}
    requests = [pair for own in records.values() for pair in requests_of(own[0], fixed, *own[1:])]
    rates, scenario = named_rates(runs[0].run), runs[0].run.header.scenario or {}
    sizes = []
    for size, group in by_size.items():
        adaptive = None if CountArm(ADAPTIVE) in broken else adaptive_tokens(*records[size])
        tokens = PromptTokens(requests, fixed, rates, scenario.get("max_new_tokens"), adaptive)
        every = sorted(map(times_of, group), key=lambda own: noise_floor(own.get(CountArm(None))))
        times = {arm: time for own in every for arm, time in own.items()}  # the widest A/A's
        stock = {k: time for (k, staged), time in times.items() if not staged}
        staged_too = {k: time for (k, staged), time in times.items() if k and staged}
        arms = {arm_of(batch.cell) for run in records[size] for batch in run.batches}
        untimed = dict.fromkeys(arms - times.keys(), str(Verdict.NOT_MEASURED))
        untimed |= {arm: why for data in group for arm, why in data.refused.items()}
        sizes.append(AtSize(size, size, stock, tokens, staged_too, untimed))
    worth = worth_at(sizes, counts, len(dict(requests)))
    return replace(worth, by_engines=runs[0].run.header.spec.engines)


def times_of(data: Measured) -> dict[CountArm, Interval]:
    """Log time of a window over that at k = 0, of a staged one over the same count in mode off;
    without refused arms, and those that would be compared with one.

    At the end of a batch some requests have finished: groups with most of them count. Draft counts
    with an engine each have blocks instead.
    """
    times: dict[CountArm, Interval] = {}
    if data.run.header.spec.engines:
        times = {CountArm(k): time for k, time in block_times(data.run).items()}
    for effect in data.effects:
        if effect.pair.is_over_stock:
            full = [g for g in effect.groups if g.num_reqs >= MIN_FULL * data.requests]
            both = [g.device if effect.clock == DEVICE_MS else g.host for g in full]
            known = [value for value in both if value is not None]
            if known:
                located = robust_location(known) or mean_of(np.array(known))
                times[arm_of(effect.pair.treated)] = located
    return {
        arm: time
        for arm, time in times.items()
        if time.is_bounded
        and not {arm, CountArm(arm.drafts if arm.staged else 0)} & data.refused.keys()
    }


@dataclass(frozen=True)
class WindowTime:
    """Median times of a window, in ms: on a GPU those of its device. There the host runs a step
    ahead, and its time from step to step is that of another window."""

    requests: int
    drafts: int
    staged: bool
    window_ms: float
    """Median time of a window."""
    target_ms: float | None
    """The target's forward and sampling; the rest is the drafter, the commit and the host. None if
    they were not timed apart."""


def window_times(runs: Sequence[Measured]) -> list[WindowTime]:
    """By batch size and draft count, from windows that draft as many as they verify."""
    windows: dict[tuple[int, int, bool], list[WindowRecord]] = {}
    broken = broken_arms(runs)
    for data in runs:
        size = data.requests
        for window in data.run.windows:
            staged = window.cell.nwor_mode is not NworMode.OFF
            used = compared(window.run_length or 0, counts=not staged)
            inside = window.group is not None and window.position in used
            arm = window.cell.fixed_drafts, staged
            if inside and window.num_reqs == size and arm not in broken and _whole_ms(window):
                windows.setdefault((size, *arm), []).append(window)
    times = []
    for (size, k, staged), every in sorted(windows.items()):
        apart = [w.forward_ms + (w.sample_ms or 0.0) for w in every if w.forward_ms is not None]
        target = median(apart) if apart else None
        times.append(WindowTime(size, k, staged, median(map(_whole_ms, every)), target))
    return times


def _whole_ms(window: WindowRecord) -> float:
    return window.device_ms or window.wall_ms or 0.0
