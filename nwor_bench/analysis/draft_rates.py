"""Tokens per second of each draft count over those of k = 0, from times and tokens. Pure.

    log rate(k) = log tokens of a request in a window(k) - log time of a window(k) / time(0)

Errors of tokens and times are independent and are added with Welch's degrees of freedom.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import exp
from typing import Protocol

from nwor_bench.analysis.statistics import SIGNIFICANCE, verdict
from nwor_bench.instruments.robust import Estimate, RatioInterval, t_quantile
from nwor_bench.records.cell import ADAPTIVE


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
    """Groups of windows behind the time; blocks if each draft count has an engine."""
    stage_ratio: float | None = None
    """Tokens per second staged over the same draft count in mode off; None if that did not run."""
    stage_low: float | None = None
    """As `low`, for the staged counts."""
    stage_high: float | None = None
    stage_verdict: str | None = None
    stage_groups: int | None = None
    """Groups of windows behind `stage_ratio`."""
    adaptive: bool = False
    """vLLM decides how many of `drafts` drafts a request verifies."""

    @property
    def count(self) -> int:
        """`drafts`, or ADAPTIVE."""
        return ADAPTIVE if self.adaptive else self.drafts


@dataclass(frozen=True)
class Worth:
    """Which draft counts pay."""

    rates: tuple[Rate, ...]
    """By batch size, then draft count; k = 0 is left out."""
    best: Mapping[int, int]
    """Draft count to use at each batch size at which one was measured; a larger one only if its
    interval over it excludes 1."""
    texts: int
    """Different prompts behind the tokens."""
    noise: Mapping[int, tuple[float, float, float]]
    """k = 0 against itself at each batch size: the ratio of times and its 95 % interval."""
    least: Mapping[int, int] = field(default_factory=dict)
    """The smallest batch size of each class, by its largest, if classes were measured."""

    best_staged: Mapping[int, int] = field(default_factory=dict)
    """As `best` if the server stages; empty if no count was staged."""

    by_engines: bool = False
    """Each draft count had an engine of its own: none changed its count."""

    @property
    def unmeasured(self) -> list[int]:
        """Batch sizes at which no draft count has a ratio."""
        return sorted({rate.requests for rate in self.rates} - self.best.keys())

    def sizes(self, requests: int) -> str:
        """`8`, or `5-8` if that is a class of batch sizes."""
        least = self.least.get(requests, requests)
        return str(requests) if least == requests else f"{least}-{requests}"

    @property
    def schedule(self) -> list[list[int]]:
        """`schedule_of` the best counts."""
        return schedule_of(self.best, self.least)

    @property
    def staged_schedule(self) -> list[list[int]]:
        """The same of a server that stages."""
        return schedule_of(self.best_staged, self.least)


def schedule_of(best: Mapping[int, int], least: Mapping[int, int]) -> list[list[int]]:
    """[from, to, drafts] of batch sizes, as vLLM takes it. Between two measured sizes the smaller
    of their counts, below the smallest its own; vLLM goes on with the last one above the largest.

    Args:
        best: draft count by batch size, or by a class's largest.
        least: the smallest size of each class.
    """
    sizes = sorted(best)
    ranges: list[list[int]] = []
    begin = 1
    for size, coming in zip_longest(sizes, sizes[1:]):
        ranges.append([begin, size, best[size]])
        begin = size + 1
        first = begin if coming is None else least.get(coming, coming)
        if coming is not None and first > begin:
            ranges.append([begin, first - 1, min(best[size], best[coming])])
            begin = first
    merged: list[list[int]] = []
    for first, last, drafts in ranges:
        if merged and merged[-1][2] == drafts:
            merged[-1][1] = last
        else:
            merged.append([first, last, drafts])
    return merged


class Tokens(Protocol):
    """Tokens of a request in a window, by draft count."""

    def mean(self, k: int) -> float | None:
        """Tokens at this draft count; None if they are not known."""

    def difference(self, k: int, other: int) -> Estimate | None:
        """Log tokens at k over those at another count; None if they are not known."""


@dataclass(frozen=True)
class AtSize:
    """What was measured at one batch size, or in one class of them."""

    requests: int
    """The class's largest size."""
    least: int
    """Its smallest."""
    times: Mapping[int | None, Estimate]
    """Log time of a window over that at k = 0 by draft count; None: k = 0 against itself."""
    tokens: Tokens
    staged: Mapping[int, Estimate] = field(default_factory=dict)
    """Log time of a staged window over that of the same count in mode off."""


def worth_at(sizes: Sequence[AtSize], counts: Sequence[int], texts: int) -> Worth:
    """What pays at each batch size.

    Args:
        counts: that were compared, in order, without 0; ADAPTIVE last.
        texts: different prompts behind the tokens.
    """
    rates, best, noise, best_staged = [], {}, {}, {}
    for own in sorted(sizes, key=lambda each: each.requests):
        aa, floor = own.times.get(None), None
        if aa is not None:
            half = aa.half_width()
            noise[own.requests] = (exp(aa.value), exp(aa.value - half), exp(aa.value + half))
            floor = max(abs(bound - 1) for bound in noise[own.requests])
        times = {0: _NONE} | {k: t for k, t in own.times.items() if k}
        for k in counts:
            rate = _rate(own.requests, k, own.tokens, times, len(counts))
            if k == ADAPTIVE:
                rate = replace(rate, drafts=max(counts), adaptive=True)
            over = own.staged.get(k)
            rates.append(rate if over is None else _with_stage(rate, over, floor, len(counts)))
        if any(rate.ratio is not None for rate in rates if rate.requests == own.requests):
            best[own.requests] = _best(own.tokens, times, counts)
        if own.staged:
            both = {k: added(times[k], over) for k, over in own.staged.items() if k in times}
            if both:
                best_staged[own.requests] = _best(own.tokens, {0: _NONE, **both}, counts)
    least = {own.requests: own.least for own in sizes if own.least < own.requests}
    return Worth(tuple(rates), best, texts, noise, least, best_staged)


_NONE = Estimate(0.0, 0.0, 1, 0)
"""Of the time at k = 0 over itself."""


def _best(tokens: Tokens, times: Mapping[int, Estimate], counts: Sequence[int]) -> int:
    """The draft count to use; a larger one only if its interval over the smaller excludes 1."""
    chosen = 0
    for k in (count for count in counts if count != ADAPTIVE):
        found = _difference(tokens, times, k, chosen, len(counts))
        if found is not None and found[1] > 0:
            chosen = k
    return chosen


def _with_stage(rate: Rate, time: Estimate, floor: float | None, counts: int) -> Rate:
    """The rate with what staging gives at its draft count, from the log time over mode off's: the
    gate has shown that their tokens are the same."""
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
    value = accepted.value - times[k].value + times[other].value
    found = together(value, [accepted, times[k], times[other]])
    quantile = t_quantile(1 - SIGNIFICANCE / 2 / max(counts, 1), found.degrees)
    half = quantile * found.standard_error
    return value, value - half, value + half


def together(value: float, parts: Sequence[Estimate]) -> Estimate:
    """A sum or difference of independent estimates, with Welch's degrees of freedom."""
    variances = [part.standard_error**2 for part in parts]
    total, spread = sum(variances), zip(variances, parts, strict=True)
    weighed = sum(own**2 / part.degrees for own, part in spread if own)
    return Estimate(value, total**0.5, total**2 / weighed if weighed else 1, parts[0].count)


def added(one: Estimate, other: Estimate) -> Estimate:
    """The sum of independent estimates."""
    found = together(one.value + other.value, [one, other])
    return replace(found, count=min(one.count, other.count))


@dataclass(frozen=True)
class SpanTokens:
    """Tokens of a request in a window, if each draft count ran at times of its own."""

    logs: Mapping[int, Estimate]
    """Log tokens by draft count, without 0."""

    def mean(self, k: int) -> float | None:
        """Tokens at this draft count; None if it has too few spans."""
        found = self.logs.get(k)
        return None if found is None else exp(found.value)

    def difference(self, k: int, other: int) -> Estimate | None:
        """Log tokens at k over those at another count, as if by other requests: what both have in
        common would make the error smaller. None if one has too few spans."""
        known = {0: Estimate(0.0, 0.0, 1, 0), **self.logs}
        if k not in known or other not in known:
            return None
        return together(known[k].value - known[other].value, [known[k], known[other]])
