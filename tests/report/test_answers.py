"""The answer and the questions after it: right for each kind of run."""

import re

import pytest
from report_runs import RUNS, faster, gpu_run
from synthetic_run import analysed, kept, summarised

from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult
from nwor_bench.report.answer import answer
from nwor_bench.report.questions import questions
from nwor_bench.report.text import change_range, signed, sure_rates

pytestmark = pytest.mark.slow  # whole runs


def told(run: RunData) -> dict[str, str]:
    return dict(questions(analysed(run)).entries)


def named(cells: list[CellResult], label: str) -> CellResult:
    return next(cell for cell in cells if cell.label == label)


@pytest.mark.parametrize("name", ["invalid", "ineffective", "cpu"])
def test_no_effect_is_named_if_none_counts(name):
    run = RUNS[name]()
    texts = [answer(run.header, summarised(run)).sentence, *told(run).values()]
    assert not re.search(r"\d %", " ".join(texts))


def test_the_answer_names_the_best_cell_its_effect_and_its_interval():
    run = faster()
    cells = summarised(run)
    best = named(cells, "stage x graph")
    assert best.ratio_to_off == min(c.ratio_to_off for c in cells if c.ratio_to_off is not None)
    low, high = best.ratio_simultaneous_low, best.ratio_simultaneous_high
    assert low < best.ratio_ci_low < best.ratio_ci_high < high < 1
    time = f"time of a window {signed(best.ratio_to_off, (low, high))}"
    rate = signed(best.tokens_per_s_ratio, sure_rates(best), "tokens/s")
    sentence = answer(run.header, cells).sentence
    assert sentence.startswith(f"{rate} with stage x graph: NWOR pays here (TPOT -2.")
    assert f"; {time}; 95 % intervals, corrected for 5 compared cells)" in sentence


def test_one_compared_cell_needs_no_correction():
    run = faster()
    two = {("off", "off"), ("stage", "graph")}
    run = kept(run, lambda record: (record.nwor_mode, record.scv_mode) in two)
    best = named(summarised(run), "stage x graph")
    assert best.ratio_simultaneous_low == pytest.approx(best.ratio_ci_low, rel=1e-12)
    assert best.ratio_simultaneous_high == pytest.approx(best.ratio_ci_high, rel=1e-12)
    sentence = answer(run.header, summarised(run)).sentence
    assert sentence.endswith("; 95 % intervals).")
    assert "corrected" not in " ".join([sentence, *told(run).values()])


def test_more_blocks_are_advised_by_the_square_of_the_effect():
    run = gpu_run({"off": 1.0, "graph": 1.0, "adaptive": 1.0}, noise=0.012, blocks=8)
    cells = summarised(run)
    cell = answer(run.header, cells).cell
    wanted = int(re.search(r"--batches (\d+)", told(run)["What next?"]).group(1))
    assert wanted == pytest.approx((cell.smallest_effect / 0.01) ** 2 * 8, abs=1)
    hopeless = gpu_run(noise=0.3, blocks=8)
    assert "find out what disturbs the machine" in told(hopeless)["What next?"]


@pytest.mark.parametrize(
    ("ratio", "bounds", "text"),
    [
        (1.029, (1.027, 1.0311), "+2.9 % x [2.7, 3.1]"),
        (0.972, (0.971, 0.973), "-2.80 % x [-2.90, -2.70]"),
        (1.0043, (0.997, 1.0116), "+0.43 % x [-0.30, 1.16]"),
        (0.5, None, "-50.0 % x"),
    ],
)
def test_signed_changes_have_digits_that_fit(ratio, bounds, text):
    assert signed(ratio, bounds, "x") == text


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ((0.976, 0.982), "1.8 % to 2.4 % less"),
        ((1.048, 1.051), "4.8 % to 5.1 % more"),
        ((0.99, 1.02), "anywhere from 1.0 % less to 2.0 % more"),
    ],
)
def test_intervals_read_as_ranges(ends, text):
    assert change_range(*ends) == text
