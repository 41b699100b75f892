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

FIRST_LOOK = 50
"""Fewest groups on whose interval it may end: from there on the interval covers 93 to 97 %."""


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
    reading, next_look, ended = read(), FIRST_LOOK, None
    try:
        while True:
            waited = clock() - began
            show(reading, waited)
            ended, next_look = _ended(reading, wanted, waited, next_look)
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
                next_look = FIRST_LOOK  # the server has restarted
            reading = latest
    except KeyboardInterrupt:
        ended = Ended.INTERRUPTED
    return Seen(reading, ended, clock() - began)


def _ended(
    reading: Reading, wanted: Wanted, waited: float, next_look: int
) -> tuple[Ended | None, int]:
    """Why to end now, if so; and how many groups it takes to look at the width again."""
    if reading.stopped is not None:
        return Ended.STOPPED, next_look
    own = reading.of(wanted.num_reqs)
    if own.groups >= next_look:
        if own.half_width is not None and own.half_width <= wanted.ci_width:
            return Ended.WIDTH, next_look
        next_look = ceil(own.groups * LOOK_STEP)
    return (Ended.TIME if waited >= wanted.time_budget_s else None), next_look
