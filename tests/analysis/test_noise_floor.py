"""Cells compared together: the A/A arm, correction for their number, the noise floor."""

from dataclasses import replace

import pytest
from synthetic_run import change_batches, make_run, summarised

from nwor_bench.analysis.analyse import noise_floor
from nwor_bench.records.store import RunData
from nwor_bench.records.types import Verdict
from nwor_bench.stats.multiple import SIGNIFICANCE

ARM = "off x off (A/A)"


def cells_by_label(run: RunData):
    return {cell.label: cell for cell in summarised(run)}


def slowed(run: RunData, test, factors) -> RunData:
    """The run with window times of block b multiplied by factors[b - 1] where `test` holds."""
    windows = tuple(
        replace(w, wall_ms=w.wall_ms * factors[w.block - 1]) if w.block and test(w) else w
        for w in run.windows
    )
    return replace(run, windows=windows)


@pytest.fixture(scope="module")
def run() -> RunData:
    return make_run(blocks=12, aa=True, device="cuda")


def test_the_floor_is_how_far_the_arms_interval_reaches(run):
    arm = cells_by_label(run)[ARM]
    assert [cell.label for cell in summarised(run)][:3] == ["off x off", ARM, "off x graph"]
    assert (arm.verdict, arm.arm, arm.parity, arm.batches) == (Verdict.SAME, "A/A", "exact", 12)
    floor = noise_floor(summarised(run))
    assert (floor["low"], floor["high"]) == (arm.ratio.low, arm.ratio.high)
    assert floor["low"] < 1 < floor["high"]
    assert floor["floor"] == max(1 - floor["low"], floor["high"] - 1)
    assert floor["half_width"] == (floor["high"] - floor["low"]) / 2
    assert 0 < floor["floor"] < 0.01
    assert noise_floor(summarised(make_run(blocks=4))) is None


def test_an_effect_below_the_floor_is_not_called(run):
    """The A/A arm is shifted by 8 %, beyond the planted 6 %. No other ratio moves."""
    biased = cells_by_label(slowed(run, lambda w: w.arm is not None, [1.08] * 12))
    stage = biased["stage x off"]
    assert stage.ratio.low > 1.05
    assert stage.verdict == Verdict.AMBIGUOUS
    assert "noise floor" in stage.reason
    assert biased[ARM].verdict == Verdict.SLOWER
    for label, cell in cells_by_label(run).items():
        assert label == ARM or biased[label].ratio == cell.ratio


def test_p_values_are_corrected_for_the_cells_but_the_arms(run):
    cells = cells_by_label(run)
    compared = [c for c in cells.values() if c.ratio is not None and c.arm is None]
    assert len(compared) == 5
    least = min(compared, key=lambda c: c.p_value)
    assert least.p_value_holm == pytest.approx(5 * least.p_value)
    assert all(c.p_value_holm >= c.p_value for c in compared)
    assert cells[ARM].p_value_holm is None
    # Five cells; one differs by little more than its own noise: p about 0.03.
    flat = slowed(run, lambda w: w.nwor_mode == "stage", [1 / 1.06] * 12)
    noise = [1.03, 0.98, 1.05, 0.99, 1.06, 0.98, 1.04, 1.01, 1.05, 0.99, 1.07, 1.02]
    odd = slowed(flat, lambda w: (w.nwor_mode, w.scv_mode) == ("stage", "off"), noise)
    cell = cells_by_label(odd)["stage x off"]
    assert cell.p_value < SIGNIFICANCE <= cell.p_value_holm
    assert cell.ratio.low > 1
    assert cell.verdict == Verdict.AMBIGUOUS
    assert "after correction for 5 cells" in cell.reason


def test_a_broken_arm_gives_no_floor_and_stands_in_for_nothing(run):
    broken = change_batches(
        run, lambda b: b.arm is not None and b.phase == "gate", parity="INVALID",
        first_mismatch="request 0",
    )  # fmt: skip
    cells = cells_by_label(broken)
    assert [cells[label].verdict for label in (ARM, "off x off", "stage x off")] == [
        Verdict.INVALID, "reference", Verdict.SLOWER
    ]  # fmt: skip
    assert noise_floor(summarised(broken)) is None
    baseline = ("off", "off", None)
    broken = change_batches(
        run, lambda b: (b.nwor_mode, b.scv_mode, b.arm) == baseline, parity="INVALID"
    )
    assert cells_by_label(broken)["stage x off"].ratio is None
