"""Reports state precision and findings; data type, commands and advice are those of the run."""

import re
from dataclasses import replace

import pytest
from report_runs import gpu_run
from synthetic_run import (
    analysed,
    change_batches,
    document_of,
    make_run,
    with_header,
    with_parts,
)

from nwor_bench.records.store import RunData
from nwor_bench.report.markdown import render_markdown
from nwor_bench.report.text import with_bounds

pytestmark = pytest.mark.slow  # whole runs


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
