"""The files and the terminal's view: fixed columns, empty cells, 80 columns, reasons told."""

import csv
from dataclasses import fields
from io import StringIO
from pathlib import Path

import pytest
from fake_bench import FACTS, make_bench

from nwor_bench.microbench.bench import run_groups
from nwor_bench.microbench.cases import OURS, Spec, Window, expand
from nwor_bench.microbench.report import document, write_files
from nwor_bench.microbench.rows import Result, Row
from nwor_bench.records.facts import Environment
from nwor_bench.report.markdown import render_markdown

SPEC = Spec(windows=(Window(8, 4), Window(256, 8)), acceptances=(0.1,), max_rounds=5)
ENVIRONMENT = Environment(packages={"torch": "2.11.0", "triton": "3.6.0", "vllm": None})


@pytest.fixture(scope="module")
def result() -> Result:
    bench = make_bench(
        SPEC,
        {OURS: 1234.5},
        refused={"flash_attention_3": "it does not import"},
        wrong={"vllm_cuda": "layer 0: 9 bytes differ from the reference"},
    )
    rows = run_groups(bench, expand(SPEC), lambda group, lines: None)
    return Result(SPEC, rows, "nwor-bench kernels --seed 0", FACTS, ENVIRONMENT, 12.3)


@pytest.mark.slow
def test_csv_has_fixed_columns_and_leaves_empty_what_was_not_measured(
    result: Result, tmp_path: Path
) -> None:
    write_files(tmp_path, result)
    text = (tmp_path / "kernels.csv").read_text()
    rows = list(csv.DictReader(StringIO(text)))
    assert list(rows[0]) == [field.name for field in fields(Row)]
    assert len(rows) == len(result.rows)
    untimed = [row for row in rows if row["status"] != "OK"]
    assert {row["implementation"] for row in untimed} == {"vllm_cuda", "flash_attention_3"}
    assert {row["time_us"] + row["gb_per_s"] + row["rounds"] for row in untimed} == {""}
    assert "nan" not in text.lower()
    ours = rows[0]
    assert float(ours["time_us"]) == pytest.approx(1234.5, rel=1e-2)
    assert (ours["launches"], ours["context"]) == ("1", "")


def test_markdown_says_how_it_was_made_and_what_is_wrong(result: Result) -> None:
    text = render_markdown(document(result))
    assert "nwor-bench kernels --seed 0" in text
    assert "Fake GPU" in text
    headline = text.splitlines()[2]
    assert headline.startswith("**INVALID: ")
    assert headline.count("9 bytes differ") == 2 * 2  # windows, cache dtypes
    assert "it does not import" in text
    assert "| 8x4, 0.1" in text
    for kernel in ("commit, fp8 cache", "verify_attention, bf16"):
        assert kernel in text


def test_the_answer_is_each_kernels_time_against_its_main_peer() -> None:
    bench = make_bench(SPEC, {OURS: 4.0, "vllm_cuda": 80.0})
    rows = run_groups(bench, expand(SPEC), lambda group, lines: None)
    shown = document(Result(SPEC, rows, "", FACTS, ENVIRONMENT, 1.0))
    headline = render_markdown(shown).splitlines()[2]
    assert "commit: vllm_cuda takes 20.0 to 20.0 times our time." in headline
    assert "verify_attention: flash_attention_3 takes 1.25 to 1.25 times our time." in headline
