"""What reports say of the K/V gate, and verdicts of cells whose values it did not compare."""

from dataclasses import replace
from typing import Any

import pytest
from report_runs import faster
from synthetic_run import analysed, change_batches, document_of, summarised, with_parts

from nwor_bench.analysis.parity.kv import KvMismatch, KvResult, KvVerdict, StateResult, kv_event
from nwor_bench.records.facts import CudaGraphs
from nwor_bench.records.store import RunData
from nwor_bench.records.types import AA, Cell, CellResult, NworMode, ScvMode
from nwor_bench.report.answer import answer
from nwor_bench.report.evidence import kv_blocks, state_blocks
from nwor_bench.report.markdown import render_markdown
from nwor_bench.report.questions import questions

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
    events = tuple(kv_event(cell, result, 0) for cell, result in results)
    return with_parts(replace(run, events=(*run.events, *events)), kv_gate=FACTS)


def answered(run: RunData) -> str:
    return dict(questions(analysed(run)).entries)["Is the output the same?"]


def test_the_answer_says_how_far_the_cache_was_compared() -> None:
    said = answered(with_kv((STAGE, WITHIN), (GRAPH, WITHIN)))
    assert said.endswith(
        "The KV cache of stage x off and stage x graph is what mode off leaves, within tolerance: "
        "2,200 of 2,293 positions in 28 layers on 2 ranks were compared."
    )


def test_layers_that_are_too_blunt_are_left_out_of_the_answer() -> None:
    said = answered(with_kv((STAGE, replace(WITHIN, layers=20, of_layers=28))))
    assert "2,200 of 2,293 positions in 20 of 28 layers on 2 ranks were compared." in said
    both = replace(WITHIN, states=replace(STATES, of_layers=36))
    assert "84 states of 7 requests in 12 of 36 layers" in answered(with_kv((STAGE, both)))


def test_what_was_not_compared_is_said_too() -> None:
    said = answered(with_kv((STAGE, WITHIN), (GRAPH, NOT_RUN)))
    assert "The KV cache of stage x off is what mode off leaves" in said
    assert said.endswith("The KV cache of stage x graph was not checked: nothing was staged.")


def test_what_the_gate_staged_stands_beside_what_was_timed() -> None:
    """The gate's batch of stage x off staged 10 of 40 drafts behind 400 prompt tokens."""
    modes = ("stage", "off")
    gate = lambda b: (b.phase, b.nwor_mode, b.scv_mode) == ("gate", *modes)  # noqa: E731
    run = change_batches(faster(), gate, draft_tokens=40, staged_tokens=10, prompt_tokens=400)
    graphs = CudaGraphs(attention={"2x5": "ours; stock at 8192 tokens"})
    engine = run.header.engine.model_copy(update={"cuda_graphs": graphs})  # type: ignore[union-attr]
    run = replace(run, header=run.header.model_copy(update={"engine": engine}))
    both = [b for b in run.batches if (b.nwor_mode, b.scv_mode) == modes]
    timed = [b for b in both if b.phase == "timed"]
    staged = sum(b.staged_tokens for b in timed) / sum(b.draft_tokens for b in timed)
    assert 0.9 < staged < 1
    page = " ".join(render_markdown(document_of(run)).split())
    # Two requests: 400 / 2 and 100 / 2 prompt tokens, and half of 128 / 2 output tokens.
    assert f"| stage x off | 25% | {100 * staged:.0f}% | 232 | 82 |" in page
    assert "2x5 ours; stock at 8192 tokens. In the gate" in page


OF_STATES = KvMismatch(
    "largest", 0.5, 0.02, 0.01, 0, 1, "layers.1", "recurrent state", "output", 2, 57, 3
)
STATES = StateResult(
    KvVerdict.WITHIN, None, 8, 7, 5, 12, 84, replace(OF_STATES, error=0.005, allowed=0.02)
)


def test_the_answer_says_how_many_states_were_compared() -> None:
    both = replace(WITHIN, states=STATES)
    said = answered(with_kv((STAGE, both), (GRAPH, both)))
    assert said.endswith(
        "84 states of 7 requests in 12 layers of stage x off and stage x graph equal mode off's "
        "end to end, within tolerance."
    )
    none = StateResult(KvVerdict.NOT_RUN, "nobody was copied", 2)
    said = answered(with_kv((STAGE, replace(WITHIN, states=none)), (GRAPH, WITHIN)))
    assert said.endswith("States of stage x off were not compared end to end: nobody was copied.")


@pytest.mark.slow
def test_the_report_holds_the_states_finding() -> None:
    reason = OF_STATES.sentence(1)
    assert reason.startswith("states: layer 1 (layers.1), request 2, position 57")
    broken = replace(STATES, verdict=KvVerdict.BROKEN, reason=reason, finding=OF_STATES)
    run = with_kv((STAGE, replace(WITHIN, states=broken)), (GRAPH, replace(WITHIN, states=STATES)))
    text = render_markdown(document_of(run))
    assert reason in text
    assert "25.00" in text  # 0.5 of 0.02 allowed
    assert "0.25" in text
    assert "A recurrent or convolution state of stage x off is wrong." in answered(run)


def test_a_run_without_a_kv_gate_says_nothing_of_it() -> None:
    assert "KV cache" not in answered(faster())
    assert kv_blocks(faster()) == state_blocks(faster()) == []
    assert state_blocks(with_kv((STAGE, WITHIN))) == []


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


NOT_COMPARED = "the gate did not compare its K/V with mode off's"


def gated(*verdicts: KvVerdict, parity: str = "acceptance only") -> RunData:
    """A run whose cells are all faster; the K/V gate's verdicts on its staging cells, in turn."""
    run = faster()
    batches = tuple(replace(b, parity=parity) if b.parity == "exact" else b for b in run.batches)
    cells = [Cell("toy", NworMode.STAGE, scv) for scv in ScvMode]
    events = tuple(
        kv_event(cell, KvResult(v, "its blocks were reused"), 0) for v in verdicts for cell in cells
    )
    return replace(run, batches=batches, events=(*run.events, *events))


def staged(run: RunData) -> CellResult:
    (found,) = [cell for cell in summarised(run) if cell.label == GRAPH.label]
    return found


@pytest.mark.parametrize(
    "verdicts", [(), (KvVerdict.NOT_RUN,), (KvVerdict.WITHIN, KvVerdict.NOT_RUN)]
)
def test_a_synthetic_cell_is_not_faster_if_its_values_were_never_compared(
    verdicts: tuple[KvVerdict, ...],
) -> None:
    cell = staged(gated(*verdicts))
    assert (cell.verdict, cell.ratio_to_off) == ("AMBIGUOUS", None)
    assert (cell.reason or "").startswith(NOT_COMPARED)


@pytest.mark.parametrize("verdict", [KvVerdict.WITHIN, KvVerdict.EXACT])
def test_a_synthetic_cell_whose_values_were_compared_is_faster(verdict: KvVerdict) -> None:
    assert staged(gated(KvVerdict.NOT_RUN, verdict)).verdict == "FASTER"


def test_tokens_of_the_target_show_wrong_values_too() -> None:
    assert staged(gated(parity="explained")).verdict == "FASTER"


def test_cells_of_mode_off_have_no_values_of_their_own() -> None:
    off = [cell for cell in summarised(gated()) if cell.nwor_mode == "off"]
    assert {cell.arm for cell in off} == {None, AA}
    assert all(cell.ratio_to_off is not None for cell in off if cell.verdict != "reference")


def test_the_terminal_and_the_report_say_why_there_is_no_verdict() -> None:
    run = gated(KvVerdict.NOT_RUN)
    said = answer(run.header, summarised(run))
    assert said.badge == "AMBIGUOUS"
    assert said.sentence.startswith(f"This run does not show whether NWOR pays: {NOT_COMPARED}")
    page = " ".join(render_markdown(document_of(run)).split())
    assert "Find under Evidence what the gate did not compare" in page
