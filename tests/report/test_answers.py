"""Answers, advice and numbers of reports, computed anew; golden pages hold the words."""

import re
from dataclasses import replace

import pytest
from report_runs import RUNS, faster, gpu_run
from synthetic_run import (
    analysed,
    change_batches,
    document_of,
    kept,
    make_run,
    summarised,
    with_header,
    with_parts,
)

from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult
from nwor_bench.report.answer import answer
from nwor_bench.report.markdown import render_markdown
from nwor_bench.report.questions import questions
from nwor_bench.report.text import change_range, signed, with_bounds
from nwor_bench.stats.robust import from_ends

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
    assert best.ratio.value == min(c.ratio.value for c in cells if c.ratio is not None)
    assert best.sure.low < best.ratio.low < best.ratio.high < best.sure.high < 1
    time = f"time of a window {signed(best.ratio.value, best.sure)}"
    rate = signed(best.rate.value, best.sure_rate, "tokens/s")
    sentence = answer(run.header, cells).sentence
    assert sentence.startswith(f"{rate} with stage x graph: NWOR pays here (TPOT -2.")
    assert f"; {time}; 95 % intervals, corrected for 5 compared cells)" in sentence


def test_one_compared_cell_needs_no_correction():
    run = faster()
    two = {("off", "off"), ("stage", "graph")}
    run = kept(run, lambda record: (record.nwor_mode, record.scv_mode) in two)
    best = named(summarised(run), "stage x graph")
    assert best.sure.low == pytest.approx(best.ratio.low, rel=1e-12)
    assert best.sure.high == pytest.approx(best.ratio.high, rel=1e-12)
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
    assert signed(ratio, bounds and from_ends(ratio, *bounds, 8), "x") == text


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


def test_a_run_without_findings_says_so():
    made = make_run(blocks=12, aa=True, device="cuda")
    made = change_batches(made, lambda b: True, fallbacks={})
    text = render_markdown(document_of(made))
    assert "Nothing was found that weakens the numbers." in text


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (0.9691, 0.9603, 0.9772, "0.969 [0.960, 0.977]"),
        (0.96914, 0.96846, 0.96982, "0.9691 [0.9685, 0.9698]"),
        (1.00004, 0.99991, 1.00017, "1.0000 [0.9999, 1.0002]"),
        (1.0123, None, None, "1.012"),
    ],
)
def test_a_narrow_interval_has_a_fourth_digit(value, low, high, text):
    assert with_bounds(value, low, high) == text


def text(run: RunData) -> str:
    return render_markdown(document_of(run))


@pytest.mark.parametrize(
    ("asked", "engine", "said"),
    [("float32", "float32", "float32"), ("float32", None, "float32"),
     (None, "float16", "float16"), ("auto", "float16", "float16"), (None, None, "bfloat16")],
)  # fmt: skip
def test_the_data_type_is_that_of_the_run(asked, engine, said):
    run = with_header(make_run(), "pair", dtype="bfloat16")
    run = with_header(with_header(run, "spec", dtype=asked), "engine", dtype=engine)
    assert f"data type {said}," in text(run)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("nwor-bench sweep --pair tiny", "nwor-bench sweep --pair tiny"),
        ("nwor-bench sweep --output 'my run' --seed 3", "nwor-bench sweep --seed 3"),
        ("nwor-bench sweep --output=runs/x --seed 3", "nwor-bench sweep --seed 3"),
        ("nwor-bench sweep --file quick", None),
        ("nwor-bench sweep --resume runs/x", None),
        (None, None),
    ],
)
def test_to_repeat_names_a_command_that_repeats_only_this_run(command, shown):
    part = text(with_parts(make_run(), command=command)).split("## To repeat this run")[1]
    code = re.search(r"```\n(.*)\n```", part.split("\n## ")[0])
    assert (code.group(1) if code else None) == shown
    if shown is None:
        assert "was not recorded" in part


def test_a_cpu_run_is_not_advised_to_add_blocks_or_to_mend_cuda():
    run = make_run(blocks=2, aa=True)
    remedies = {f.kind: f.remedy for f in analysed(run).findings}
    assert "Times on a CPU" in remedies["ambiguous"]
    assert "needs CUDA" in remedies["ineffective"]
    gpu = replace(run, header=gpu_run().header)
    assert "--batches" in {f.kind: f.remedy for f in analysed(gpu).findings}["ambiguous"]
