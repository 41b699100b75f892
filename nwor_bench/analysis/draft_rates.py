"""Tokens per second of each draft count over those of k = 0, from times and tokens. Pure.

    log rate(k) = log tokens of a request in a window(k) - log time of a window(k) / time(0)

Errors of tokens and times are independent and are added with Welch's degrees of freedom.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import copysign, exp
from statistics import fmean
from typing import Any, NamedTuple, Protocol

from nwor_bench.analysis.verdicts import verdict
from nwor_bench.records.cell import (
    ADAPTIVE,
    Count,
    Fixed,
    MethodCount,
    fixed_counts,
    method_of,
    number_of,
)
from nwor_bench.records.types import Verdict
from nwor_bench.stats.interval import ENDS, TWO_SIDED, Interval, combined, flat
from nwor_bench.stats.multiple import at_once


@dataclass(frozen=True)
class Rate:
    """Tokens per second of a draft count over those of k = 0, at one batch size."""

    requests: int
    """Batch size."""
    drafts: int
    """Drafts of a request in a window."""
    ratio: Interval | None
    """Tokens per second over k = 0, valid for all draft counts of this batch size together (95 %,
    Bonferroni); None without tokens or times."""
    verdict: str
    """Verdict on `ratio`; INVALID if the count changed the output."""
    time_ratio: float | None
    """Time of a window over that at k = 0."""
    tokens: float | None
    """Tokens of a request in a window: 1 and the accepted drafts."""
    groups: int
    """Groups of windows behind the time; blocks if each draft count has an engine."""
    staged: Interval | None = None
    """Tokens per second staged over the same draft count in mode off, for all counts together; None
    if that did not run."""
    stage_verdict: str | None = None
    """Verdict on `staged`; None if that did not run."""
    adaptive: bool = False
    """vLLM decides how many of `drafts` drafts a request verifies."""
    method: str | None = None
    """The method that drafts, if the run compares several."""

    @property
    def count(self) -> Count:
        """The draft count that the rate is of."""
        if self.method is not None:
            return MethodCount(self.method, self.drafts)
        return ADAPTIVE if self.adaptive else self.drafts

    @property
    def is_tax(self) -> bool:
        """True for a method that is loaded and drafts nothing: what that costs."""
        return self.method is not None and not self.drafts

    def to_dict(self) -> dict[str, Any]:
        """Flat values for JSON and CSV files."""
        staged = flat(self.staged, ("stage_ratio", "stage_low", "stage_high"))
        groups = None if self.staged is None else self.staged.count
        known = {**vars(self), **flat(self.ratio), **staged, "stage_groups": groups}
        return {name: known[name] for name in RATE_COLUMNS}


def best_rate(rates: Iterable[Rate]) -> tuple[Rate, Interval] | None:
    """The rate with the most tokens per second, and its ratio; None if none has a ratio."""
    known = [(rate, rate.ratio) for rate in rates if rate.ratio is not None]
    return max(known, key=lambda entry: entry[1].value, default=None)


RATE_COLUMNS = (
    *("requests", "drafts", *ENDS, "verdict", "time_ratio", "tokens", "groups"),
    *("stage_ratio", "stage_low", "stage_high", "stage_verdict", "stage_groups", "adaptive"),
    "method",
)


Next = tuple[Fixed, Interval, Verdict]
"""The best of the other methods and plain decoding, tokens per second of the best over it, and the
verdict on that."""


@dataclass(frozen=True)
class Worth:
    """Which draft counts pay."""

    rates: tuple[Rate, ...]
    """By batch size, then draft count; k = 0 is left out."""
    best: Mapping[int, Fixed]
    """Draft count to use at each batch size at which that is known; a larger one only if its gain
    over the smaller is sure: its interval excludes 1, and it exceeds the noise. Of several methods
    the one with the most tokens per second."""
    texts: int
    """Different prompts behind the tokens."""
    noise: Mapping[int, Interval]
    """k = 0 against itself at each batch size: the ratio of times."""
    least: Mapping[int, int] = field(default_factory=dict)
    """The smallest batch size of each class, by its largest, if classes were measured."""

    best_staged: Mapping[int, Fixed] = field(default_factory=dict)
    """`best` if the server stages; empty if no count was staged."""

    by_engines: bool = False
    """Each draft count had an engine of its own: none changed its count."""

    best_fixed: Fixed | None = None
    """One draft count for all batch sizes at which every count was measured; None without one."""

    next_best: Mapping[int, Next] = field(default_factory=dict)
    """The best of the other methods at each batch size; empty if the run has one method."""

    @property
    def ratios(self) -> dict[tuple[int, Count], Interval | None]:
        """Tokens per second over k = 0, by batch size and draft count."""
        return {(rate.requests, rate.count): rate.ratio for rate in self.rates}

    @property
    def ran(self) -> list[int]:
        """Batch sizes that ran, also those of which the best is not known."""
        return sorted({rate.requests for rate in self.rates})

    def sizes(self, requests: int) -> str:
        """`8`, or `5-8` if that is a class of batch sizes."""
        least = self.least.get(requests, requests)
        return str(requests) if least == requests else f"{least}-{requests}"

    @property
    def schedule(self) -> list[list[int]]:
        """`ranges_of` the best counts."""
        return ranges_of(self.best, self.least)


def ranges_of(best: Mapping[int, Fixed], least: Mapping[int, int]) -> list[list[int]]:
    """[from, to, drafts] of batch sizes, as vLLM takes it. Between two measured sizes the smaller
    of their counts, below the smallest its own; vLLM goes on with the last one above the largest.

    Args:
        best: draft count by batch size, or by a class's largest.
        least: the smallest size of each class.
    """
    sizes, numbers = sorted(best), {size: number_of(count) for size, count in best.items()}
    ranges: list[list[int]] = []
    begin = 1
    for size, coming in zip_longest(sizes, sizes[1:]):
        ranges.append([begin, size, numbers[size]])
        begin = size + 1
        first = begin if coming is None else least.get(coming, coming)
        if coming is not None and first > begin:
            ranges.append([begin, first - 1, min(numbers[size], numbers[coming])])
            begin = first
    merged: list[list[int]] = []
    for first, last, drafts in ranges:
        if merged and merged[-1][2] == drafts:
            merged[-1][1] = last
        else:
            merged.append([first, last, drafts])
    return merged


class TokensByCount(Protocol):
    """Tokens of a request in a window, by draft count."""

    def mean(self, k: Count) -> float | None:
        """Tokens at this draft count; None if they are not known."""

    def difference(self, k: Count, other: Fixed) -> Interval | None:
        """Log tokens at k over those at another count; None if they are not known."""


class CountArm(NamedTuple):
    """What one batch size is measured for."""

    drafts: Count | None
    """None: k = 0 against itself."""
    staged: bool = False


@dataclass(frozen=True)
class AtSize:
    """What was measured at one batch size, or in one class of them."""

    requests: int
    """The class's largest size."""
    least: int
    """The class's smallest size."""
    times: Mapping[Count | None, Interval]
    """Log time of a window over that at k = 0 by draft count; None: k = 0 against itself."""
    tokens: TokensByCount
    staged: Mapping[Count, Interval] = field(default_factory=dict)
    """Log time of a staged window over that of the same count in mode off."""
    refused: Mapping[CountArm, str] = field(default_factory=dict)
    """Verdicts of cells that have no time to trust; INVALID: it failed its checks."""

    @property
    def floor(self) -> float | None:
        """Differences up to it may be noise (`noise_floor`); None if that was not measured."""
        aa = self.times.get(None)
        return None if aa is None else noise_floor(aa)


def noise_floor(aa: Interval | None) -> float:
    """The farther end of the 95 % interval of k = 0 over itself, as a log; 0 without one."""
    return 0.0 if aa is None else abs(aa.value) + aa.half_at(TWO_SIDED)


MIN_JUDGED = 5
"""Fewest groups of windows, or blocks, for a verdict. In fewer a steady drift does not show as
autocorrelation (`stats.paired.variance_inflation`): it would pass as independent scatter."""


def worth_at(sizes: Sequence[AtSize], counts: Sequence[Count], texts: int) -> Worth:
    """What pays at each batch size.

    Args:
        counts: that were compared, in order, without 0; ADAPTIVE last.
        texts: different prompts behind the tokens.
    """
    rates, best, noise, best_staged, measured = [], {}, {}, {}, []
    next_best: dict[int, Next] = {}
    for size in sorted(sizes, key=lambda size: size.requests):
        aa = size.times.get(None)
        if aa is not None:
            noise[size.requests] = aa.exp()
        size_rates = [_rate(size, k, counts) for k in counts]
        rates += size_rates
        chosen = _best([size], counts)
        other = None if chosen is None else _next(size, chosen, counts)
        if chosen is None or (other is not None and other[1].high < 1):
            continue  # not known: too few groups, of all counts or of one that is ahead
        best[size.requests] = chosen
        if other is not None:
            next_best[size.requests] = other
        if all(r.ratio is not None for r in size_rates if r.verdict != Verdict.INVALID):
            measured.append(size)
        both = {k: (size.times[k], over) for k, over in size.staged.items() if k in size.times}
        if both:
            times: dict[Count | None, Interval] = {} if aa is None else {None: aa}
            times |= {k: combined(a.value + b.value, [a, b]) for k, (a, b) in both.items()}
            if (staged := _best([replace(size, times=times)], counts)) is not None:
                best_staged[size.requests] = staged
    least = {size.requests: size.least for size in sizes if size.least < size.requests}
    return Worth(
        tuple(rates), best, texts, noise, least, best_staged,
        best_fixed=_best(measured, counts), next_best=next_best,
    )  # fmt: skip


_NONE = Interval(0.0, 0.0, 0.0, count=0, p_value=1.0, error=0.0, degrees=1)
"""Log of the time at k = 0 over itself."""


def _best(sizes: Sequence[AtSize], counts: Sequence[Count]) -> Fixed | None:
    """The draft count to use at all of these sizes: of each method a larger one only if its gain
    over the smaller is sure, and of methods that pay the one with the highest gain. None if no
    count has what a verdict needs."""
    chosen: dict[str | None, Fixed] = {}
    floors = [size.floor for size in sizes if size.floor is not None]
    for k in fixed_counts(counts):
        now = chosen.get(method_of(k), 0)
        gain = _mean_gain(sizes, k, now, len(counts))
        if k and gain is not None and gain.count >= MIN_JUDGED and len(floors) == len(sizes):
            pays = _verdict(gain, fmean(floors), small_counts=True) == Verdict.FASTER
            chosen[method_of(k)] = k if pays else now
    if not chosen:
        return None
    gains = [(k, _mean_gain(sizes, k, 0, len(counts))) for k in chosen.values() if k]
    known = [(gain.value, k) for k, gain in gains if gain is not None]
    return max(known, key=lambda entry: entry[0], default=(0.0, 0))[1]


def _mean_gain(sizes: Sequence[AtSize], k: Count, other: Fixed, counts: int) -> Interval | None:
    """The mean gain of k over another count (of logs), with the mean of the bounds: the sizes'
    tokens are the same texts', so their errors do not average out. None if one lacks it."""
    gains = [_gain(size, k, other, counts) for size in sizes]
    known = [gain for gain in gains if gain is not None]
    if not known or len(known) < len(sizes):
        return None
    return replace(
        min(known, key=lambda gain: gain.count),
        value=fmean(gain.value for gain in known),
        low=fmean(gain.low for gain in known),
        high=fmean(gain.high for gain in known),
    )


def _next(size: AtSize, best: Fixed, counts: Sequence[Count]) -> Next | None:
    """The best count of the other methods and plain decoding; None for a run of one method."""
    fixed = fixed_counts(counts)
    if not any(map(method_of, fixed)):
        return None
    drafting = (k for k in fixed if k and (not best or method_of(k) != method_of(best)))
    others = [k for k in (0, *drafting) if k != best]
    gains = {k: gain for k in others if (gain := _gain(size, best, k, len(counts))) is not None}
    if not gains:
        return None
    count, gain = min(gains.items(), key=lambda entry: entry[1].value)
    return count, gain.exp(), _verdict(gain, size.floor, small_counts=True)


def _verdict(gain: Interval, floor: float | None, *, small_counts: bool = False) -> Verdict:
    """`verdicts.verdict` of the gain; AMBIGUOUS without a floor or below MIN_JUDGED."""
    if floor is None or gain.count < MIN_JUDGED:
        return Verdict.AMBIGUOUS
    noise = abs(exp(copysign(floor, -gain.value)) - 1)
    return verdict(gain.exp().inverse(), noise_floor=noise, small_counts=small_counts)


def _rate(size: AtSize, k: Count, counts: Sequence[Count]) -> Rate:
    """Rate and verdict of one count at one size, in mode off and staged."""
    time, gain = size.times.get(k), _gain(size, k, 0, len(counts))
    outcome = Verdict.NOT_MEASURED if gain is None else _verdict(gain, size.floor)
    rate = Rate(
        requests=size.requests,
        drafts=max(map(number_of, counts), default=0) if k is ADAPTIVE else number_of(k),
        ratio=None if gain is None else gain.exp(),
        verdict=size.refused.get(CountArm(k), str(outcome)),
        time_ratio=None if time is None else exp(time.value),
        tokens=size.tokens.mean(k),
        groups=0 if time is None else time.count,
        stage_verdict=size.refused.get(CountArm(k, staged=True)),
        adaptive=k is ADAPTIVE,
        method=method_of(k),
    )
    if (over := size.staged.get(k)) is None:
        return rate
    # The gate has shown that staged and not give the same tokens.
    wide = at_once(over, len(counts))
    staged = replace(wide, value=-wide.value, low=-wide.high, high=-wide.low)
    verdict_of_it = str(_verdict(staged, size.floor, small_counts=True))
    return replace(rate, staged=staged.exp(), stage_verdict=verdict_of_it)


def _gain(size: AtSize, k: Count, other: Fixed, counts: int) -> Interval | None:
    """The gain of k over another count, with the interval that holds for all counts together; None
    if a part was not measured."""
    times = {0: _NONE, **size.times}
    if k not in times or other not in times:
        return None
    accepted = size.tokens.difference(k, other)
    if accepted is None:
        return None
    value = accepted.value - times[k].value + times[other].value
    gain = combined(value, [accepted, times[k], times[other]])
    groups = min(times[j].count for j in (k, other) if j != 0)
    return replace(at_once(gain, counts), count=groups)


@dataclass(frozen=True)
class SpanTokens:
    """Tokens of a request in a window, if each draft count ran at times of its own."""

    logs: Mapping[Count, Interval]
    """Log tokens by draft count, without 0."""

    def mean(self, k: Count) -> float | None:
        """Tokens at this draft count; None if it has too few spans."""
        log_tokens = self.logs.get(k)
        return None if log_tokens is None else exp(log_tokens.value)

    def difference(self, k: Count, other: Fixed) -> Interval | None:
        """Log tokens at k over those at another count, as if by other requests: what both have in
        common would make the error smaller. None if one has too few spans."""
        known = {0: Interval.of(0.0, 0.0, 1, 0), **self.logs}
        if k not in known or other not in known:
            return None
        return combined(known[k].value - known[other].value, [known[k], known[other]])
