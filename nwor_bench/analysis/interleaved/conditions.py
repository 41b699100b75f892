"""Does a pair's effect depend on the GPU's clock, or on throttling? By batch, as was recorded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nwor_bench.analysis.interleaved.groups import Group
from nwor_bench.analysis.interleaved.robust import Estimate, robust_slope
from nwor_bench.records.types import BatchRecord

SLOPE_MHZ = 100
"""Unit of the slope."""


@dataclass(frozen=True)
class BatchState:
    """The GPU during one batch; None where it was not recorded."""

    clock_mhz: float | None
    throttled_share: float | None
    """Throttled time over the batch's time."""


@dataclass(frozen=True)
class ConditionEffects:
    """How a pair's effect goes with the machine's state; None where it did not vary."""

    per_100_mhz: Estimate | None
    """Change of the log ratio for 100 MHz more."""

    throttled_share: float | None
    """Share of the groups whose batch was throttled."""

    if_throttled: Estimate | None
    """Change of the log ratio from a batch never throttled to one always throttled."""


def batch_state(batch: BatchRecord) -> BatchState:
    """The state that the batch's conditions tell."""
    held = batch.conditions.get("gpu_throttled_ms")
    share = None if held is None else min(1.0, held / batch.latency_ms)
    return BatchState(batch.conditions.get("gpu_sm_clock_mhz"), share)


def condition_effects(
    groups: Sequence[Group], effects: Sequence[float], states: Mapping[int, BatchState]
) -> ConditionEffects:
    """Effects of groups by the state of their batch; `states` by the batch's number."""
    rows = [(states[group.batch], effect) for group, effect in zip(groups, effects, strict=True)]
    clocked = [(s.clock_mhz, e) for s, e in rows if s.clock_mhz is not None]
    throttled = [(s.throttled_share, e) for s, e in rows if s.throttled_share is not None]
    return ConditionEffects(
        per_100_mhz=_slope([(clock / SLOPE_MHZ, e) for clock, e in clocked]),
        throttled_share=(
            sum(share > 0 for share, _ in throttled) / len(throttled) if throttled else None
        ),
        if_throttled=_slope(throttled),
    )


def _slope(rows: Sequence[tuple[float, float]]) -> Estimate | None:
    return robust_slope([effect for _, effect in rows], [covariate for covariate, _ in rows])
