"""Runs whose cells took turns are compared by their windows' ratios."""

from functools import cache

import pytest
from changed_run import stored
from interleaved_run import STAGE_GRAPH, Planted, interleaved_run

from nwor_bench.analysis.comparing.change_verdicts import CellChange
from nwor_bench.analysis.comparing.compare import ChangeVerdict, Comparison, compare_runs
from nwor_bench.analysis.comparing.stored_run import StoredRun
from nwor_bench.report.comparison_text import notes

pytestmark = pytest.mark.slow  # whole runs


@cache
def measured(graph: float, seed: int = 5) -> StoredRun:
    effects = {"stage x graph": graph, "control x off": 0.985}
    whole = {"graph": graph, "control": 0.985}
    return stored(interleaved_run(Planted(effects), whole=whole, seed=seed))


def of_graph(comparison: Comparison) -> CellChange:
    return next(cell for cell in comparison.cells if cell.cell == STAGE_GRAPH)


def test_a_small_change_of_windows_is_found() -> None:
    """Three blocks of whole batches would see nothing below several per cent."""
    comparison = compare_runs(measured(0.972), measured(0.990, seed=6))
    found = of_graph(comparison)
    assert found.outcome is ChangeVerdict.REGRESSION
    assert found.ratio is not None
    assert found.ratio.measure == "device_ms"
    assert found.ratio.interval is not None
    assert found.ratio.interval.low < 0.990 / 0.972 < found.ratio.interval.high
    assert found.ratio.interval.half_width < 0.003
    assert any("interleaved windows" in note for note in notes(comparison))


def test_runs_of_the_same_code_are_the_same() -> None:
    comparison = compare_runs(measured(0.972), measured(0.972, seed=6))
    assert of_graph(comparison).outcome is ChangeVerdict.SAME


def test_the_ends_of_an_interval_give_its_standard_error_back() -> None:
    change = of_graph(compare_runs(measured(0.972), measured(0.972))).ratio
    assert change is not None
    assert change.interval is not None
    assert change.ratio == pytest.approx(1)
    own = measured(0.972).cells[STAGE_GRAPH]
    assert own.half_width is not None
    # Two equal errors, with about twice the degrees of freedom.
    assert change.interval.half_width == pytest.approx(1.33 * own.half_width, rel=0.1)
