"""What reports say of the K/V gate, and verdicts of cells whose values it did not compare."""

from dataclasses import replace

import pytest
from report_runs import faster
from said import FINDING, GRAPH, OF_STATES, STAGE, STATES, WITHIN, gated, with_kv
from synthetic_run import analysed, change_batches, document_of, make_run, summarised

from nwor_bench.analysis.parity.kv import KvResult, KvVerdict
from nwor_bench.records.store import RunData
from nwor_bench.records.types import AA, CellResult
from nwor_bench.report.evidence import evidence_section, kv_blocks, state_blocks
from nwor_bench.report.markdown import render_blocks, render_markdown
from nwor_bench.report.questions import questions


def answered(run: RunData) -> str:
    return dict(questions(analysed(run)).entries)["Is the output the same?"]


def test_what_the_gate_staged_stands_beside_what_was_timed() -> None:
    """The gate had 400 prompt tokens, and staged one window of stage x off by merging."""
    run = change_batches(faster(), lambda b: b.phase == "gate", prompt_tokens=400)
    gate = {(b.batch, b.block) for b in run.batches if b.phase == "gate"}
    windows = []
    for window in run.windows:
        if (window.nwor_mode, window.scv_mode) == ("stage", "off"):
            in_gate, first = (window.batch, window.block) in gate, window.window == 0
            path = "full graph, merge, host" if in_gate else "full graph, ours, host"
            staged = window.draft_tokens if first or not in_gate else 0
            window = replace(window, path=path if staged else None, staged_tokens=staged)
        windows.append(window)
    run = replace(run, windows=tuple(windows))
    own = [w for w in windows if (w.nwor_mode, w.scv_mode) == ("stage", "off")]
    own = [w for w in own if (w.batch, w.block) in gate]
    share = own[0].draft_tokens / sum(w.draft_tokens for w in own)
    assert 0 < share < 0.5
    page = " ".join(render_markdown(document_of(run)).split())
    assert f"| stage x off | {100 * share:.0f}% | 100% | merge | ours |" in page
    # Two requests: 400 / 2 and 100 / 2 prompt tokens, and half of 128 / 2 output tokens.
    assert "Mean context: 232 tokens in the gate, 82 timed" in page


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


@pytest.mark.slow
def test_the_report_holds_the_gate_s_findings_and_cost() -> None:
    reason = FINDING.sentence(1)
    broken = replace(WITHIN, verdict=KvVerdict.BROKEN, reason=reason)
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


def test_fallbacks_without_a_reason_are_told() -> None:
    run = make_run()
    cells = [
        replace(cell, scv_fallback_count=(cell.scv_fallback_count or 0) + 2)
        if cell.scv_mode == "graph"
        else cell
        for cell in summarised(run)
    ]
    for shown, lines in ((summarised(run), 0), (cells, 2)):
        page = render_blocks(evidence_section(analysed(run, shown)).blocks)
        assert page.count("(reason not recorded)") == lines
