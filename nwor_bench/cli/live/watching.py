"""Read again and again, until the interval is narrow enough or there is a reason to end.

The interval's width and the clock end it, never where the ratio lies (see `workload.stopping`).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from nwor_bench.cli.live.readings import Reading, Unreachable
from nwor_bench.errors import ConfigError
from nwor_bench.workload.stopping import LOOK_STEP

EVERY_S = 1.0
"""Time between two readings."""

GONE_AFTER_S = 10.0
"""A server that does not answer with these metrics for so long is gone."""

FIRST_LOOK = 200
"""Fewest groups on whose width it may decide to end."""

AGAIN = 2
"""Groups at the end over those at which the interval was narrow enough: a narrow interval is also a
lucky one, and the groups behind it were not chosen (sweeps/studies/interleaved-coverage)."""


class Ended(StrEnum):
    """What ended it."""

    WIDTH = "ci_width"
    TIME = "time_budget"
    STOPPED = "staging_stopped"
    GONE = "server_gone"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Wanted:
    """When to end."""

    num_reqs: str
    """The class whose interval counts."""
    ci_width: float
    """Half the interval, a fraction."""
    time_budget_s: float


@dataclass
class WidthRule:
    """When is the interval narrow enough?"""

    ci_width: float
    next_look: int = FIRST_LOOK
    """Groups at which the width is looked at next."""
    end_at: int | None = None
    """Groups at which it ends; None until a look found the interval narrow."""
    is_first: bool = True
    """Nobody waited for what the first reading shows, so it may end there."""

    def is_met(self, groups: int, half_width: float | None) -> bool:
        """Call it with more and more groups; half the interval counts at looks only."""
        first, self.is_first = self.is_first, False
        if self.end_at is None and groups >= self.next_look:
            if half_width is not None and half_width <= self.ci_width:
                self.end_at = groups if first else AGAIN * groups
            self.next_look = ceil(groups * LOOK_STEP)
        return self.end_at is not None and groups >= self.end_at


@dataclass(frozen=True)
class Seen:
    """The last reading, and what ended it."""

    reading: Reading
    ended: Ended
    waited_s: float


def watch(
    read: Callable[[], Reading],
    wanted: Wanted,
    show: Callable[[Reading, float], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Seen:
    """Watch a server; raises what the first reading raises."""
    began = answered = clock()
    reading, rule, ended = read(), WidthRule(wanted.ci_width), None
    try:
        while True:
            waited = clock() - began
            show(reading, waited)
            ended = _ended(reading, wanted, waited, rule)
            if ended is not None:
                break
            sleep(min(EVERY_S, max(0.0, wanted.time_budget_s - waited)))
            try:
                latest, answered = read(), clock()
            except (Unreachable, ConfigError):  # as a proxy answers while its server restarts
                if clock() - answered > GONE_AFTER_S:
                    ended = Ended.GONE
                    break
                continue
            if latest.of(wanted.num_reqs).groups < reading.of(wanted.num_reqs).groups:
                rule = WidthRule(wanted.ci_width)  # the server has restarted
            reading = latest
    except KeyboardInterrupt:
        ended = Ended.INTERRUPTED
    return Seen(reading, ended, clock() - began)


def _ended(reading: Reading, wanted: Wanted, waited: float, rule: WidthRule) -> Ended | None:
    """Why to end now, if so."""
    if reading.stopped is not None:
        return Ended.STOPPED
    own = reading.of(wanted.num_reqs)
    if rule.is_met(own.groups, own.half_width):
        return Ended.WIDTH
    return Ended.TIME if waited >= wanted.time_budget_s else None
