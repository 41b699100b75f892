"""What was not checked is not FASTER: synthetic cells whose values were never compared."""

from dataclasses import replace

import pytest
from report_runs import faster
from synthetic_run import document_of, summarised

from nwor_bench.analysis.parity.kv import KvResult, KvVerdict, kv_event
from nwor_bench.records.store import RunData
from nwor_bench.records.types import AA, Cell, CellResult, NworMode, ScvMode
from nwor_bench.report.answer import answer
from nwor_bench.report.markdown import render_markdown

STAGE = Cell("toy", NworMode.STAGE, ScvMode.GRAPH)
NOT_COMPARED = "the gate did not compare its K/V with mode off's"


def gated(*verdicts: KvVerdict, parity: str = "acceptance only") -> RunData:
    """A run whose cells are all faster; the K/V gate's verdicts on its staging cells, in turn."""
    run = faster()
    batches = tuple(replace(b, parity=parity) if b.parity == "exact" else b for b in run.batches)
    cells = [Cell("toy", NworMode.STAGE, scv) for scv in ScvMode]
    events = tuple(
        kv_event(cell, KvResult(v, "its blocks were reused")) for v in verdicts for cell in cells
    )
    return replace(run, batches=batches, events=(*run.events, *events))


def staged(run: RunData) -> CellResult:
    (found,) = [cell for cell in summarised(run) if cell.cell == STAGE]
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
    assert "Find under Evidence why the K/V gate compared nothing" in page
