"""Tokens per second of each draft count over those of k = 0, by batch size. Pure.

    log rate(k) = log tokens of a request in a window(k) - log time of a window(k) / time(0)

Times are compared in groups of neighbouring windows. Tokens come from whole batches at one draft
count, because a window begins where the one before it ended: at k = 4 fewer begin inside easy text
than at k = 1, so the tokens of windows of an interleaved batch are not those of a server that runs
one k. At temperature 0 all counts run the same text, and a request's acceptance does not depend on
who runs beside it: requests of all batch sizes are pooled, each text once. The error of tokens is
a jackknife over requests, that of times the groups', added with Welch's degrees of freedom.
Synthetic acceptance is what its rates say, without an error.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log1p
from typing import Any

import numpy as np

from nwor_bench.analysis.effects import DEVICE_MS, PairEffect
from nwor_bench.analysis.invariants import windows_by_batch
from nwor_bench.analysis.statistics import SIGNIFICANCE, verdict
from nwor_bench.instruments.robust import (
    Estimate,
    RatioInterval,
    Values,
    robust_location,
    t_quantile,
)
from nwor_bench.records.lines import batch_key
from nwor_bench.records.store import RunData
from nwor_bench.records.types import BatchRecord, Phase, WindowRecord

MIN_REQUESTS = 3
"""Fewest requests whose acceptance gives an interval."""

MIN_GROUPS = 3
"""Fewest groups of windows of a draft count: below ten their mean, from there Huber's location."""

MIN_DEGREES = 3
"""Fewest degrees of freedom of the groups' scatter, all counts of a batch size together."""


LEAST_FULL = 0.75
"""Share of a batch's requests that a group needs."""


def batch_size(run: RunData) -> int:
    """Requests of each batch of a run."""
    return int((run.header.scenario or {})["requests"])


def named_rates(run: RunData) -> list[float] | None:
    """Share of windows that accept draft 1, 2, ... if acceptance is synthetic; None if it is not.

    vLLM's are unconditional: the share of windows that accept that draft and all before it.
    """
    return ((run.header.spec or {}).get("speculative_config") or {}).get(ACCEPTANCE_RATES)


ACCEPTANCE_RATES = "synthetic_acceptance_rates"


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
            if coming is not None and coming > begin:
                ranges.append([begin, coming - 1, min(self.best[size], self.best[coming])])
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
    requests = [pair for own in runs for pair in _requests(own.run, counts)]
    tokens = _Tokens(requests, counts, named_rates(runs[0].run))
    rates, best, noise = [], {}, {}
    for own in sorted(runs, key=lambda each: each.requests):
        times = _times(own)
        aa = times.pop(None, None)
        if aa is not None:
            half = aa.half_width()
            noise[own.requests] = (exp(aa.value), exp(aa.value - half), exp(aa.value + half))
        known = {0: Estimate(0.0, 0.0, 1, 0)} | {k: t for k, t in times.items() if k}
        rates += [_rate(own.requests, k, tokens, known, len(counts)) for k in counts]
        chosen = 0
        for k in counts:
            found = _difference(tokens, known, k, chosen, len(counts))
            if found is not None and found[1] > 0:
                chosen = k
        best[own.requests] = chosen
    return Worth(tuple(rates), best, len(tokens), noise)


def _rate(
    requests: int, k: int, tokens: "_Tokens", times: Mapping[int, Estimate], counts: int
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
    tokens: "_Tokens", times: Mapping[int, Estimate], k: int, other: int, counts: int
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


def _times(own: Measured) -> dict[int | None, Estimate]:
    """Log time of a window over that at k = 0 by draft count, None being k = 0 against itself.

    Below ten groups their scatter is that of all counts of the batch size, which few groups show
    better than a count's own. At the end of a batch some requests have finished: groups with most
    of them count.
    """
    logs: dict[int | None, list[float]] = {}
    for effect in own.effects:
        if effect.pair.reference.is_baseline and effect.pair.treated.stock_twin is None:
            full = [g for g in effect.groups if g.num_reqs >= LEAST_FULL * own.requests]
            both = [g.device if effect.clock == DEVICE_MS else g.host for g in full]
            logs[effect.pair.treated.drafts] = [value for value in both if value is not None]
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


Request = tuple[str, dict[int, tuple[int, int]]]
"""A text's digest; by draft count its windows, and the drafts accepted in them."""


def _requests(run: RunData, counts: Sequence[int]) -> Iterator[Request]:
    """Requests that whole batches of every draft count ran."""
    blocks: dict[tuple[Any, ...], dict[int, BatchRecord]] = {}
    for batch in run.batches:
        whole = batch.phase in (Phase.GATE, Phase.TIMED)
        if whole and batch.cell.drafts is not None and batch.cell.stock_twin is None:
            blocks.setdefault((batch.phase, batch.block), {})[batch.cell.drafts] = batch
    for batches in blocks.values():
        if 0 not in batches or not all(k in batches for k in counts):
            continue
        for place, text in enumerate(batches[0].token_digests):
            own = {k: batches[k].request_acceptance[place] for k in counts}
            if all(windows for windows, _ in own.values()):
                yield text, own


def same_places(run: RunData) -> tuple[int, int]:
    """Windows that accepted what the largest count's window from the same token accepted, cut to
    their own count; and how many were compared.

    Of blocks of one request whose batches gave the same text: with more requests, records do not
    say where a request's window began. Equal numbers show that a drafter's cache is as good after
    switching, k = 0 included, as at one count.
    """
    windows = windows_by_batch(run)
    blocks: dict[tuple[object, ...], list[BatchRecord]] = {}
    for batch in run.batches:
        if batch.requests == 1:
            blocks.setdefault((batch.block, *batch.token_digests), []).append(batch)
    equal = compared = 0
    for batches in blocks.values():
        whole = [b for b in batches if b.phase in (Phase.GATE, Phase.TIMED) and b.cell.drafts]
        if not whole:
            continue
        most = max(whole, key=lambda batch: batch.cell.drafts or 0)
        accepted = {at: n for at, _, n in _by_place(windows[batch_key(most)])}
        for batch in batches:
            if batch is most:
                continue
            for at, drafts, own in _by_place(windows[batch_key(batch)]):
                if drafts and at in accepted:
                    compared += 1
                    equal += own == min(accepted[at], drafts)
    return equal, compared


def _by_place(windows: Sequence[WindowRecord]) -> Iterator[tuple[int, int, int]]:
    """Of one request's windows: the token at which each began, its drafts and the accepted ones."""
    at = 1  # the prefill gave the first
    for window in windows:
        yield at, window.draft_tokens, window.accepted_tokens
        at += 1 + window.accepted_tokens


class _Tokens:
    """Tokens of a request in a window, by draft count, over different texts; or by `rates`."""

    def __init__(
        self, requests: Sequence[Request], counts: Sequence[int], rates: Sequence[float] | None
    ):
        texts = dict(requests)
        self._rates = rates
        self._counts = list(counts)
        shape = (len(texts), len(self._counts))
        pairs = [[own[k] for k in self._counts] for own in texts.values()]
        self._windows = np.array([[w for w, _ in row] for row in pairs], float).reshape(shape)
        self._accepted = np.array([[a for _, a in row] for row in pairs], float).reshape(shape)

    def __len__(self) -> int:
        return len(self._windows)

    def mean(self, k: int) -> float | None:
        """Tokens at this draft count; None without requests."""
        known = self._rates is not None or len(self)
        return exp(self._log(k)) if known and k in self._counts else None

    def difference(self, k: int, other: int) -> Estimate | None:
        """Log tokens at k over those at another count: the same requests, so only their own
        difference scatters; None for too few requests."""
        number = len(self)
        if self._rates is not None:
            return Estimate(self._log(k) - self._log(other), 0.0, 1, number)
        if number < MIN_REQUESTS:
            return None
        left_out = self._logs_without(k) - self._logs_without(other)
        variance = (number - 1) * float(np.var(left_out))  # the jackknife's
        return Estimate(self._log(k) - self._log(other), variance**0.5, number - 1, number)

    def _log(self, k: int) -> float:
        if self._rates is not None:
            return log1p(sum(self._rates[:k]))
        windows, accepted = self._of(k)
        return float(np.log1p(accepted.sum() / windows.sum()))

    def _logs_without(self, k: int) -> Values:
        """Log tokens of all requests but one, for each."""
        windows, accepted = self._of(k)
        return np.log1p((accepted.sum() - accepted) / (windows.sum() - windows))

    def _of(self, k: int) -> tuple[Values, Values]:
        """Windows and accepted drafts of each request; at k = 0 nothing is accepted."""
        if k == 0:
            return np.ones(len(self)), np.zeros(len(self))
        at = self._counts.index(k)
        return self._windows[:, at], self._accepted[:, at]
