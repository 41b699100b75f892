"""Effect of each compared pair of cells, from the groups of a run's interleaved batches."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nwor_bench.analysis.interleaved.conditions import (
    ConditionEffects,
    batch_state,
    condition_effects,
)
from nwor_bench.analysis.interleaved.groups import SETTLED, Group, LeftOut, Pair, find_groups
from nwor_bench.analysis.interleaved.robust import (
    as_ratio,
    mean_location,
    robust_location,
    robust_slope,
)
from nwor_bench.analysis.statistics import RatioInterval
from nwor_bench.records.cell import Cell, cell_order
from nwor_bench.records.lines import batch_key
from nwor_bench.records.store import RunData
from nwor_bench.records.types import Phase

DEVICE_MS = "device_ms"
WALL_MS = "wall_ms"


@dataclass(frozen=True)
class ClockEffect:
    """Treated over reference on one clock."""

    robust: RatioInterval
    """Huber's location: it decides."""

    mean: RatioInterval
    """The mean over windows, rare long ones included."""


@dataclass(frozen=True)
class PairEffect:
    """What the groups of one pair say."""

    pair: Pair
    groups: tuple[Group, ...]
    left_out: dict[LeftOut, int]
    clock: str
    """The clock that decides: DEVICE_MS, or WALL_MS where there is no device's."""

    device: ClockEffect | None
    """None without a device's clock, or below MIN_GROUPS."""

    host: ClockEffect | None
    carry_over: RatioInterval | None
    """The ratio in runs of two over that in endless runs: 1 without carry-over.

    Robust slope of the groups' effects against 1 / (run length - 1): what a switch leaves behind in
    the first window that counts is spread over the run's windows. None if runs are equally long.
    """

    conditions: ConditionEffects

    @property
    def decisive(self) -> ClockEffect | None:
        """The effect on the clock that decides."""
        return self.device if self.clock == DEVICE_MS else self.host

    @property
    def effects(self) -> list[float]:
        """Each group's log ratio on the clock that decides."""
        return log_effects(self.groups, self.clock)


def pair_effects(run: RunData) -> list[PairEffect]:
    """One entry a compared pair, by treated cell, then reference.

    A cell that took turns with off x off has one, even if no group came that far.
    """
    interleaved = [batch for batch in run.batches if batch.phase == Phase.INTERLEAVED]
    if not interleaved:
        return []
    keys = set(map(batch_key, interleaved))
    found = find_groups(window for window in run.windows if batch_key(window) in keys)
    groups: dict[Pair, list[Group]] = {pair: [] for pair in [*_over_off(run), *found.left_out]}
    for group in found.counted:
        groups.setdefault(group.pair, []).append(group)
    states = {batch.batch: batch_state(batch) for batch in interleaved}
    effects = []
    for pair in sorted(groups, key=_pair_order):
        own = groups[pair]
        clock = DEVICE_MS if own and own[0].device is not None else WALL_MS
        effects.append(
            PairEffect(
                pair=pair,
                groups=tuple(own),
                left_out=dict(found.left_out.get(pair, Counter())),
                clock=clock,
                device=_on_clock(own, DEVICE_MS) if clock == DEVICE_MS else None,
                host=_on_clock(own, WALL_MS),
                carry_over=_carry_over(own, clock),
                conditions=condition_effects(own, log_effects(own, clock), states),
            )
        )
    return effects


def effects_over_off(effects: Sequence[PairEffect]) -> dict[Cell, PairEffect]:
    """The pairs whose reference is off x off, by the other cell."""
    return {each.pair.treated: each for each in effects if each.pair.reference.is_baseline}


def log_effects(groups: Sequence[Group], clock: str) -> list[float]:
    """Each group's log ratio on a clock that all of them have."""
    if clock == WALL_MS:
        return [group.host for group in groups]
    return [group.device for group in groups if group.device is not None]


def _over_off(run: RunData) -> list[Pair]:
    """Each cell that took turns, over off x off."""
    turns = [event["cells"] for event in run.events if event.get("event") == Phase.INTERLEAVED]
    labels = {label for cells in turns for label in cells}
    cells = {batch.cell for batch in run.batches if batch.cell.label in labels}
    return [
        Pair(baseline, cell)
        for baseline in cells
        for cell in cells
        if baseline.is_baseline and cell != baseline and cell.pair == baseline.pair
    ]


def _on_clock(groups: Sequence[Group], clock: str) -> ClockEffect | None:
    values = log_effects(groups, clock)
    robust, mean = robust_location(values), mean_location(values)
    if robust is None or mean is None:
        return None
    return ClockEffect(as_ratio(robust), as_ratio(mean))


def _carry_over(groups: Sequence[Group], clock: str) -> RatioInterval | None:
    shares = [1 / (group.run_length - SETTLED) for group in groups]
    slope = robust_slope(log_effects(groups, clock), shares)
    return None if slope is None else as_ratio(slope)


def _pair_order(pair: Pair) -> tuple[object, ...]:
    return (cell_order(pair.treated), cell_order(pair.reference))
