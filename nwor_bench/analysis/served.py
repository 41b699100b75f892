"""Draft counts on an open loop: the line that was found over other arms, by block. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from nwor_bench.analysis.draft_rates import Worth
from nwor_bench.analysis.statistics import paired_ratio
from nwor_bench.instruments.robust import RatioInterval

LINE = "line"
"""The arm with the schedule that was found."""


@dataclass(frozen=True)
class ServedRatio:
    """The line over another arm; both served the same requests at the same times, by block."""

    over: str
    """The other arm: `k = 2`, `k = 0`."""
    blocks: int
    requests: int
    """Of one block."""
    tpot: RatioInterval | None
    """Of the mean time per output token; None below three blocks."""
    tokens_per_s: RatioInterval | None
    """Of a block's tokens over the time to its last one: at light load the arrivals decide it."""


def best_fixed(worth: Worth) -> int | None:
    """The draft count with the best tokens/s over the batch sizes at which every count was measured
    (geometric mean, 0 included); None without one."""
    open_sizes = {rate.requests for rate in worth.rates if rate.ratio is None}
    ratios: dict[int, list[float]] = {0: [1.0]}
    for rate in worth.rates:
        if rate.ratio is not None and rate.requests not in open_sizes and not rate.adaptive:
            ratios.setdefault(rate.drafts, []).append(rate.ratio)
    if len(ratios) == 1:
        return None
    return max(ratios, key=lambda k: geometric_mean(ratios[k]))


def served_ratios(rows: Sequence[Mapping[str, Any]]) -> list[ServedRatio]:
    """One entry for each other arm, from rows with `arm`, `block`, `requests`, `tokens`, `seconds`
    and `tpot_ms`; blocks in which every arm ran."""
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    blocks: dict[int, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        blocks.setdefault(row["block"], {})[row["arm"]] = row
    whole = [own for own in blocks.values() if len(own) == len(arms)]
    if not whole:
        return []

    def ratio(over: str, name: str) -> RatioInterval | None:
        return paired_ratio([own[LINE][name] for own in whole], [own[over][name] for own in whole])

    def rate(over: str) -> RatioInterval | None:
        ours, theirs = ([own[arm]["tokens"] / own[arm]["seconds"] for own in whole]
                        for arm in (LINE, over))  # fmt: skip
        return paired_ratio(ours, theirs)

    return [
        ServedRatio(arm, len(whole), whole[0][LINE]["requests"], ratio(arm, "tpot_ms"), rate(arm))
        for arm in arms
        if arm != LINE
    ]
