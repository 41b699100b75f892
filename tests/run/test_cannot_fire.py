"""Cells that cannot fire without CUDA: checked by the gate, INEFFECTIVE, in no timed block."""

from pathlib import Path

import pytest
from fake_engine import FakeEngine
from synthetic_run import analysed
from toy_run import Runner, of_phase

from nwor_bench.analysis.analyse import analyse
from nwor_bench.analysis.findings.finding import FindingKind
from nwor_bench.records.types import NworMode, ScvMode, Verdict
from nwor_bench.run.budget import half_widths


def test_cells_that_cannot_fire_take_no_timed_batches(tmp_path: Path) -> None:
    runner = Runner(tmp_path / "run", FakeEngine(scv_fallback="no_cuda"))
    run = runner.run()
    assert len(of_phase(run, "gate")) == 8
    timed = of_phase(run, "timed")
    assert len(timed) == 3 * 3  # off x off, its A/A arm and stage x off
    assert {batch.scv_mode for batch in timed} == {ScvMode.OFF}
    assert any("gate: INEFFECTIVE off x graph" in line for line in runner.log.lines)
    widths = half_widths(run, 3)  # a look waits for no interval of theirs
    assert len(widths) == 2
    assert None not in widths


def test_they_are_ineffective_with_the_reason_and_without_numbers(tmp_path: Path) -> None:
    run = Runner(tmp_path / "run", FakeEngine(scv_fallback="no_cuda")).run()
    cells = analyse(run).cells
    idle = [cell for cell in cells if cell.scv_mode is not ScvMode.OFF]
    assert len(idle) == 4
    for cell in idle:
        assert (cell.verdict, cell.scv_status) == (Verdict.INEFFECTIVE, "INEFFECTIVE")
        assert "without CUDA" in (cell.reason or "")
        assert cell.parity == "exact"
        assert (cell.batches, cell.ratio_to_off, cell.tokens_per_s) == (0, None, None)
        assert cell.counts_from == "gate"
        assert (cell.scv_fallback_count or 0) > 0
    compared = {cell.simultaneous_cells for cell in cells if cell.p_value_holm is not None}
    assert compared == {1}
    assert [f for f in analysed(run, cells).findings if f.kind is FindingKind.INEFFECTIVE]


@pytest.mark.parametrize("reason", ["capture_not_supported", "uneven_windows"])
def test_another_reason_may_pass_so_they_are_timed(tmp_path: Path, reason: str) -> None:
    run = Runner(tmp_path / "run", FakeEngine(scv_fallback=reason)).run()
    assert len(of_phase(run, "timed")) == 3 * 7


def test_a_cell_that_breaks_parity_is_invalid_all_the_same(tmp_path: Path) -> None:
    engine = FakeEngine(
        scv_fallback="no_cuda", wrong=lambda number, cell: cell.scv_mode is ScvMode.GRAPH
    )
    cells = analyse(Runner(tmp_path / "run", engine).run()).cells
    found = {(c.nwor_mode, c.scv_mode): c.verdict for c in cells if c.arm is None}
    assert found[NworMode.OFF, ScvMode.GRAPH] == Verdict.INVALID
    assert found[NworMode.OFF, ScvMode.ADAPTIVE] == Verdict.INEFFECTIVE
