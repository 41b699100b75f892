"""Data type, commands and advice are those of the run that the report is about."""

import re
from dataclasses import replace

import pytest
from report_runs import faster, gpu_run, slower
from synthetic_run import analysed, document_of, make_run, with_header, with_parts

from nwor_bench.records.store import RunData
from nwor_bench.report.markdown import render_markdown

pytestmark = pytest.mark.slow  # whole runs


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
def test_to_repeat_names_a_command_that_repeats_this_run_alone(command, shown):
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


def test_a_cpu_run_is_not_told_to_add_blocks_or_to_mend_cuda():
    run = make_run(aa=True)
    remedies = {f.kind: f.remedy for f in analysed(run).findings}
    assert "Times on a CPU" in remedies["few_blocks"]
    assert "needs CUDA" in remedies["ineffective"]
    gpu = replace(run, header=gpu_run().header)
    assert "--batches" in {f.kind: f.remedy for f in analysed(gpu).findings}["few_blocks"]
