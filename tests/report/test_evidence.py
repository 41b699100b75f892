"""What reports say of the K/V gate, and verdicts of cells whose values it did not compare."""

from dataclasses import replace

import pytest
from report_runs import faster
from said import FINDING, GRAPH, STAGE, WITHIN, gated, with_kv
from synthetic_run import analysed, change_batches, document_of, make_run, summarised

from nwor_bench.analysis.parity.kv import KvResult, KvVerdict
from nwor_bench.report.evidence import evidence_section, kv_blocks, state_blocks
from nwor_bench.report.facts import facts
from nwor_bench.report.markdown import render_blocks, render_markdown


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
def test_the_report_holds_the_gate_s_findings_and_cost() -> None:
    """Golden answers name the broken cell; the table has the error over its limit."""
    reason = FINDING.sentence(1)
    broken = replace(WITHIN, verdict=KvVerdict.BROKEN, reason=reason)
    text = render_markdown(document_of(with_kv((STAGE, broken), (GRAPH, WITHIN))))
    for part in (reason, "2,200 of 2,293", "0.67"):  # 0.02 of 0.03 allowed
        assert part in text


def test_a_run_without_a_kv_gate_says_nothing_of_it() -> None:
    assert "cache" not in dict(facts(analysed(faster())).entries)["output"]
    assert kv_blocks(faster()) == state_blocks(faster()) == []
    assert state_blocks(with_kv((STAGE, WITHIN))) == []


@pytest.mark.parametrize("error", [None, 0.5])
def test_a_result_has_a_form_in_json(error: float | None) -> None:
    finding = replace(FINDING, error=error, allowed=0.0)
    told = KvResult(KvVerdict.BROKEN, "K/V: ...", finding=finding).to_dict()
    assert told["finding"]["ratio"] is None
    assert told["verdict"] == "INVALID"


@pytest.mark.parametrize(
    ("verdicts", "parity", "faster"),
    [
        ((), "acceptance only", False),
        ((KvVerdict.WITHIN, KvVerdict.NOT_RUN), "acceptance only", False),
        ((KvVerdict.NOT_RUN, KvVerdict.WITHIN), "acceptance only", True),
        ((KvVerdict.NOT_RUN, KvVerdict.EXACT), "acceptance only", True),
        ((), "explained", True),  # tokens of the target show wrong values too
    ],
)
def test_a_synthetic_cell_is_faster_only_if_its_values_were_compared(
    verdicts: tuple[KvVerdict, ...], parity: str, faster: bool
) -> None:
    cells = summarised(gated(*verdicts, parity=parity))
    (cell,) = (cell for cell in cells if cell.label == GRAPH.label)
    assert cell.verdict == ("FASTER" if faster else "AMBIGUOUS")
    assert (cell.ratio is not None) is faster
    assert (cell.reason or "").startswith("the gate did not compare its K/V") is not faster
    off = [each for each in cells if each.nwor_mode == "off" and each.verdict != "reference"]
    assert all(each.ratio is not None for each in off)  # no values of their own


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
