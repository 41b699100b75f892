"""Reports state precision and findings; data type, commands and advice are those of the run."""

import csv
import io
import json
import re
from dataclasses import replace

import pytest
from report_runs import faster, gpu_run, slower
from synthetic_run import (
    analysed,
    change_batches,
    document_of,
    make_run,
    save_run,
    summarised,
    with_header,
    with_parts,
    write_reports,
)

from nwor_bench.records.store import RunData
from nwor_bench.report.markdown import escape, render_markdown
from nwor_bench.report.run_report import build_document
from nwor_bench.report.text import with_bounds

pytestmark = pytest.mark.slow  # whole runs


@pytest.fixture
def run() -> RunData:
    """Ten blocks with the A/A arm, on a busy machine, stopped by its intervals' width."""
    made = make_run(blocks=10, aa=True)
    made = with_parts(
        made,
        warmup={"batches": 6, "lookback": 5, "not_steady": None},
        stopped="--ci-width 1%: every ratio is known to +- 0.20 %",
    )
    busy = {"cpu_other": 0.4, "cpu_steal": 0.0, "major_faults": 0.0, "swapped_in_bytes": 0.0}
    return change_batches(made, lambda b: b.phase == "timed", conditions=busy)


def test_markdown_tells_the_floor_the_smallest_effect_and_every_finding(run):
    cells = summarised(run)
    text = render_markdown(build_document(analysed(run, cells)))
    precision = text.split("## Measurement precision")[1].split("\n## ")[0]
    told = text.split("## Findings and limits")[1].split("\n## ")[0]
    for cell in cells:
        if cell.ratio_to_off is not None:
            assert f"| {escape(cell.label)} " in precision
            assert f"{100 * cell.smallest_effect:.2f} %" in precision
    assert "Warm-up took 6 batches; then times were steady" in precision
    assert "Blocks ended by --ci-width 1%" in precision
    found = analysed(run, cells).findings
    assert any(finding.kind == "cpu_busy" for finding in found)
    for finding in found:
        assert escape(finding.message) in told
        assert escape(finding.remedy) in told


def test_a_run_without_findings_says_so():
    made = make_run(blocks=12, aa=True, device="cuda")
    made = change_batches(made, lambda b: True, fallbacks={})
    text = render_markdown(document_of(made))
    assert "Nothing was found that weakens the numbers." in text


def test_run_json_holds_floor_and_findings(run, tmp_path):
    save_run(run, tmp_path / "run")
    paths = write_reports(tmp_path / "run")
    header = json.loads(paths.run_json.read_text())
    cells = summarised(run)
    arm = next(cell for cell in cells if cell.arm)
    assert header["noise_floor"]["half_width"] == arm.half_width
    assert header["noise_floor"]["cell"] == "off x off (A/A)"
    expected = [finding.to_dict() for finding in analysed(run, cells).findings]
    assert header["findings"] == expected
    assert {"kind", "severity", "message", "remedy", "cell"} == set(expected[0])
    batches = list(csv.DictReader(io.StringIO(paths.batches_csv.read_text())))
    assert json.loads(batches[-1]["conditions"])["cpu_other"] == 0.4
    assert {row["arm"] for row in batches} == {"", "A/A"}


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


def with_pair(run: RunData, choice: dict[str, str | None], **pair: str | None) -> RunData:
    return with_parts(with_header(run, "pair", **pair), choice=choice)


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


def test_advice_for_a_run_with_the_reader_s_own_models():
    own = with_pair(faster(), {"target_model": "org/name", "draft_model": "org/draft"},
                    target="org/name", method="draft_model")  # fmt: skip
    assert "with your own prompts and load" in text(own)
    assert "with your own models, prompts and load" in text(faster())
    lost = with_parts(slower(), choice=own.header.choice, pair={"target": "org/name"})
    assert "nwor-bench plan --config" in text(lost)
    on_cpu = with_parts(make_run(aa=True), choice=own.header.choice,
                        pair={"target": "org/name", "method": "draft_model"})  # fmt: skip
    assert "sweep --target-model org/name --draft-model org/draft --ci-width 0.5%" in text(on_cpu)
    assert "--target-model MODEL --method ngram" in text(make_run(aa=True))


def test_advice_switches_on_what_was_measured():
    copied = with_header(faster(), "spec", stage_by="copy")
    wanted = "VLLM_NWOR_MODE=stage VLLM_SCV_MODE=graph VLLM_NWOR_STAGE_BY=copy vllm serve"
    assert wanted in text(copied)
    assert "STAGE_BY" not in text(faster())
    forced = with_header(faster(), "spec", attention="merge")
    assert "VLLM_SCV_MODE=graph VLLM_NWOR_ATTENTION=merge vllm serve" in text(forced)


def test_a_cpu_run_is_not_advised_to_add_blocks_or_to_mend_cuda():
    run = make_run(blocks=2, aa=True)
    remedies = {f.kind: f.remedy for f in analysed(run).findings}
    assert "Times on a CPU" in remedies["ambiguous"]
    assert "needs CUDA" in remedies["ineffective"]
    gpu = replace(run, header=gpu_run().header)
    assert "--batches" in {f.kind: f.remedy for f in analysed(gpu).findings}["ambiguous"]
