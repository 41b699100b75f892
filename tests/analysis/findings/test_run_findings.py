"""Findings: each planted fault is named with its remedy, and a sound run has none of them."""

from dataclasses import replace
from typing import Any

import pytest
from synthetic_run import (
    analysed,
    change_batches,
    change_windows,
    make_run,
    with_header,
    with_parts,
)

from nwor_bench.analysis.findings.table import FindingKind, Severity
from nwor_bench.records.store import RunData
from nwor_bench.records.types import BatchRecord

GOOD = {
    "cpu_other": 0.01, "cpu_steal": 0.0, "major_faults": 0.0, "swapped_in_bytes": 0.0,
    "memory_available_bytes": 12e9, "gpu_sm_clock_mhz": 1980.0, "gpu_memory_clock_mhz": 2619.0,
    "gpu_temperature_c": 45.0, "gpu_throttle_reasons": 1.0, "gpu_throttled_ms": 0.0,
    "gpu_other_processes": 0.0,
}  # fmt: skip


def timed(batch: BatchRecord) -> bool:
    return batch.phase == "timed"


def second(batch: BatchRecord) -> bool:
    return batch.phase == "timed" and batch.block == 2


@pytest.fixture(scope="module")
def run() -> RunData:
    made = make_run(blocks=12, aa=True, device="cuda")
    warmup = {"batches": 5, "lookback": 5, "not_steady": None}
    made = with_parts(made, warmup=warmup)
    return change_batches(made, timed, conditions=GOOD)


def found_in(run: RunData) -> dict[FindingKind, Any]:
    return {finding.kind: finding for finding in analysed(run).findings}


def watched(run: RunData, test: Any, **conditions: float) -> RunData:
    return change_batches(run, test, conditions={**GOOD, **conditions})


def test_a_sound_run_has_only_its_planted_fallbacks(run):
    """Window 3 of every stage block falls back; idle clocks (bit 1) are no throttling."""
    kinds = {finding.kind for finding in analysed(run).findings}
    assert kinds == {FindingKind.FALLBACKS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("conditions", "kind", "words"),
    [
        ({"gpu_throttle_reasons": 0x20}, FindingKind.THROTTLING, "software thermal slowdown"),
        ({"gpu_throttle_reasons": 0x4 | 0x1}, FindingKind.THROTTLING, "software power cap"),
        ({"gpu_throttled_ms": 12.0}, FindingKind.THROTTLING, "84 ms held down"),
        ({"gpu_sm_clock_mhz": 1500.0}, FindingKind.CLOCKS, "1500 to 1980 MHz"),
        ({"gpu_other_processes": 2.0}, FindingKind.GPU_SHARED, "Up to 2 other processes"),
        ({"cpu_other": 0.3}, FindingKind.CPU_BUSY, "up to 30.0 %"),
        ({"cpu_steal": 0.2}, FindingKind.CPU_STEAL, "up to 20.0 %"),
        ({"swapped_in_bytes": 5e6}, FindingKind.MEMORY_PRESSURE, "35.0 MB swapped in"),
        ({"major_faults": 100.0}, FindingKind.MEMORY_PRESSURE, "700 pages"),
        ({"memory_available_bytes": 3e8}, FindingKind.MEMORY_PRESSURE, "0.3 GB free"),
    ],
)
def test_what_the_machine_did_in_one_block_is_said(run, conditions, kind, words):
    finding = found_in(watched(run, second, **conditions))[kind]
    assert words in finding.message
    assert finding.remedy


def test_the_gate_and_warm_up_may_be_disturbed(run):
    gate = watched(run, lambda b: b.phase == "gate", cpu_other=0.9, gpu_throttle_reasons=0x20)
    assert found_in(gate).keys() == {FindingKind.FALLBACKS}


@pytest.mark.slow
def test_one_busy_block_of_twelve_is_a_note_and_many_are_a_warning(run):
    assert found_in(watched(run, second, cpu_other=0.3))[FindingKind.CPU_BUSY].severity == "note"
    busy = found_in(watched(run, timed, cpu_other=0.3))[FindingKind.CPU_BUSY]
    assert busy.severity is Severity.WARNING


def test_conditions_that_were_not_watched_are_no_findings(run):
    bare = change_batches(run, timed, conditions={})
    assert found_in(bare).keys() == {FindingKind.FALLBACKS}


def test_a_drift_of_the_windows_is_said(run):
    windows = tuple(replace(w, wall_ms=w.wall_ms * (1 + 0.01 * w.block)) for w in run.windows)
    drift = found_in(replace(run, windows=windows))[FindingKind.TREND]
    assert "+10." in drift.message
    assert "12 blocks" in drift.message


def test_warm_up_that_never_became_steady_is_said(run):
    facts = {"batches": 15, "lookback": 5, "not_steady": "a spread of 40 % over 5 batches"}
    unsteady = with_parts(run, warmup=facts)
    assert "spread of 40 %" in found_in(unsteady)[FindingKind.WARMUP].message


def test_few_blocks_and_a_missing_arm_are_said():
    kinds = found_in(make_run(blocks=4))
    assert "Timed blocks: 4." in kinds[FindingKind.FEW_BLOCKS].message
    assert "Every sweep has one" in kinds[FindingKind.AA_MISSING].remedy


def test_an_arm_that_had_no_turn_yet_is_not_called_missing():
    """The run was cut short in its gate: to measure anew would throw away what there is."""
    run = make_run(blocks=4, aa=True)
    cut = replace(run, batches=run.batches[:1], windows=())
    finding = found_in(cut)[FindingKind.AA_MISSING]
    assert "ended before its A/A arm" in finding.message
    assert "--resume" in finding.remedy


def test_an_ambiguous_cell_is_told_what_it_could_have_seen(run):
    """Scatter of 20 % a block, the same for stage x off in every second block."""

    def shaken(w):
        factor = 0.8 if w.block % 2 else 1.2
        stage = (w.nwor_mode, w.scv_mode) == ("stage", "off")
        return replace(w, wall_ms=w.wall_ms * factor) if w.block and stage else w

    odd = replace(run, windows=tuple(map(shaken, run.windows)))
    (finding,) = [f for f in analysed(odd).findings if f.kind is FindingKind.AMBIGUOUS]
    assert finding.cell == "stage x off"
    assert "Smallest visible effect" in finding.message


@pytest.mark.slow
def test_an_arm_that_differs_is_said(run):
    biased = change_windows(run, lambda w: w.arm is not None, wall_ms=40.0)
    finding = found_in(biased)[FindingKind.AA_DIFFERS]
    assert "SLOWER" in finding.message
    broken = change_batches(run, lambda b: b.arm is not None, parity="INVALID")
    assert found_in(broken)[FindingKind.AA_DIFFERS].severity is Severity.ERROR


def test_an_effect_below_the_noise_floor_names_its_cells(run):
    windows = tuple(
        replace(w, wall_ms=w.wall_ms * 1.09) if w.arm else w for w in run.windows
    )  # fmt: skip
    finding = found_in(replace(run, windows=windows))[FindingKind.NOISE_FLOOR]
    assert "stage x off" in finding.message
    assert "off x graph" not in finding.message


def test_cells_that_never_fired_for_one_reason_are_one_finding():
    idle = [f for f in analysed(make_run(blocks=12, aa=True)).findings if f.kind == "ineffective"]
    assert len(idle) == 1
    assert "off x graph, off x adaptive" in idle[0].message


@pytest.mark.slow
@pytest.mark.parametrize("why", [None, "RuntimeError"])
def test_attention_that_could_not_be_timed_is_reported(run, why):
    made = with_header(run, "engine", cuda_graphs={"attention_untimed": why})
    finding = found_in(made).get(FindingKind.ATTENTION)
    assert finding is None if why is None else why in finding.message


@pytest.mark.slow
def test_launches_in_the_slower_way_are_reported(run):
    for refused, told in (({}, False), ({"scratch_memory": 2, "clusters": 1}, True)):
        made = with_header(run, "engine", launch_refusals=refused)
        finding = found_in(made).get(FindingKind.LAUNCHES)
        assert (finding is not None) == told
    assert finding is not None
    assert "clusters (1), scratch_memory (2)" in finding.message


def of_states(run: RunData, engine: dict[str, Any], **windows: Any) -> Any:
    """The finding, with these facts of the engine and of windows that staged."""
    made = change_windows(run, lambda w: w.staged_tokens, **windows)
    return found_in(with_header(made, "engine", **engine)).get(FindingKind.STATES)


STAGES_STATES = {"state_layers": 3, "states_unavailable": None}


def test_states_that_were_never_staged_are_a_warning(run):
    reasons = {"states_reason": "states:not_called", "states_committed": 0}
    finding = of_states(run, STAGES_STATES, **reasons)
    assert finding.severity is Severity.WARNING
    assert "states:not_called" in finding.message
    assert "stage x off" in finding.message
    assert " off x off" not in finding.message
    assert "no reason given" in of_states(run, STAGES_STATES).message


def test_states_that_were_staged_are_no_finding(run):
    assert of_states(run, STAGES_STATES, states_committed=6) is None
    assert of_states(run, {"state_layers": 0, "states_unavailable": None}) is None
    assert of_states(run, {}) is None  # an older run


def test_one_cell_whose_states_never_moved_is_named():
    """Of three cells that stage, one writes no state."""
    made = make_run(blocks=12, aa=True)
    windows = tuple(
        replace(w, states_committed=0 if w.scv_mode == "graph" else 6) if w.staged_tokens else w
        for w in made.windows
    )
    finding = of_states(replace(made, windows=windows), STAGES_STATES)
    assert "of stage x graph (" in finding.message


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("mamba_cache_mode:align", "Write --engine-args '{\"enable_prefix_caching\": false}'."),
        ("unsupported_states:MambaMixer2", "Nothing to do."),
        ("states:RuntimeError", "Read engine.log."),
    ],
)
def test_states_that_stay_with_stock_are_a_note_with_a_remedy(run, reason, remedy):
    finding = of_states(run, {"state_layers": 0, "states_unavailable": reason})
    assert finding.severity is Severity.NOTE
    assert f"({reason})" in finding.message
    assert finding.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("most", "words"),
    [(64, None), (39, "40 tokens (8 requests, 4 drafts)"), (None, None)],
)
def test_windows_above_the_largest_graph_are_named_with_the_size_to_write(run, most, words):
    """8 requests x 5 tokens; the next multiple of 16 is 48."""
    made = with_parts(run, scenario={**run.header.scenario, "requests": 8, "draft_tokens": 4})
    graphs = {"mode": "FULL_DECODE_ONLY", "largest_window": most}
    finding = found_in(with_header(made, "engine", cuda_graphs=graphs)).get(FindingKind.NO_GRAPH)
    assert (finding is None) == (words is None)
    if words is not None:
        assert words in finding.message
        assert '{"max_cudagraph_capture_size": 48}' in finding.remedy


def test_the_graphs_of_an_engine_without_drafts_say_nothing_of_the_others(run):
    made = with_parts(run, scenario={**run.header.scenario, "requests": 8, "draft_tokens": 4})
    made = with_header(
        with_parts(made, spec={"engines": True}), "engine", cuda_graphs={"largest_window": 16}
    )
    assert FindingKind.NO_GRAPH not in found_in(made)


def test_windows_as_large_as_the_largest_graph_have_one(run):
    made = with_parts(run, scenario={**run.header.scenario, "requests": 8, "draft_tokens": 4})
    made = with_header(made, "engine", cuda_graphs={"largest_window": 40})
    assert FindingKind.NO_GRAPH not in found_in(made)
