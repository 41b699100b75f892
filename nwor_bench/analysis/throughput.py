"""Output tokens per second of a cell over those of off x off. Pure.

In a group of windows, or in a block of whole batches, the log ratio is

    log(tokens_B / windows_B) - log(tokens_A / windows_A) - log(ms_B / windows_B)
                                                          + log(ms_A / windows_A)

A window's tokens are one for each request and the accepted drafts; its time is that of the device
from step to step, if there is one: the host's step returns while the device works on the one
before, so its clock counts a part of a window in the neighbouring one.

If the gate found the same tokens and acceptance in both cells, a request needs the same windows in
both: then interleaved windows differ in tokens by chance only, and the ratio is the inverse of the
time's. Else the scatter of acceptance stays in the interval, which is that of time ratios (Huber's
location of the groups, Student's t on the blocks). On simulated groups with 3 % scatter of window
times it is 2 (64 requests) to 6 times (8 requests) as wide as that of times, and includes the truth
in 93 to 96 % of runs. Ratios are taken per group, because neighbouring windows share requests and
context, whose acceptance differs more. Two equal cells give log ratios symmetric around 0.

Time per output token (TPOT) is requests x time / tokens. Both cells have the same requests, so the
ratio of TPOT is exactly 1 / this ratio, and its bounds are 1 / these bounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nwor_bench.analysis.effects import DEVICE_MS, WALL_MS
from nwor_bench.analysis.groups import Group
from nwor_bench.analysis.paired import PairedTimes
from nwor_bench.stats.interval import Interval
from nwor_bench.stats.paired import paired_ratio
from nwor_bench.stats.robust import robust_location

ACCEPTANCE = "acceptance"
TIME = "time"


@dataclass(frozen=True)
class RateRatio:
    """Tokens per second over off x off: 1.02 is 2 % more."""

    ratio: Interval
    clock: str
    """DEVICE_MS or WALL_MS of windows in groups, WINDOW_MS or LATENCY_MS of whole batches."""

    noise: str
    """What scatters most: ACCEPTANCE (accepted drafts differ by chance) or TIME."""


def rate_of_same_tokens(time: Interval, clock: str) -> RateRatio:
    """The ratio of cells that accept the same drafts and give the same tokens, from their times."""
    return RateRatio(time.inverse(), clock, TIME)


def rate_of_groups(groups: Sequence[Group]) -> RateRatio | None:
    """The ratio from groups in which both cells gave tokens; None below MIN_GROUPS."""
    both = [(group.tokens, group.pace) for group in groups if group.tokens is not None]
    tokens, times = [value for value, _ in both], [value for _, value in both]
    located = robust_location(np.subtract(tokens, times).tolist())
    if located is None:
        return None
    clock = WALL_MS if groups[0].device is None else DEVICE_MS
    return RateRatio(located.exp(), clock, _noise(tokens, times))


def rate_of_blocks(times: PairedTimes) -> RateRatio | None:
    """The ratio from whole batches, paired block by block; None if a block has no tokens.

    It is that of decoding (all timed windows); of whole batches if times are.
    """
    if not times.token_logs:
        return None
    rates = np.exp(np.subtract(times.token_logs, times.time_logs)).tolist()
    one = [1.0] * len(rates)
    noise = _noise(times.token_logs, times.time_logs)
    return RateRatio(paired_ratio(rates, one), times.compared, noise)


def _noise(tokens: Sequence[float], times: Sequence[float]) -> str:
    """The part that scatters most, by its interquartile range."""
    spread = [float(np.subtract(*np.percentile(part, [75, 25]))) for part in (tokens, times)]
    return ACCEPTANCE if spread[0] > spread[1] else TIME
