"""Numbers and advice of reports, computed anew; golden pages hold the words."""

import re

import pytest
from report_runs import RUNS, gpu_run
from synthetic_run import analysed, document_of, make_run, summarised, with_header, with_parts

from nwor_bench.records.store import RunData
from nwor_bench.report.answer import answer
from nwor_bench.report.facts import facts, next_steps
from nwor_bench.report.markdown import render_markdown
from nwor_bench.report.text import signed, with_bounds
from nwor_bench.stats.robust import from_ends

pytestmark = pytest.mark.slow  # whole runs


def told(run: RunData) -> dict[str, str]:
    found = analysed(run)
    return dict((*facts(found).entries, *next_steps(found).entries))


@pytest.mark.parametrize("name", ["invalid", "ineffective", "cpu"])
def test_no_effect_is_named_if_none_counts(name):
    run = RUNS[name]()
    texts = [answer(run.header, summarised(run)).sentence, *told(run).values()]
    assert not re.search(r"\d %", " ".join(texts))


def test_more_blocks_are_advised_by_the_square_of_the_effect():
    run = gpu_run({"off": 1.0, "graph": 1.0, "adaptive": 1.0}, noise=0.012, blocks=8)
    cell = answer(run.header, summarised(run)).cell
    wanted = int(re.search(r"--batches (\d+)", told(run)["next"]).group(1))
    assert wanted == pytest.approx((cell.smallest_effect / 0.01) ** 2 * 8, abs=1)


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (signed(1.029, from_ends(1.029, 1.027, 1.0311, 8), "x"), "+2.9 % x (95 %: 2.7 to 3.1)"),
        (signed(0.972, from_ends(0.972, 0.971, 0.973, 8), "x"), "-2.80 % x (95 %: -2.90 to -2.70)"),
        (
            signed(1.0043, from_ends(1.0043, 0.997, 1.0116, 8), "x"),
            "+0.43 % x (95 %: -0.30 to 1.16)",
        ),
        (signed(0.5, None, "x"), "-50.0 % x"),
        (with_bounds(0.9691, 0.9603, 0.9772), "0.969 [0.960, 0.977]"),
        (with_bounds(0.96914, 0.96846, 0.96982), "0.9691 [0.9685, 0.9698]"),
        (with_bounds(1.00004, 0.99991, 1.00017), "1.0000 [0.9999, 1.0002]"),
        (with_bounds(1.0123, None, None), "1.012"),
    ],
)
def test_numbers_have_the_digits_that_their_interval_bears(shown, text):
    assert shown == text


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
    assert ("was not recorded" in part) is (shown is None)
