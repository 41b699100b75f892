"""Effect of each pair of interleaved cells, and other results of their groups. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nwor_bench.analysis.groups import Group, Pair, find_groups
from nwor_bench.records.cell import SHAM, Cell, NworMode, cell_order
from nwor_bench.records.fallback_reasons import LeftOut
from nwor_bench.records.lines import batch_key
from nwor_bench.records.store import RunData
from nwor_bench.records.types import BatchRecord, CellResult, Interleave, Phase
from nwor_bench.records.window_order import compared
from nwor_bench.stats.interval import Interval, flat
from nwor_bench.stats.multiple import SIGNIFICANCE, ratio_at_once
from nwor_bench.stats.robust import mean_location, robust_location, robust_slope

SLOPE_MHZ = 100
"""Unit of the slope."""


@dataclass(frozen=True)
class ConditionEffects:
    """How a pair's effect depends on the machine's state; None if that did not vary."""

    per_100_mhz: Interval | None
    """Change of the log ratio for 100 MHz more."""

    if_throttled: Interval | None
    """Change of the log ratio from a batch never throttled to one always throttled."""

    over_the_run: Interval | None
    """Change of the log ratio from the first group to the last."""


def condition_effects(
    groups: Sequence[Group], effects: Sequence[float], batches: Mapping[int, BatchRecord]
) -> ConditionEffects:
    """Effects of groups by the conditions of their batch; `batches` by number."""
    clocked, throttled = [], []
    for group, effect in zip(groups, effects, strict=True):
        batch = batches[group.batch]
        clock = batch.conditions.get("gpu_sm_clock_mhz")
        held_ms = batch.conditions.get("gpu_throttled_ms")
        if clock is not None:
            clocked.append((clock / SLOPE_MHZ, effect))
        if held_ms is not None:
            throttled.append((min(1.0, held_ms / batch.latency_ms), effect))
    timed = [(place / len(effects), effect) for place, effect in enumerate(effects)]
    return ConditionEffects(*map(_slope, (clocked, throttled, timed)))


def _slope(rows: Sequence[tuple[float, float]]) -> Interval | None:
    return robust_slope([effect for _, effect in rows], [covariate for covariate, _ in rows])


DEVICE_MS = "device_ms"
WALL_MS = "wall_ms"
WORK_MS = "work_ms"


@dataclass(frozen=True)
class ClockEffect:
    """Treated over reference on one clock."""

    robust: Interval
    """Huber's location: it decides."""

    mean: Interval
    """The mean over windows, rare long ones included."""


@dataclass(frozen=True)
class PairEffect:
    """Results of one pair's groups."""

    pair: Pair
    groups: tuple[Group, ...]
    left_out: dict[LeftOut, int]
    clock: str
    """The clock that decides: DEVICE_MS, or WALL_MS without a device's."""

    device: ClockEffect | None
    """None without a device's clock, or below MIN_GROUPS."""

    host: ClockEffect | None
    work: Interval | None
    """The ratio of the GPU's own work, by Huber's location; None if a group has none."""

    carry_over: Interval | None
    """The ratio in runs of two over that in endless runs: 1 without carry-over.

    Robust slope of the groups' effects against 1 / compared windows of a run: what a switch leaves
    behind in the first of them is spread over them all. None if runs are equally long.
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

    A cell that was interleaved with off x off has one, even without a complete group.
    """
    interleaved = [batch for batch in run.batches if batch.phase == Phase.INTERLEAVED]
    if not interleaved:
        return []
    keys = set(map(batch_key, interleaved))
    all_groups = find_groups(window for window in run.windows if batch_key(window) in keys)
    groups: dict[Pair, list[Group]] = {pair: [] for pair in [*_over_off(run), *all_groups.left_out]}
    for group in all_groups.counted:
        groups.setdefault(group.pair, []).append(group)
    batches = {batch.batch: batch for batch in interleaved}
    effects = []
    for pair in sorted(groups, key=lambda p: (cell_order(p.treated), cell_order(p.reference))):
        of_pair = groups[pair]
        clock = DEVICE_MS if of_pair and of_pair[0].device is not None else WALL_MS
        effects.append(
            PairEffect(
                pair=pair,
                groups=tuple(of_pair),
                left_out=dict(all_groups.left_out.get(pair, Counter())),
                clock=clock,
                device=_on_clock(of_pair, DEVICE_MS) if clock == DEVICE_MS else None,
                host=_on_clock(of_pair, WALL_MS),
                work=_work(of_pair),
                carry_over=_carry_over(of_pair, clock),
                conditions=condition_effects(of_pair, log_effects(of_pair, clock), batches),
            )
        )
    return effects


def effects_over_off(effects: Sequence[PairEffect]) -> dict[Cell, PairEffect]:
    """The pairs that give a cell's ratio, by that cell: those over off x off, and of a staged draft
    count that over the same count in mode off."""
    return {effect.pair.treated: effect for effect in effects if effect.pair.is_over_stock}


def switch_cost(effects: Iterable[PairEffect], *, counts: bool) -> Interval | None:
    """Time of first windows after a change of k, which are left out, over the compared ones.

    Args:
        counts: False for the A/A arm, k = 0 behind k = 0, which changes nothing.
    """
    groups = [g for effect in effects for g in effect.groups if effect.pair.by_drafts]
    chosen = [g.switch for g in groups if bool(g.pair.treated.drafts) is counts]
    located = robust_location([switch for switch in chosen if switch is not None])
    return None if located is None else located.exp()


def log_effects(groups: Sequence[Group], clock: str) -> list[float]:
    """Each group's log ratio on a clock that all of them have."""
    if clock == WALL_MS:
        return [group.host for group in groups]
    return [group.device for group in groups if group.device is not None]


def _over_off(run: RunData) -> list[Pair]:
    """Each interleaved cell, over what it is compared with."""
    interleaved = [
        event["cells"] for event in run.events if event.get("event") == Phase.INTERLEAVED
    ]
    labels = {label for cells in interleaved for label in cells}
    cells = {batch.cell for batch in run.batches if batch.cell.label in labels}
    pairs = [Pair(a, b) for a in cells for b in cells if a != b and a.pair == b.pair]
    return [pair for pair in pairs if pair.is_over_stock]


def _on_clock(groups: Sequence[Group], clock: str) -> ClockEffect | None:
    values = log_effects(groups, clock)
    robust, mean = robust_location(values), mean_location(values)
    if robust is None or mean is None:
        return None
    return ClockEffect(robust.exp(), mean.exp())


def _work(groups: Sequence[Group]) -> Interval | None:
    values = [group.work for group in groups if group.work is not None]
    located = robust_location(values) if len(values) == len(groups) else None
    return None if located is None else located.exp()


def _carry_over(groups: Sequence[Group], clock: str) -> Interval | None:
    shares = [1 / len(compared(g.run_length, counts=g.pair.by_drafts)) for g in groups]
    slope = robust_slope(log_effects(groups, clock), shares)
    return None if slope is None else slope.exp()


MIN_CLOCK_GROUPS = 20


def correlation_of_clocks(groups: Sequence[Group]) -> float | None:
    """Spearman's rank correlation of the groups' effects on the device's and the host's clock.

    None below MIN_CLOCK_GROUPS, without a device's clock, or if a clock shows no scatter.
    """
    both = [(group.device, group.host) for group in groups if group.device is not None]
    if len(both) < MIN_CLOCK_GROUPS:
        return None
    device, host = zip(*both, strict=True)
    if len(set(device)) == 1 or len(set(host)) == 1:
        return None
    from scipy.stats import spearmanr  # half a second

    return float(spearmanr(device, host).statistic)


def sham_windows(run: RunData) -> Counter[str]:
    """Interleaved windows of the A/A arm: `SWITCHED`, or by the reason why they were plain off.

    Empty for runs of older versions, whose A/A arm never switched anything.
    """
    counts: Counter[str] = Counter()
    for event in run.events:
        if event.get("event") == Phase.INTERLEAVED:
            for facts in event["cells"].values():
                counts.update(facts.get(SHAM) or {})
    return +counts


@dataclass(frozen=True)
class Split:
    """One staging cell's parts, each with its interval."""

    cell: Cell
    control: Cell
    clock: str
    """WORK_MS if the GPU's work was timed: it is known more precisely than the step."""

    total: Interval
    """stage over off."""

    attention: Interval
    """control over off."""

    writes: Interval
    """stage over control."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for run.json."""
        parts = {"total": self.total, "attention": self.attention, "writes": self.writes}
        return {
            "cell": self.cell.label,
            "control": self.control.label,
            "compared": self.clock,
            **{name: flat(part) for name, part in parts.items()},
        }


def splits(effects: Sequence[PairEffect], cells: Sequence[CellResult]) -> list[Split]:
    """One entry a staging cell with groups against control x off, and both against off x off.

    Both cells' own ratios must be those of windows: one that is INVALID or INEFFECTIVE, or that
    whole batches decided, is not split.
    """
    trusted = {cell.cell for cell in cells if cell.compared and cell.interleaved == WINDOWS}
    over_off = effects_over_off(effects)
    entries = []
    for writes in effects:
        control, stage = writes.pair.reference, writes.pair.treated
        if control.nwor_mode is not NworMode.CONTROL or not {control, stage} <= trusted:
            continue
        total, attention = over_off.get(stage), over_off.get(control)
        if total is None or attention is None:
            continue
        parts = (total, attention, writes)
        work = [effect.work for effect in parts if effect.work is not None]
        steps = [effect.decisive.robust for effect in parts if effect.decisive is not None]
        for clock, ratios in ((WORK_MS, work), (total.clock, steps)):
            if len(ratios) == len(parts):
                entries.append(Split(stage, control, clock, *ratios))
                break
    return entries


WINDOWS = Interleave.WINDOWS.value
BATCHES = Interleave.BATCHES.value


def deciding(windows: Interval | None, batches: Interval | None, cells: int) -> str:
    """WINDOWS, unless there is no estimate of them or whole batches disagree with it.

    Args:
        windows: the ratio from groups of neighbouring windows.
        batches: the same cell's ratio from whole batches.
        cells: compared cells: in 19 of 20 runs without a real difference none disagrees.
    """
    if windows is None:
        return BATCHES
    if batches is None or not disagree(windows, batches, cells):
        return WINDOWS
    return BATCHES


def disagree(one: Interval, other: Interval, cells: int = 1) -> bool:
    """True if the intervals do not overlap; each is widened so that those of all cells hold."""
    ours, others = ratio_at_once(one, cells), ratio_at_once(other, cells)
    return ours.high < others.low or others.high < ours.low


def mean_disagrees(effect: PairEffect, cells: int = 1) -> bool:
    """True if the mean differs from the robust location: a few windows carry a difference."""
    decisive = effect.decisive
    return decisive is not None and disagree(decisive.robust, decisive.mean, cells)


def carries_over(effect: PairEffect, cells: int = 1) -> bool:
    """True if the effect depends on the length of run (Bonferroni over the compared cells)."""
    carry_over = effect.carry_over
    return carry_over is not None and carry_over.p_value * cells < SIGNIFICANCE
