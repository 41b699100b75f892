"""Tokens per second of each draft count over those of k = 0, by batch size. Pure.

    log rate(k) = log tokens of a request in a window(k) - log time of a window(k) / time(0)

Times are compared in groups of neighbouring windows. Tokens come from whole batches at one draft
count, because a window begins where the one before it ended: at k = 4 fewer begin inside easy text
than at k = 1, so the tokens of windows of an interleaved batch are not those of a server that runs
one k. At temperature 0 all counts run the same text, and a request's acceptance does not depend on
who runs beside it: requests of all batch sizes are pooled, each text once. The error of tokens is
a jackknife over requests, that of times the groups', added with Welch's degrees of freedom.
Synthetic acceptance is what its rates say, without an error.

A staged count is compared with the same count in mode off, in groups of both. The gate has shown
that their tokens are the same, so the ratio of tokens/s is that of times.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, hypot
from statistics import median

import numpy as np

from nwor_bench.analysis.draft_tokens import Tokens, named_rates, requests_of
from nwor_bench.analysis.effects import DEVICE_MS, PairEffect
from nwor_bench.analysis.statistics import SIGNIFICANCE, verdict
from nwor_bench.instruments.robust import Estimate, RatioInterval, robust_location, t_quantile
from nwor_bench.records.cell import NworMode
from nwor_bench.records.store import RunData
from nwor_bench.records.types import WindowRecord

MIN_GROUPS = 3
"""Fewest groups of windows of a draft count: below ten their mean, from there Huber's location."""

MIN_DEGREES = 3
"""Fewest degrees of freedom of the groups' scatter, all counts of a batch size together."""


LEAST_FULL = 0.75
"""Share of a batch's requests that a group needs."""


def batch_size(run: RunData) -> int:
    """Requests of each batch of a run."""
    return int((run.header.scenario or {})["requests"])


@dataclass(frozen=True)
class Measured:
    """One run of draft counts: its batch size, its records and what its groups give."""

    run: RunData
    effects: Sequence[PairEffect]

    @property
    def requests(self) -> int:
        """Requests of a batch."""
        return batch_size(self.run)


@dataclass(frozen=True)
class Rate:
    """Tokens per second of a draft count over those of k = 0, at one batch size."""

    requests: int
    drafts: int
    ratio: float | None
    """None without tokens or times."""
    low: float | None
    """The interval holds for all draft counts of its batch size together (95 %, Bonferroni)."""
    high: float | None
    verdict: str
    time_ratio: float | None
    """Time of a window over that at k = 0."""
    tokens: float | None
    """Tokens of a request in a window: 1 and the accepted drafts."""
    groups: int
    """Groups of windows behind the time."""
    stage_ratio: float | None = None
    """Tokens per second staged over the same draft count in mode off; None if that did not run."""
    stage_low: float | None = None
    """As `low`, for the staged counts."""
    stage_high: float | None = None
    stage_verdict: str | None = None
    stage_groups: int | None = None
    """Groups of windows behind `stage_ratio`."""


@dataclass(frozen=True)
class Worth:
    """Which draft counts pay."""

    rates: tuple[Rate, ...]
    """By batch size, then draft count; k = 0 is left out."""
    best: Mapping[int, int]
    """Draft count to use at each batch size; a larger one only if its interval over it excludes
    1."""
    texts: int
    """Different requests behind the tokens."""
    noise: Mapping[int, tuple[float, float, float]]
    """k = 0 against itself at each batch size: the ratio of times and its 95 % interval."""
    best_staged: Mapping[int, int] = field(default_factory=dict)
    """As `best` if the server stages; empty if no count was staged."""

    @property
    def schedule(self) -> list[list[int]]:
        """`schedule_of` the best counts."""
        return schedule_of(self.best)


def schedule_of(best: Mapping[int, int]) -> list[list[int]]:
    """[from, to, drafts] of batch sizes, as vLLM takes it. Between two measured sizes the smaller
    of their counts; vLLM goes on with the last one above the largest."""
    sizes = sorted(best)
    ranges: list[list[int]] = []
    begin = 1
    for size, coming in zip(sizes, [*sizes[1:], None], strict=True):
        ranges.append([begin, size, best[size]])
        begin = size + 1
        if coming is not None and coming > begin:
            ranges.append([begin, coming - 1, min(best[size], best[coming])])
            begin = coming
    merged: list[list[int]] = []
    for first, last, drafts in ranges:
        if merged and merged[-1][2] == drafts:
            merged[-1][1] = last
        else:
            merged.append([first, last, drafts])
    return merged


def worth_of(runs: Sequence[Measured]) -> Worth:
    """What the runs of one pair say; batch sizes must differ."""
    counts = sorted({c.drafts for m in runs for b in m.run.batches if (c := b.cell).drafts})
    requests = [pair for own in runs for pair in requests_of(own.run, counts)]
    tokens = Tokens(requests, counts, named_rates(runs[0].run))
    rates, best, noise, best_staged = [], {}, {}, {}
    for own in sorted(runs, key=lambda each: each.requests):
        size, times, floor = own.requests, times_of(own), None
        aa = times.pop(_AGAIN, None)
        if aa is not None:
            half = aa.half_width()
            noise[size] = (exp(aa.value), exp(aa.value - half), exp(aa.value + half))
            floor = max(abs(bound - 1) for bound in noise[size])
        stock = {0: _NONE} | {k: time for (k, staged), time in times.items() if k and not staged}
        over = {k: time for (k, staged), time in times.items() if k and staged}
        for k in counts:
            rate = _rate(size, k, tokens, stock, len(counts))
            rates.append(_with_stage(rate, over[k], floor, len(counts)) if k in over else rate)
        best[size] = _best(tokens, stock, counts)
        if over:
            both = {k: added(stock[k], time) for k, time in over.items() if k in stock}
            best_staged[size] = _best(tokens, {0: _NONE, **both}, counts)
    return Worth(tuple(rates), best, len(tokens), noise, best_staged)


_NONE = Estimate(0.0, 0.0, 1, 0)
"""Of the time at k = 0 over itself."""


def _best(tokens: Tokens, times: Mapping[int, Estimate], counts: Sequence[int]) -> int:
    """The draft count to use; a larger one only if its interval over the smaller excludes 1."""
    chosen = 0
    for k in counts:
        found = _difference(tokens, times, k, chosen, len(counts))
        if found is not None and found[1] > 0:
            chosen = k
    return chosen


def added(one: Estimate, other: Estimate) -> Estimate:
    """The sum of independent estimates, with Welch's degrees of freedom."""
    error = hypot(one.standard_error, other.standard_error)
    parts = [(e.standard_error**2, e.degrees) for e in (one, other) if e.standard_error]
    degrees = error**4 / sum(v**2 / n for v, n in parts) if parts else 1
    return Estimate(one.value + other.value, error, degrees, min(one.count, other.count))


def _with_stage(rate: Rate, time: Estimate, floor: float | None, counts: int) -> Rate:
    """The rate with what staging gives at its draft count, from the log time over mode off's."""
    half = t_quantile(1 - SIGNIFICANCE / 2 / max(counts, 1), time.degrees) * time.standard_error
    low, high = exp(time.value - half), exp(time.value + half)
    interval = RatioInterval(exp(time.value), low, high, time.count)
    found = verdict(interval, noise_floor=floor, small_counts=True)
    return replace(
        rate, stage_ratio=1 / interval.ratio, stage_low=1 / high, stage_high=1 / low,
        stage_verdict=str(found), stage_groups=time.count,
    )  # fmt: skip


def _rate(
    requests: int, k: int, tokens: Tokens, times: Mapping[int, Estimate], counts: int
) -> Rate:
    time = times.get(k)
    found = _difference(tokens, times, k, 0, counts)
    per_token = None
    if found is not None and time is not None:  # `verdict` is of times
        value, low, high = found
        per_token = RatioInterval(exp(-value), exp(-high), exp(-low), time.count)
    return Rate(
        requests=requests,
        drafts=k,
        ratio=None if found is None else exp(found[0]),
        low=None if found is None else exp(found[1]),
        high=None if found is None else exp(found[2]),
        verdict=str(verdict(per_token)),
        time_ratio=None if time is None else exp(time.value),
        tokens=tokens.mean(k),
        groups=0 if time is None else time.count,
    )


def _difference(
    tokens: Tokens, times: Mapping[int, Estimate], k: int, other: int, counts: int
) -> tuple[float, float, float] | None:
    """Log rate of k over another count with the interval that holds for all counts; None if a
    part was not measured."""
    accepted = tokens.difference(k, other)
    if accepted is None or k not in times or other not in times:
        return None
    parts = [accepted, times[k], times[other]]
    value = accepted.value - times[k].value + times[other].value
    variances = [part.standard_error**2 for part in parts]
    total = sum(variances)
    if not total:
        return value, value, value
    spread = zip(variances, parts, strict=True)
    degrees = total**2 / sum(own**2 / part.degrees for own, part in spread if own)
    half = t_quantile(1 - SIGNIFICANCE / 2 / max(counts, 1), degrees) * total**0.5
    return value, value - half, value + half


Arm = tuple[int | None, bool]
"""A draft count, and whether it is staged."""

_AGAIN: Arm = (None, False)
"""k = 0 against itself."""


def times_of(own: Measured) -> dict[Arm, Estimate]:
    """Log time of a window over that at k = 0, of a staged one over the same count in mode off.

    Below ten groups their scatter is that of all counts of the batch size, which few groups show
    better than a count's own. At the end of a batch some requests have finished: groups with most
    of them count.
    """
    logs: dict[Arm, list[float]] = {}
    for effect in own.effects:
        if effect.pair.is_over_stock:
            treated = effect.pair.treated
            full = [g for g in effect.groups if g.num_reqs >= LEAST_FULL * own.requests]
            both = [g.device if effect.clock == DEVICE_MS else g.host for g in full]
            known = [value for value in both if value is not None]
            logs[treated.drafts, treated.stock_twin is not None] = known
    degrees = sum(max(len(values) - 1, 0) for values in logs.values())
    squares = sum(len(values) * float(np.var(values)) for values in logs.values() if values)
    found = {}
    for k, values in logs.items():
        estimate = robust_location(values)
        if estimate is None and len(values) >= MIN_GROUPS and degrees >= MIN_DEGREES:
            error = (squares / degrees / len(values)) ** 0.5
            estimate = Estimate(float(np.mean(values)), error, degrees, len(values))
        if estimate is not None:
            found[k] = estimate
    return found


@dataclass(frozen=True)
class WindowTime:
    """Median times of a window, in ms: on a GPU those of its device. There the host runs a step
    ahead, and its time from step to step is that of another window."""

    requests: int
    drafts: int
    staged: bool
    window_ms: float
    target_ms: float | None
    """The target's forward and sampling; the rest is the drafter, the commit and the host. None if
    they were not timed apart."""


def window_times(runs: Sequence[RunData]) -> list[WindowTime]:
    """By batch size and draft count, from windows that draft as many as they verify."""
    found: dict[tuple[int, int, bool], list[WindowRecord]] = {}
    for run in runs:
        size = batch_size(run)
        for window in run.windows:
            staged = window.cell.nwor_mode is not NworMode.OFF
            dropped = 0 if staged else (window.run_length or 0) - 1  # as `analysis.groups`
            inside = window.group is not None and window.position != dropped
            if inside and window.num_reqs == size and _whole_ms(window):
                found.setdefault((size, window.cell.drafts or 0, staged), []).append(window)
    times = []
    for (size, k, staged), own in sorted(found.items()):
        apart = [w.forward_ms + (w.sample_ms or 0.0) for w in own if w.forward_ms is not None]
        target = median(apart) if apart else None
        times.append(WindowTime(size, k, staged, median(map(_whole_ms, own)), target))
    return times


def _whole_ms(window: WindowRecord) -> float:
    return window.device_ms or window.wall_ms or 0.0
