"""Time groups of cases: build the inputs, check every implementation, run rounds. Needs no CUDA.

In a round every implementation runs once, in random order. They are compared within a round, when
clocks and other load on the GPU were the same. `nwor_bench.workload.stopping` decides when to stop,
only from the width of the intervals.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Protocol

from nwor_bench.microbench.cases import L2, OURS, PEERS, Group, LaunchMode, Spec
from nwor_bench.microbench.rows import (
    Implementation,
    Implementations,
    Row,
    Sample,
    Status,
    blank,
    describe,
    half_widths,
    timed_rows,
)
from nwor_bench.workload.stopping import FIRST_LOOK, StoppingRule

Replay = Callable[[], Sample]
"""Runs one round of one implementation."""

Samples = Mapping[str, Sequence[Sample]]
"""Samples of each implementation, by name."""

Build = Callable[[Group], Implementations]
"""Makes a group's implementations and inputs; raises MemoryError if the inputs do not fit."""

WARMUP_ROUNDS = 2

TRIES = 3
"""A case is timed at most this often if the GPU throttled its clocks each time."""


class Stopwatch(Protocol):
    """Turns an implementation into rounds."""

    def prepare(self, implementation: Implementation, l2: L2, launch: LaunchMode) -> Replay:
        """A replay of its calls with L2 in that state, launched that way."""


@dataclass(frozen=True)
class Bench:
    """Everything that times the groups.

    Attributes:
        build: makes a group's implementations.
        stopwatch: makes their replays.
        clock: seconds, for the time budget.
        throttled_ms: time so far in which power or temperature lowered the clocks; None: unknown.
        release: frees a group's memory.
    """

    spec: Spec
    build: Build
    stopwatch: Stopwatch
    clock: Callable[[], float]
    throttled_ms: Callable[[], float | None] = lambda: None
    release: Callable[[], None] = lambda: None


def run_groups(
    bench: Bench, groups: Iterable[Group], on_group: Callable[[Group, list[Row]], None]
) -> list[Row]:
    """All rows of all groups; calls `on_group` after each group.

    Groups that would start after the time budget are listed as SKIPPED.
    """
    begun, rows = bench.clock(), []
    rng = random.Random(bench.spec.seed)
    budget = bench.spec.time_budget_s
    for group in groups:
        if budget is not None and bench.clock() - begun >= budget:
            reason = f"--time-budget {budget:g}s was used up"
            found = _blanks(bench.spec, group, Status.SKIPPED, reason)
        else:
            found = _run_group(bench, group, rng)
            bench.release()
        rows += found
        on_group(group, found)
    return rows


def _run_group(bench: Bench, group: Group, rng: random.Random) -> list[Row]:
    try:
        built = bench.build(group)
    except MemoryError:
        return _blanks(bench.spec, group, Status.REFUSED, "its inputs do not fit the GPU's memory")
    failed = {each.name: (each.status, each.reason) for each in built.refused}
    sound = []
    for implementation in built.runnable:
        fault = fault_of(implementation)
        if fault is None:
            sound.append(implementation)
        else:
            failed[implementation.name] = fault
    order = [OURS, *PEERS[group.kernel]]
    rows = []
    for l2, launch in product(bench.spec.l2, bench.spec.launch):
        timed, refused = _time_case(bench, group, sound, l2, launch, rng)
        untimed = failed | refused
        timed += [blank(group, name, l2, launch, *why) for name, why in untimed.items()]
        rows += sorted(timed, key=lambda row: order.index(row.implementation))
    return rows


def fault_of(implementation: Implementation) -> tuple[Status, str] | None:
    """Why an implementation is not timed, or None. An exception refuses a peer, and stops ours."""
    try:
        wrong = implementation.check()
    except Exception as error:
        if implementation.name == OURS:
            raise
        return Status.REFUSED, describe(error)
    return (Status.INVALID, wrong) if wrong else None


def _time_case(
    bench: Bench,
    group: Group,
    implementations: list[Implementation],
    l2: L2,
    launch: LaunchMode,
    rng: random.Random,
) -> tuple[list[Row], dict[str, tuple[Status, str]]]:
    """The rows of one case, and the peers that could not be launched that way."""
    replays: dict[str, Replay] = {}
    refused: dict[str, tuple[Status, str]] = {}
    for each in implementations:
        try:
            replays[each.name] = bench.stopwatch.prepare(each, l2, launch)
        except Exception as error:
            if each.name == OURS:
                raise
            refused[each.name] = (Status.REFUSED, f"{launch}: {describe(error)}")
    if not replays:
        return [], refused
    rule = make_rule(bench.spec.max_rounds, bench.spec.ci_width)
    measured = run_rounds(replays, rule, rng, bench.throttled_ms)
    timed = [each for each in implementations if each.name in replays]
    rows = timed_rows(group, l2, launch, timed, measured.samples, measured.discarded)
    if measured.throttled:
        rows = [replace(row, reason="the GPU throttled its clocks") for row in rows]
    return rows, refused


def _blanks(spec: Spec, group: Group, status: Status, reason: str) -> list[Row]:
    return [
        blank(group, name, l2, launch, status, reason)
        for l2, launch, name in product(spec.l2, spec.launch, (OURS, *PEERS[group.kernel]))
    ]


@dataclass(frozen=True)
class Measured:
    """Samples of one case, and the number of rounds discarded before them."""

    samples: Samples
    discarded: int = 0
    throttled: bool = False


def make_rule(max_rounds: int, ci_width: float) -> StoppingRule:
    """At least FIRST_LOOK rounds, at most `max_rounds`; `ci_width` is relative."""
    return StoppingRule(
        blocks=min(FIRST_LOOK, max_rounds), max_blocks=max_rounds, ci_width=ci_width
    )


def run_rounds(
    replays: Mapping[str, Replay],
    rule: StoppingRule,
    rng: random.Random,
    throttled_ms: Callable[[], float | None] = lambda: None,
) -> Measured:
    """Rounds of one case.

    Args:
        replays: each implementation's, by name.
        throttled_ms: time so far in which power or temperature lowered the clocks; None: unknown.
            If it grows during a case, the case is timed again; the last try counts and says so.
    """
    discarded = 0
    for attempt in range(TRIES):
        before = throttled_ms()
        samples = _rounds(replays, rule, rng)
        after = throttled_ms()
        throttled = before is not None and after is not None and after > before
        if not throttled or attempt == TRIES - 1:
            return Measured(samples, discarded, throttled)
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
        if rule.stop(done, half_widths(samples) if done in rule.looks else [], 0.0, 0.0):
            break
    return samples
