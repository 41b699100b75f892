"""Rounds: every implementation once, in random order, until the ratios are known. Pure.

Implementations are compared within a round, where the GPU's clocks and its neighbours were the
same. When to stop is `nwor_bench.workload.stopping`'s rule, on the intervals' width alone.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nwor_bench.microbench.rows import Sample, half_widths
from nwor_bench.workload.stopping import FIRST_LOOK, StoppingRule

Replay = Callable[[], Sample]
"""One round of one implementation."""

WARMUP_ROUNDS = 2

TRIES = 3
"""How often a case is timed when the clocks were held down each time."""

Samples = Mapping[str, Sequence[Sample]]


@dataclass(frozen=True)
class Measured:
    """The rounds that count, and how many were thrown away."""

    samples: Samples
    discarded: int = 0
    throttled: bool = False


def make_rule(max_rounds: int, ci_width: float) -> StoppingRule:
    """At least FIRST_LOOK rounds, at most `max_rounds`; `ci_width` is relative."""
    return StoppingRule(
        blocks=min(FIRST_LOOK, max_rounds), max_blocks=max_rounds, ci_width=ci_width
    )


def measure(
    replays: Mapping[str, Replay],
    rule: StoppingRule,
    rng: random.Random,
    throttled_ms: Callable[[], float | None] = lambda: None,
) -> Measured:
    """Rounds of one case.

    Args:
        replays: each implementation's, by name.
        throttled_ms: how long power or heat have held the clocks down so far; None: unknown.
            A case in which it grew is timed again; the last try counts, and says so.
    """
    discarded = 0
    for attempt in range(TRIES):
        before = throttled_ms()
        samples = _rounds(replays, rule, rng)
        after = throttled_ms()
        held = before is not None and after is not None and after > before
        if not held or attempt == TRIES - 1:
            return Measured(samples, discarded, held)
        discarded += len(next(iter(samples.values())))
    raise AssertionError("unreachable")


def _rounds(replays: Mapping[str, Replay], rule: StoppingRule, rng: random.Random) -> Samples:
    names = list(replays)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for _ in range(WARMUP_ROUNDS):
        for name in names:
            replays[name]()
    done = 0
    while done < rule.max_blocks:
        rng.shuffle(names)
        for name in names:
            samples[name].append(replays[name]())
        done += 1
        if rule.stop(done, half_widths(samples) if done in rule.looks else [], 0.0):
            break
    return samples
