"""Read a server's metrics until the interval is narrow enough or the time is up.

The ratio itself never ends it (see `workload.stopping`).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil

from nwor_bench.errors import ConfigError
from nwor_bench.live.drift import OverTime
from nwor_bench.live.reading import Reading, Unreachable
from nwor_bench.workload.stopping import LOOK_STEP

EVERY_S = 1.0
"""Time between two readings."""

GONE_AFTER_S = 10.0
"""A server without an answer for this long is gone."""

FIRST_LOOK = 200
"""Fewest groups whose interval may end it."""

SETTLED = 2
"""A watch ends at this many times the groups at which the interval was first narrow enough: that
first interval is partly luck, the groups after it are not (sweeps/studies/interval-coverage)."""


class Ended(StrEnum):
    """Why it ended."""

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
    """Decides whether the interval is narrow enough."""

    ci_width: float
    next_look: int = FIRST_LOOK
    """Groups at the next look at the width."""
    end_at: int | None = None
    """Groups at which it ends; None until a look found the interval narrow."""
    is_first: bool = True
    """The first reading may end it at once: nobody waited for it to be narrow."""

    def is_met(self, groups: int, half_width: float | None) -> bool:
        """Call it with growing groups; the width counts only at looks."""
        first, self.is_first = self.is_first, False
        if self.end_at is None and groups >= self.next_look:
            if half_width is not None and half_width <= self.ci_width:
                self.end_at = groups if first else SETTLED * groups
            self.next_look = ceil(groups * LOOK_STEP)
        return self.end_at is not None and groups >= self.end_at


@dataclass(frozen=True)
class Seen:
    """The last reading and the first, and what ended it."""

    reading: Reading
    ended: Ended
    waited_s: float
    over_time: OverTime = field(default_factory=OverTime)
    first: Reading | None = None


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
    over_time, first = OverTime(), reading
    try:
        while True:
            over_time.add(answered, reading.counted)
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
            if latest.groups(wanted.num_reqs) < reading.groups(wanted.num_reqs):
                rule = WidthRule(wanted.ci_width)  # the server has restarted
            reading = latest
    except KeyboardInterrupt:
        ended = Ended.INTERRUPTED
    return Seen(reading, ended, clock() - began, over_time, first)


def _ended(reading: Reading, wanted: Wanted, waited: float, rule: WidthRule) -> Ended | None:
    """Why to end now, if so."""
    if reading.stopped is not None:
        return Ended.STOPPED
    if rule.is_met(reading.groups(wanted.num_reqs), reading.half_width(wanted.num_reqs)):
        return Ended.WIDTH
    return Ended.TIME if waited >= wanted.time_budget_s else None
