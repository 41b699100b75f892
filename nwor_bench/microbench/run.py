"""From groups to lines: build, check, time. Knows no CUDA; what does is handed in."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Protocol

from nwor_bench.microbench.cases import L2, OURS, PEERS, Group, LaunchMode, Spec
from nwor_bench.microbench.rounds import Replay, make_rule, measure
from nwor_bench.microbench.rows import Row, Status, blank, timed_rows
from nwor_bench.microbench.subject import Contest, Subject, told

BuildContest = Callable[[Group], Contest]
"""The implementations of a group, with inputs; raises MemoryError where they do not fit."""


class Stopwatch(Protocol):
    """Turns a subject into rounds."""

    def prepare(self, subject: Subject, l2: L2, launch: LaunchMode) -> Replay:
        """A replay of the subject's calls in that state of L2, launched that way."""


@dataclass(frozen=True)
class Bench:
    """What times the groups.

    Attributes:
        build: makes a group's contest.
        stopwatch: makes its replays.
        clock: seconds, for the time budget.
        throttled_ms: as `rounds.measure` wants it.
        release: called when a group is done, to give its memory back.
    """

    spec: Spec
    build: BuildContest
    stopwatch: Stopwatch
    clock: Callable[[], float]
    throttled_ms: Callable[[], float | None] = lambda: None
    release: Callable[[], None] = lambda: None


def run_groups(
    bench: Bench, groups: Iterable[Group], tell: Callable[[Group, list[Row]], None]
) -> list[Row]:
    """Every line of every group; `tell` hears of each group as it is done.

    A group that would begin after the time budget is listed as SKIPPED.
    """
    begun, rows = bench.clock(), []
    rng = random.Random(bench.spec.seed)
    budget = bench.spec.time_budget_s
    for group in groups:
        if budget is not None and bench.clock() - begun >= budget:
            reason = f"--time-budget {budget:g}s was used up"
            lines = _blanks(bench.spec, group, Status.SKIPPED, reason)
        else:
            lines = _run_group(bench, group, rng)
            bench.release()
        rows += lines
        tell(group, lines)
    return rows


def _run_group(bench: Bench, group: Group, rng: random.Random) -> list[Row]:
    try:
        contest = bench.build(group)
    except MemoryError:
        return _blanks(bench.spec, group, Status.REFUSED, "its inputs do not fit the GPU's memory")
    failed = {each.name: (each.status, each.reason) for each in contest.refusals}
    subjects = []
    for subject in contest.subjects:
        wrong = fault_of(subject)
        if wrong is None:
            subjects.append(subject)
        else:
            failed[subject.name] = wrong
    rows = []
    for l2, launch in product(bench.spec.l2, bench.spec.launch):
        lines, refused = _time(bench, group, subjects, l2, launch, rng)
        out = failed | refused
        lines += [blank(group, name, l2, launch, *why) for name, why in out.items()]
        order = [OURS, *PEERS[group.kernel]]
        rows += sorted(lines, key=lambda row: order.index(row.implementation))
    return rows


def fault_of(subject: Subject) -> tuple[Status, str] | None:
    """Why a subject is not timed, or None. A peer that raises is refused; ours may not raise."""
    try:
        wrong = subject.check()
    except Exception as error:
        if subject.name == OURS:
            raise
        return Status.REFUSED, told(error)
    return (Status.INVALID, wrong) if wrong else None


def _time(
    bench: Bench,
    group: Group,
    subjects: list[Subject],
    l2: L2,
    launch: LaunchMode,
    rng: random.Random,
) -> tuple[list[Row], dict[str, tuple[Status, str]]]:
    """The lines of one case, and the peers that could not be launched that way."""
    replays: dict[str, Replay] = {}
    refused: dict[str, tuple[Status, str]] = {}
    for subject in subjects:
        try:
            replays[subject.name] = bench.stopwatch.prepare(subject, l2, launch)
        except Exception as error:
            if subject.name == OURS:
                raise
            refused[subject.name] = (Status.REFUSED, f"{launch}: {told(error)}")
    if not replays:
        return [], refused
    rule = make_rule(bench.spec.max_rounds, bench.spec.ci_width)
    measured = measure(replays, rule, rng, bench.throttled_ms)
    timed = [subject.timed for subject in subjects if subject.name in replays]
    rows = timed_rows(group, l2, launch, timed, measured.samples, measured.discarded)
    if measured.throttled:
        rows = [replace(row, reason="the GPU's clocks were held down") for row in rows]
    return rows, refused


def _blanks(spec: Spec, group: Group, status: Status, reason: str) -> list[Row]:
    return [
        blank(group, name, l2, launch, status, reason)
        for l2, launch, name in product(spec.l2, spec.launch, (OURS, *PEERS[group.kernel]))
    ]
