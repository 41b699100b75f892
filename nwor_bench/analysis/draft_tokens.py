"""Tokens of a request in a window at each draft count, from whole batches. Pure.

They are those that a request gets: its output after the first token, over its windows. What its
last window accepts behind the last token is nobody's, so short outputs have fewer tokens a window.
Whole batches may be cut shorter than the scenario's outputs. They count as if they went on to that
length, with the same acceptance and the same loss at the end.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import exp, log
from typing import Any

import numpy as np

from nwor_bench.analysis.engine_times import steps_of
from nwor_bench.records.cell import ADAPTIVE, Count, Fixed, method_of, number_of
from nwor_bench.records.header import RunHeader
from nwor_bench.records.store import RunData
from nwor_bench.records.types import BatchRecord, Phase
from nwor_bench.stats.interval import Interval
from nwor_bench.stats.robust import Values
from nwor_bench.workload.experiment import ACCEPTANCE_RATES

MIN_PROMPTS = 3
"""Fewest prompts whose acceptance gives an interval."""


Rates = Mapping[str | None, Sequence[float]]
"""Named acceptance by method; None: of a run that has one."""


def named_rates(run: RunData) -> Rates:
    """Share of windows that accept draft 1, 2, ..., of the methods whose acceptance is synthetic.

    vLLM's are unconditional: the share of windows that accept that draft and all before it.
    """
    spec = run.header.spec
    shared = (spec.speculative_config or {}).get(ACCEPTANCE_RATES)
    if not spec.arms:
        return {} if shared is None else {None: shared}
    every = {name: arm.get(ACCEPTANCE_RATES, shared) for name, arm in spec.arms.items()}
    return {name: rates for name, rates in every.items() if rates is not None}


def expected_tokens(rates: Sequence[float], most: int | None) -> float:
    """Tokens that a request gets in a window if it accepts draft 1, 2, ... at these rates.

    Args:
        most: tokens of a request, the first one by its prefill; None: without end.
    """
    reach = [1.0, *rates, 0.0]
    windows = [0.0]  # that so many tokens take
    for left in range(1, most or 0):
        coming = [windows[max(left - n, 0)] for n in range(1, len(reach))]
        windows.append(1 - sum(w * share for w, share in zip(coming, np.diff(reach), strict=True)))
    return (len(windows) - 1) / windows[-1] if len(windows) > 1 else sum(reach)


Counts = dict[Fixed, tuple[float, ...]]
"""By draft count a request's windows and the accepted drafts that it got in them (`steps_of`)."""

Request = tuple[str, Counts]
"""A prompt, and the counts of one request."""


def requests_of(run: RunData, counts: Sequence[Fixed], *others: RunData) -> Iterator[Request]:
    """Requests that whole batches of every draft count ran, in the run or in others with its plan.

    A prompt is known by its id in the run's plan; without a plan by the text that k = 0 gave.
    """
    prompts = {block.block: block.prompt_ids for block in run.header.blocks or ()}
    blocks: dict[tuple[Any, ...], dict[Fixed, BatchRecord]] = {}
    for batch in (batch for each in (run, *others) for batch in each.batches):
        k = batch.cell.drafts
        own = None if k is ADAPTIVE or batch.cell.stock_twin is not None else k
        if own is not None and gives_tokens(run, batch):
            blocks.setdefault((batch.phase, batch.block), {})[own] = batch
    for batches in blocks.values():
        if 0 not in batches or not all(k in batches for k in counts):
            continue
        steps = {k: _to_the_end(run.header, batches[k]) for k in counts}
        for place, text in enumerate(prompts.get(batches[0].block) or batches[0].token_digests):
            by_count = {k: steps[k][place] for k in counts}
            if all(windows for windows, _ in by_count.values()):
                yield text, by_count


def gives_tokens(run: RunData, batch: BatchRecord) -> bool:
    """True for a whole batch at the run's temperature; the gate is greedy."""
    asked = (run.header.scenario or {}).get("temperature", 0.0)
    return batch.phase is Phase.TIMED or (batch.phase is Phase.GATE and not asked)


def _to_the_end(header: RunHeader, batch: BatchRecord) -> Sequence[tuple[float, ...]]:
    """`steps_of` requests as if they went on to the scenario's tokens, unless one has stopped."""
    steps = steps_of(header, batch)
    goal = ((header.scenario or {}).get("max_new_tokens") or 0) - 1
    if len(set(map(sum, steps))) != 1 or not 0 < sum(steps[0]) < goal:
        return steps
    counts = zip(steps, batch.request_acceptance, strict=True)
    longer = [n * (goal + a - got) / (n + a) for (n, got), (_, a) in counts]
    return [(number, goal - number) for number in longer]


def by_prompt(requests: Iterable[Request]) -> dict[str, Counts]:
    """Means over the requests of each prompt. They have one text, or texts that fork at a tie: a
    prompt that ran more often says little more."""
    grouped: dict[str, list[Counts]] = {}
    for prompt, counts in requests:
        grouped.setdefault(prompt, []).append(counts)
    return {
        prompt: {k: tuple(np.mean([counts[k] for counts in repeats], axis=0)) for k in repeats[0]}
        for prompt, repeats in grouped.items()
    }


class PromptTokens:
    """Tokens of a request in a window, by draft count, over different prompts; or at `rates`.

    Args:
        most: tokens of each request, for `rates`.
        adaptive: tokens with adaptive verification at one batch size, None if it was not timed;
            what they scatter by is in its times (`engine_times`).
    """

    def __init__(
        self,
        requests: Iterable[Request],
        counts: Sequence[Fixed],
        rates: Rates,
        most: int | None = None,
        adaptive: float | None = None,
    ):
        plain: Counts = {0: (1.0, 0.0)}
        prompts = [plain | m for m in by_prompt(requests).values()]
        self._rates, self._most, self._adaptive = rates, most, adaptive
        self._of = {
            k: np.array([m[k] for m in prompts], float).reshape(-1, 2).T for k in (0, *counts)
        }
        """Windows and accepted drafts of each prompt; at k = 0 nothing is accepted."""

    def __len__(self) -> int:
        return self._of[0].shape[1]

    def mean(self, k: Count) -> float | None:
        """Tokens at this draft count; None without requests."""
        if k is ADAPTIVE:
            return self._adaptive
        known = method_of(k) in self._rates or len(self)
        return exp(self._log(k)) if known and k in self._of else None

    def difference(self, k: Count, other: Fixed) -> Interval | None:
        """Log tokens at k over those at another count: the same prompts, so only their own
        difference scatters; None for too few prompts. Plain decoding has 1, without an error."""
        number = len(self)
        if k is ADAPTIVE:
            tokens = self._adaptive
            return None if tokens is None else Interval.of(log(tokens), 0.0, 1, number)
        if all(count == 0 or method_of(count) in self._rates for count in (k, other)):
            return Interval.of(self._log(k) - self._log(other), 0.0, 1, number)
        if number < MIN_PROMPTS:
            return None
        left_out = self._logs_without(k) - self._logs_without(other)
        variance = (number - 1) * float(np.var(left_out))  # the jackknife's
        return Interval.of(self._log(k) - self._log(other), variance**0.5, number - 1, number)

    def _log(self, k: Fixed) -> float:
        if k == 0:
            return 0.0
        if (rates := self._rates.get(method_of(k))) is not None:
            return log(expected_tokens(rates[: number_of(k)], self._most))
        windows, accepted = self._of[k]
        return float(np.log1p(accepted.sum() / windows.sum()))

    def _logs_without(self, k: Fixed) -> Values:
        """Log tokens of all prompts but one, for each."""
        if method_of(k) in self._rates:
            return np.full(len(self), self._log(k))
        windows, accepted = self._of[k]
        return np.log1p((accepted.sum() - accepted) / (windows.sum() - windows))
