"""What reports say of the K/V gate."""

from dataclasses import replace
from typing import Any

import pytest
from report_runs import faster
from synthetic_run import analysed, document_of, with_parts

from nwor_bench.analysis.parity.kv import KvMismatch, KvResult, KvVerdict, kv_event
from nwor_bench.records.store import RunData
from nwor_bench.records.types import Cell, NworMode, ScvMode
from nwor_bench.report.answer import questions
from nwor_bench.report.evidence import kv_blocks
from nwor_bench.report.markdown import render_markdown

STAGE = Cell("tiny", NworMode.STAGE, ScvMode.OFF)
GRAPH = Cell("tiny", NworMode.STAGE, ScvMode.GRAPH)
FINDING = KvMismatch("largest", 0.02, 0.03, 0.01, 0, 1, "layers.1", "V", "output", 2, 7, 1)
COUNTS: dict[str, Any] = {
    "committed": 2293, "checked": 2200, "unknown": 93, "beyond_budget": 0, "layers": 28,
    "ranks": 2, "finding": FINDING,
}  # fmt: skip
WITHIN = KvResult(KvVerdict.WITHIN, **COUNTS)
NOT_RUN = KvResult(KvVerdict.NOT_RUN, "nothing was staged")
FACTS = {
    "seconds": 0.5,
    "gate_seconds": 10.0,
    "multiples": {"largest": 3.0},
    "own_errors": {"largest": {"smallest": 0.001, "largest": 0.01}},
}


def with_kv(*results: tuple[Cell, KvResult]) -> RunData:
    run = faster()
    events = tuple(kv_event(cell, result) for cell, result in results)
    return with_parts(replace(run, events=(*run.events, *events)), kv_gate=FACTS)


def answered(run: RunData) -> str:
    return dict(questions(analysed(run)).entries)["Is the output the same?"]


def test_the_answer_says_how_far_the_cache_was_compared() -> None:
    said = answered(with_kv((STAGE, WITHIN), (GRAPH, WITHIN)))
    assert said.endswith(
        "The KV cache of stage x off and stage x graph is what mode off leaves, within tolerance: "
        "2,200 of 2,293 positions in 28 layers on 2 ranks were compared."
    )


def test_what_was_not_compared_is_said_too() -> None:
    said = answered(with_kv((STAGE, WITHIN), (GRAPH, NOT_RUN)))
    assert "The KV cache of stage x off is what mode off leaves" in said
    assert said.endswith("The KV cache of stage x graph was not checked: nothing was staged.")


def test_a_run_without_a_kv_gate_says_nothing_of_it() -> None:
    assert "KV cache" not in answered(faster())
    assert kv_blocks(faster()) == []


def test_only_the_last_result_of_a_cell_counts() -> None:
    assert "not checked" not in answered(with_kv((STAGE, NOT_RUN), (STAGE, WITHIN)))


@pytest.mark.slow
def test_the_report_holds_the_gate_s_findings_and_cost() -> None:
    reason = FINDING.sentence(1)
    broken = KvResult(KvVerdict.BROKEN, reason, **COUNTS)
    run = with_kv((STAGE, broken), (GRAPH, WITHIN))
    text = render_markdown(document_of(run))
    assert reason in text
    assert "2,200 of 2,293" in text
    assert "0.67" in text  # 0.02 of 0.03 allowed
    assert "The KV cache of stage x off is wrong." in answered(run)


@pytest.mark.parametrize("error", [None, 0.5])
def test_a_result_has_a_form_in_json(error: float | None) -> None:
    finding = replace(FINDING, error=error, allowed=0.0)
    told = KvResult(KvVerdict.BROKEN, "K/V: ...", finding=finding).to_dict()
    assert told["finding"]["ratio"] is None
    assert told["verdict"] == "INVALID"
