"""Planted effects, carry-over and dependence on clocks are found; the split adds up."""

from dataclasses import replace
from math import exp, log
from random import Random
from types import SimpleNamespace

import pytest
from interleaved_run import CONTROL, OFF, STAGE_GRAPH, Planted, interleaved_run
from synthetic_run import AA_CELL, summarised

from nwor_bench.analysis.effects import (
    DEVICE_MS,
    WALL_MS,
    PairEffect,
    carries_over,
    disagree,
    effects_over_off,
    mean_disagrees,
    pair_effects,
    splits,
    switch_cost,
)
from nwor_bench.analysis.groups import Pair
from nwor_bench.records.cell import Drafts
from nwor_bench.records.store import RunData
from nwor_bench.records.types import NworMode
from nwor_bench.stats.interval import Interval

pytestmark = pytest.mark.slow  # whole runs


EFFECTS = {"stage x graph": 0.972, "control x off": 0.985, "stage x off": 1.003}
WHOLE = {"graph": 0.972, "control": 0.985, "off": 1.003}


def of_stage_graph(run: RunData) -> PairEffect:
    return effects_over_off(pair_effects(run))[STAGE_GRAPH]


def test_planted_effects_are_inside_their_intervals() -> None:
    effects = effects_over_off(pair_effects(interleaved_run(Planted(EFFECTS))))
    assert len(effects) == 7
    for cell, effect in effects.items():
        assert effect.clock == DEVICE_MS
        assert len(effect.groups) == 96
        for found in (effect.device, effect.host):
            assert found is not None
            truth = EFFECTS.get(cell.label, 1.0)
            # 14 intervals of 95 %: each widened by half.
            assert abs(log(found.robust.value / truth)) < 1.5 * found.robust.half_width
            assert found.robust.half_width < 0.002


@pytest.mark.parametrize("device", [True, False])
def test_each_clock_has_its_own_effect(device: bool) -> None:
    """Without a device's clock the host's decides."""
    effect = of_stage_graph(interleaved_run(Planted(EFFECTS, host=0.0), device=device))
    assert effect.host is not None
    assert abs(effect.host.robust.value - 1) < 0.001
    assert (effect.clock, effect.device is None) == ((WALL_MS, DEVICE_MS)[device], not device)
    assert effect.decisive is (effect.device or effect.host)
    if effect.device is not None:
        assert effect.device.robust.high < 0.98


def test_carry_over_is_found_and_none_is_not() -> None:
    assert not carries_over(of_stage_graph(interleaved_run(Planted(EFFECTS), 30)))
    few = of_stage_graph(interleaved_run(Planted(EFFECTS), batches=3))
    assert few.carry_over is None  # 24 groups, of which 12 have runs of 4
    effect = of_stage_graph(interleaved_run(Planted(EFFECTS, carry_over=0.02), 30))
    assert carries_over(effect, cells=7)
    assert {group.run_length for group in effect.groups} == {2, 4}
    # All of it in runs of two, a third in runs of four.
    assert effect.carry_over is not None
    assert effect.carry_over.value == pytest.approx(1.02, abs=0.006)


def test_the_cost_of_a_switch_is_that_of_groups_whose_count_changes() -> None:
    zero, one, again = (replace(OFF, arm=arm) for arm in (Drafts(0), Drafts(1), AA_CELL.arm))
    mode = replace(one, nwor_mode=NworMode.STAGE)
    rng = Random(1)
    effects = [
        SimpleNamespace(
            pair=Pair(*cells),
            groups=[SimpleNamespace(pair=Pair(*cells), switch=rng.gauss(cost, 0.01))
                    for _ in range(60)],
        )
        for cells, cost in (
            ((zero, one), 0.05), ((zero, again), 0.0), ((one, mode), 0.3), ((OFF, STAGE_GRAPH), 0.3)
        )
    ]  # fmt: skip
    effects[0].groups.append(SimpleNamespace(pair=effects[0].pair, switch=None))
    for counts, cost in ((True, 0.05), (False, 0.0)):
        found = switch_cost(effects, counts=counts)  # type: ignore[arg-type]
        assert found is not None
        assert found.count == 60
        assert found.value == pytest.approx(exp(cost), abs=0.004)
    assert switch_cost(effects[2:], counts=True) is None  # type: ignore[arg-type]


def test_rare_long_windows_move_only_the_mean() -> None:
    quiet = of_stage_graph(interleaved_run(Planted(EFFECTS), batches=40))
    assert not mean_disagrees(quiet)
    rare = of_stage_graph(interleaved_run(Planted(EFFECTS, long_windows=0.03), batches=40))
    assert mean_disagrees(rare)
    assert rare.device is not None
    assert rare.device.mean.value > rare.device.robust.value + 0.01


@pytest.mark.parametrize(
    ("clocks", "slope"), [((1980.0, 1410.0, 1410.0, 1695.0), 0.0), ((1980.0, 1410.0), 0.002)]
)
def test_whether_an_effect_depends_on_the_clock(clocks: tuple[float, ...], slope: float) -> None:
    planted = Planted(EFFECTS, clocks=clocks, per_100_mhz=slope)
    found = of_stage_graph(interleaved_run(planted)).conditions
    assert found.if_throttled is not None
    assert found.per_100_mhz is not None
    if slope:
        assert found.per_100_mhz.value == pytest.approx(slope, abs=3e-4)
        assert found.per_100_mhz.p_value < 1e-4
    else:
        assert found.per_100_mhz.p_value > 0.01
    one_clock = of_stage_graph(interleaved_run(Planted(EFFECTS))).conditions
    assert one_clock.per_100_mhz is None


def test_the_split_adds_up() -> None:
    run = interleaved_run(Planted(EFFECTS), whole=WHOLE)
    (split,) = splits(pair_effects(run), summarised(run))
    assert (split.cell, split.control) == (STAGE_GRAPH, CONTROL)
    for part, truth in (
        (split.total, 0.972), (split.attention, 0.985), (split.writes, 0.972 / 0.985),
    ):  # fmt: skip
        assert abs(log(part.value / truth)) < 1.5 * part.half_width
    apart = log(split.attention.value * split.writes.value / split.total.value)
    assert abs(apart) < 0.003
    assert split.to_dict()["attention"]["ratio"] == split.attention.value

    run = interleaved_run(Planted(EFFECTS), whole={**WHOLE, "control": 0.8})
    assert splits(pair_effects(run), summarised(run)) == []  # whole batches decided
    assert splits([], []) == []


def test_runs_without_interleaved_batches_have_no_effects() -> None:
    run = interleaved_run(Planted({}), batches=0)
    assert pair_effects(run) == []
    assert all(cell.interleaved is None for cell in summarised(run))


def test_intervals_disagree_from_both_half_widths_on() -> None:
    def interval(ratio: float, error: float) -> Interval:
        """From so many blocks that t is the normal quantile, 1.96."""
        return Interval.of(log(ratio), error, 10**6, 10**6).exp()

    windows, seen = interval(0.97, 0.001), exp(1.96 * (0.001 + 0.05)) - 1
    for share, disagrees in ((0.99, False), (1.01, True)):
        there = interval(0.97 * (1 + share * seen), 0.05)
        assert disagree(windows, there) is disagrees
        assert not disagree(windows, there, cells=7)  # widened
        assert not disagree(windows, Interval.unbounded(9.0, 2))
