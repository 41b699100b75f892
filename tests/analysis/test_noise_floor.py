"""Cells compared together: the A/A arm, correction for their number, the noise floor."""

from dataclasses import replace

import pytest
from synthetic_run import change_batches, change_windows, make_run, summarised

from nwor_bench.analysis.analyse import noise_floor
from nwor_bench.records.store import RunData
from nwor_bench.records.types import Verdict
from nwor_bench.stats.multiple import SIGNIFICANCE


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


def test_the_aa_arm_is_a_cell_after_off_x_off(run):
    labels = [cell.label for cell in summarised(run)]
    assert labels[:3] == ["off x off", "off x off (A/A)", "off x graph"]
    arm = cells_by_label(run)["off x off (A/A)"]
    assert (arm.verdict, arm.arm, arm.parity) == (Verdict.SAME, "A/A", "exact")
    assert arm.ratio_ci_low < 1 < arm.ratio_ci_high
    assert arm.batches == 12


def test_the_floor_is_how_far_its_interval_reaches(run):
    floor = noise_floor(summarised(run))
    assert floor["floor"] == max(1 - floor["low"], floor["high"] - 1)
    assert floor["half_width"] == (floor["high"] - floor["low"]) / 2
    assert 0 < floor["floor"] < 0.01
    assert noise_floor(summarised(make_run(blocks=4))) is None


def test_an_effect_below_the_floor_is_not_called(run):
    """The A/A arm is shifted by 8 %, beyond the planted 6 %: nothing can be told apart."""
    biased = slowed(run, lambda w: w.arm is not None, [1.08] * 12)
    stage = cells_by_label(biased)["stage x off"]
    assert stage.ratio_ci_low > 1.05
    assert stage.verdict == Verdict.AMBIGUOUS
    assert "noise floor" in stage.reason
    assert cells_by_label(biased)["off x off (A/A)"].verdict == Verdict.SLOWER


def test_p_values_are_corrected_for_the_cells_but_the_arms(run):
    cells = cells_by_label(run)
    compared = [c for c in cells.values() if c.ratio_to_off is not None and c.arm is None]
    assert len(compared) == 5
    least = min(compared, key=lambda c: c.p_value)
    assert least.p_value_holm == pytest.approx(5 * least.p_value)
    assert all(c.p_value_holm >= c.p_value for c in compared)
    assert cells["off x off (A/A)"].p_value_holm is None


def test_a_difference_that_does_not_survive_the_correction_is_not_called():
    """Five cells; one differs by little more than its own noise: p about 0.03."""
    run = make_run(blocks=12, aa=True, device="cuda")
    flat = slowed(run, lambda w: w.nwor_mode == "stage", [1 / 1.06] * 12)
    noise = [1.03, 0.98, 1.05, 0.99, 1.06, 0.98, 1.04, 1.01, 1.05, 0.99, 1.07, 1.02]
    odd = slowed(flat, lambda w: (w.nwor_mode, w.scv_mode) == ("stage", "off"), noise)
    cell = cells_by_label(odd)["stage x off"]
    assert cell.p_value < SIGNIFICANCE <= cell.p_value_holm
    assert cell.ratio_ci_low > 1
    assert cell.verdict == Verdict.AMBIGUOUS
    assert "after correction for 5 cells" in cell.reason


def test_an_arm_that_breaks_parity_is_invalid_and_gives_no_floor(run):
    broken = change_batches(
        run, lambda b: b.arm is not None and b.phase == "gate", parity="INVALID",
        first_mismatch="request 0",
    )  # fmt: skip
    assert cells_by_label(broken)["off x off (A/A)"].verdict == Verdict.INVALID
    assert noise_floor(summarised(broken)) is None
    assert cells_by_label(broken)["off x off"].verdict == "reference"
    assert cells_by_label(broken)["stage x off"].verdict == Verdict.SLOWER


def test_the_arms_windows_are_not_taken_for_off_x_offs(run):
    """Only the arm is slower: no other ratio may move."""
    biased = change_windows(run, lambda w: w.arm is not None, wall_ms=500.0)
    for label, cell in cells_by_label(run).items():
        if "A/A" not in label:
            assert cells_by_label(biased)[label].ratio_to_off == cell.ratio_to_off


def test_the_arm_never_stands_in_for_off_x_off(run):
    def baseline(batch) -> bool:
        return (batch.nwor_mode, batch.scv_mode, batch.arm) == ("off", "off", None)

    broken = change_batches(run, baseline, parity="INVALID")
    assert cells_by_label(broken)["stage x off"].ratio_to_off is None
