"""Tokens per second of each draft count over those of k = 0, from times and tokens. Pure.

    log rate(k) = log tokens of a request in a window(k) - log time of a window(k) / time(0)

Errors of tokens and times are independent and are added with Welch's degrees of freedom.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Protocol

from nwor_bench.analysis.statistics import SIGNIFICANCE, verdict
from nwor_bench.instruments.robust import Estimate, RatioInterval, t_quantile


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
    least: Mapping[int, int] = field(default_factory=dict)
    """The smallest batch size of each class, by its largest, if classes were measured."""

    def sizes(self, requests: int) -> str:
        """`8`, or `5-8` if that is a class of batch sizes."""
        least = self.least.get(requests, requests)
        return str(requests) if least == requests else f"{least}-{requests}"

    @property
    def schedule(self) -> list[list[int]]:
        """[from, to, drafts] of batch sizes, as vLLM takes it. Between two measured sizes the
        smaller of their counts; vLLM goes on with the last one above the largest."""
        sizes = sorted(self.best)
        ranges: list[list[int]] = []
        begin = 1
        for size, coming in zip(sizes, [*sizes[1:], None], strict=True):
            ranges.append([begin, size, self.best[size]])
            begin = size + 1
            least = begin if coming is None else self.least.get(coming, coming)
            if coming is not None and least > begin:
                ranges.append([begin, least - 1, min(self.best[size], self.best[coming])])
                begin = least
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


def worth_at(sizes: Sequence[AtSize], counts: Sequence[int], texts: int) -> Worth:
    """What pays at each batch size.

    Args:
        counts: that were compared, in order, without 0.
        texts: different requests behind the tokens.
    """
    rates, best, noise = [], {}, {}
    for own in sorted(sizes, key=lambda each: each.requests):
        aa = own.times.get(None)
        if aa is not None:
            half = aa.half_width()
            noise[own.requests] = (exp(aa.value), exp(aa.value - half), exp(aa.value + half))
        known = {0: Estimate(0.0, 0.0, 1, 0)} | {k: t for k, t in own.times.items() if k}
        rates += [_rate(own.requests, k, own.tokens, known, len(counts)) for k in counts]
        chosen = 0
        for k in counts:
            found = _difference(own.tokens, known, k, chosen, len(counts))
            if found is not None and found[1] > 0:
                chosen = k
        best[own.requests] = chosen
    least = {own.requests: own.least for own in sizes if own.least < own.requests}
    return Worth(tuple(rates), best, texts, noise, least)


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
    found = _together(value, [accepted, times[k], times[other]])
    quantile = t_quantile(1 - SIGNIFICANCE / 2 / max(counts, 1), found.degrees)
    half = quantile * found.standard_error
    return value, value - half, value + half


def _together(value: float, parts: Sequence[Estimate]) -> Estimate:
    """A sum or difference of independent estimates, with Welch's degrees of freedom."""
    variances = [part.standard_error**2 for part in parts]
    total, spread = sum(variances), zip(variances, parts, strict=True)
    weighed = sum(own**2 / part.degrees for own, part in spread if own)
    return Estimate(value, total**0.5, total**2 / weighed if weighed else 1, parts[0].count)


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
        return _together(known[k].value - known[other].value, [known[k], known[other]])
