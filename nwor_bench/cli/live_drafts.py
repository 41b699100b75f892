"""Draft counts in a running server: one reading of its metrics, and what pays by it.

Rates, verdicts and the choice by batch size are those of `nwor-bench worth` (`draft_rates`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log
from typing import Any

from nwor_bench.analysis.draft_rates import AtSize, Rate, SpanTokens, Worth, worth_at
from nwor_bench.instruments.draft_counts import KEPT
from nwor_bench.records.header import PairFacts
from nwor_bench.records.window_order import ALL
from nwor_bench.stats.interval import Interval
from nwor_bench.stats.robust import from_ends


@dataclass(frozen=True)
class DraftClass:
    """Draft counts in windows of one class of batch sizes, or of all."""

    num_reqs: str
    counts: Sequence[int]
    """That alternate, without 0."""
    times: Mapping[int | None, Interval]
    """See `AtSize`."""
    tokens: Mapping[int, Interval]
    """Log tokens of a request in a window, by draft count."""
    groups: int = 0
    """Groups of the draft count that has the fewest."""

    @property
    def at_size(self) -> AtSize:
        """The same for `worth_at`; a class of any size has none."""
        least, _, most = ("0" if self.num_reqs == ALL else self.num_reqs).partition("-")
        return AtSize(int(most or least), int(least), self.times, SpanTokens(self.tokens))

    @cached_property
    def rates(self) -> tuple[Rate, ...]:
        """Tokens/s over k = 0, by draft count."""
        return worth_at([self.at_size], self.counts, 0).rates

    @property
    def half_width(self) -> float | None:
        """Half the widest interval of a draft count, as a fraction; None if one has none."""
        ends = [(rate.low, rate.high) for rate in self.rates]
        known = [(log(high) - log(low)) / 2 for low, high in ends if low and high]
        return max(known) if known and len(known) == len(self.counts) else None


@dataclass(frozen=True)
class DraftReading:
    """One reading of one worker's metrics."""

    counts: Sequence[int]
    """That alternate with 0."""
    classes: Mapping[str, DraftClass]
    """By class, small batches first, `all` last."""
    windows: Mapping[int, int]
    """Windows by draft count, 0 among them."""
    left_out: Mapping[str, int]
    """Groups that do not count, by reason."""
    clock: str | None
    """`device` or `host`; None before the first ratio."""
    pair: PairFacts
    """Method and drafter."""
    stopped: None = None
    """No guard stops it: all that runs is vLLM's own."""

    def of(self, num_reqs: str) -> DraftClass:
        """The class, perhaps still empty."""
        return self.classes.get(num_reqs, DraftClass(num_reqs, self.counts, {}, {}))

    def worth(self, num_reqs: str = ALL) -> Worth:
        """What pays in the classes that are known, or in that one."""
        chosen = [
            own.at_size
            for name, own in self.classes.items()
            if name != ALL and num_reqs in (ALL, name) and any(rate.ratio for rate in own.rates)
        ]
        return worth_at(chosen, self.counts, 0)


def read_drafts(samples: Sequence[Any]) -> DraftReading:
    """A reading of samples, some of them of draft counts."""
    every = [sample for sample in samples if sample.name.startswith("nwor_drafts_")]
    rank = min((sample.labels.get("rank", "0") for sample in every), key=int)
    own = [sample for sample in every if sample.labels.get("rank", "0") == rank]
    windows = {
        int(s.labels["drafts"]): int(s.value) for s in own if s.name == "nwor_drafts_windows_total"
    }
    counts = sorted(k for k in windows if k)
    left_out = {
        s.labels["reason"]: int(s.value)
        for s in own
        if s.name == "nwor_drafts_groups_left_out_total" and s.value
    }
    info: Mapping[str, str] = next((s.labels for s in own if s.name == "nwor_drafts_info"), {})
    clock = next((s.labels["clock"] for s in own if s.name == "nwor_drafts_time_ratio"), None)
    return DraftReading(
        counts=counts,
        classes=_classes(own, counts),
        windows=dict(sorted(windows.items())),
        left_out=dict(sorted(left_out.items(), key=lambda item: -item[1])),
        clock=clock,
        pair=PairFacts(method=info.get("method", ""), draft=info.get("model") or None),
    )


def _classes(samples: Sequence[Any], counts: Sequence[int]) -> dict[str, DraftClass]:
    found: dict[str, dict[int, dict[str, float]]] = {ALL: {}}
    for sample in samples:
        if "num_reqs" in sample.labels:
            by_count = found.setdefault(sample.labels["num_reqs"], {})
            by_count.setdefault(int(sample.labels["drafts"]), {})[sample.name] = sample.value
    return {
        name: _class(name, found[name], counts)
        for name in sorted(found, key=lambda name: name == ALL or int(name.partition("-")[0]))
    }


def _class(
    name: str, by_count: Mapping[int, Mapping[str, float]], counts: Sequence[int]
) -> DraftClass:
    times: dict[int | None, Interval] = {}
    tokens: dict[int, Interval] = {}
    for k, values in by_count.items():
        time = _estimate(values, "nwor_drafts_time_ratio", "nwor_drafts_groups_total")
        if time is not None:
            times[k or None] = time
        taken = _estimate(values, "nwor_drafts_tokens", "nwor_drafts_spans_total")
        if taken is not None:
            tokens[k] = taken
    known = (by_count.get(k, {}).get("nwor_drafts_groups_total", 0) for k in counts)
    groups = min(map(int, known), default=0)
    return DraftClass(name, counts, times, tokens, groups)


def _estimate(values: Mapping[str, float], name: str, count: str) -> Interval | None:
    """The log of what the server shows with an interval; None before it shows one."""
    if name not in values:
        return None
    low, high = values[f"{name}_low"], values[f"{name}_high"]
    return from_ends(values[name], low, high, min(int(values[count]), KEPT))
