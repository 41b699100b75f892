"""Findings: each planted fault is named with its remedy, and a sound run has none of them."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interleaved_run import STAGE_GRAPH, Planted, interleaved_run
from report_runs import spent_by_gate
from synthetic_run import (
    analysed,
    change_batches,
    change_windows,
    kept,
    make_run,
    summarised,
    with_header,
    with_parts,
)

from nwor_bench.analysis.findings.finding import Evidence, Finding, FindingKind, Severity
from nwor_bench.analysis.findings.sample import (
    OF_DRAFTS,
    ON_CPU,
    nothing_timed,
    sufficient_budget,
)
from nwor_bench.analysis.findings.table import ROWS, find_all, grouped
from nwor_bench.records.store import RunData
from nwor_bench.records.types import BatchRecord, Phase, RunStatus
from nwor_bench.run.budget import WARMUP_SHARE
from nwor_bench.workload.options import seconds

K = FindingKind
NOTE, WARNING, ERROR = Severity

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


@cache
def sound() -> RunData:
    made = with_parts(make_run(blocks=12, aa=True, device="cuda"), warmup={"batches": 5})
    return change_batches(made, timed, conditions=GOOD)


def found_in(run: RunData, *kinds: FindingKind) -> list[Finding]:
    return [f for f in analysed(run).findings if f.kind in (kinds or FindingKind)]


def the(kind: FindingKind, run: RunData) -> Finding:
    (finding,) = found_in(run, kind)
    return finding


def watched(test: Callable[[BatchRecord], bool], **conditions: float) -> RunData:
    return change_batches(sound(), test, conditions={**GOOD, **conditions})


def slower(share: Callable[[Any], float]) -> RunData:
    """The sound run, each window's time multiplied."""
    windows = tuple(replace(w, wall_ms=w.wall_ms * share(w)) for w in sound().windows)
    return replace(sound(), windows=windows)


def shaken(window: Any) -> float:
    """Scatter of 20 % a block, the same for stage x off in every second block."""
    stage = (window.nwor_mode, window.scv_mode) == ("stage", "off")
    return (0.8 if window.block % 2 else 1.2) if window.block and stage else 1.0


def test_a_sound_run_has_only_its_planted_fallbacks() -> None:
    """Window 3 of every stage block falls back; idle clocks (bit 1) are no throttling. Warm-up and
    gate may be disturbed, and conditions that were not watched are none."""
    gate = watched(lambda b: b.phase == "gate", cpu_other=0.9, gpu_throttle_reasons=0x20)
    for run in (sound(), gate, change_batches(sound(), timed, conditions={})):
        assert {(f.kind, f.severity) for f in found_in(run)} == {(K.FALLBACKS, WARNING)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("conditions", "kind", "words"),
    [
        ({"gpu_throttle_reasons": 0x20}, K.CLOCKS, "software thermal slowdown in 7 of 84 batches"),
        ({"gpu_throttle_reasons": 0x4 | 0x1}, K.CLOCKS, "software power cap"),
        ({"gpu_throttled_ms": 12.0}, K.CLOCKS, "84 ms held down"),
        ({"gpu_sm_clock_mhz": 1500.0}, K.CLOCKS, "ran from 1500 to 1980 MHz."),
        ({"gpu_other_processes": 2.0}, K.GPU_SHARED, "Up to 2 other processes"),
        ({"cpu_other": 0.3}, K.CPU_BUSY, "Other processes used up to 30.0 %"),
        ({"cpu_steal": 0.2}, K.CPU_BUSY, "The hypervisor took up to 20.0 %"),
        ({"swapped_in_bytes": 5e6}, K.MEMORY_PRESSURE, "35.0 MB swapped in"),
        ({"major_faults": 100.0}, K.MEMORY_PRESSURE, "700 pages"),
        ({"memory_available_bytes": 3e8}, K.MEMORY_PRESSURE, "0.3 GB free"),
    ],
)
def test_what_the_machine_did_in_one_block_is_said(conditions, kind, words) -> None:
    finding = the(kind, watched(second, **conditions))
    assert words in finding.message
    assert finding.severity is (NOTE if kind is K.CPU_BUSY else WARNING)
    if kind is K.CPU_BUSY:  # in all blocks
        assert the(kind, watched(timed, **conditions)).severity is WARNING


def graphs(most: int | None) -> RunData:
    """8 requests x 5 tokens, and graphs of at most so many tokens."""
    made = with_parts(sound(), scenario={**sound().header.scenario, "requests": 8})
    facts = {"mode": "FULL_DECODE_ONLY", "largest_window": most}
    return with_header(made, "engine", cuda_graphs=facts)


def states(reason: str | None = None, layers: int | None = 3, **windows: Any) -> RunData:
    """A run with these facts of the engine and of windows that staged."""
    made = change_windows(sound(), lambda w: w.staged_tokens, **windows)
    return with_header(made, "engine", state_layers=layers, states_unavailable=reason)


def biased_arm() -> RunData:
    return change_windows(sound(), lambda w: w.arm is not None, wall_ms=40.0)


def broken_arm() -> RunData:
    return change_batches(sound(), lambda b: b.arm is not None, parity="INVALID")


def of_drafter(context: int, prompt: int = 100, **engine: Any) -> RunData:
    """A target of 1,024 tokens, a drafter of `context`, and the longest prompt."""
    made = with_header(sound(), "scenario", max_model_len=1024)
    made = with_parts(made, gate={"longest_prompt": prompt})
    return with_header(made, "engine", drafter_max_model_len=context, **engine)


def none_accepted(run: RunData) -> RunData:
    return change_windows(run, lambda w: True, accepted_per_position=(0,) * 4)


def of_eight(requests: int, **engine: Any) -> RunData:
    """8 requests asked for, at most so many at once."""
    made = change_windows(sound(), lambda w: True, num_reqs=requests)
    made = with_header(made, "scenario", requests=8)
    made = with_header(made, "pair", method="eagle")
    return with_header(with_parts(made, gate={"longest_prompt": 100}), "engine", **engine)


def outputs(*tokens: int) -> RunData:
    """64 tokens wanted, and each batch's requests end so early."""
    return change_batches(sound(), timed, request_tokens=tuple((own, 1) for own in tokens))


def of_eagle(vllm: str = "0.32.0", asked: bool = True, **config: Any) -> RunData:
    made = with_header(sound(), "pair", method="eagle3", speculative=config)
    made = with_header(made, "spec", engine_args={"enable_prefix_caching": asked})
    return with_header(made, "engine", vllm=vllm)


FAULTS: dict[str, tuple[Callable[[], RunData], FindingKind, Severity, str, str]] = {
    "drift": (lambda: slower(lambda w: 1 + 0.01 * w.block), K.TREND, WARNING,
              "by +10.4 % over 12 blocks", "Warm up longer"),
    "warm-up": (lambda: with_parts(sound(), warmup={"not_steady": "a spread of 40 %"}), K.WARMUP,
                WARNING, "spread of 40 %", "Raise --max-warmup"),
    "arm": (biased_arm, K.AA_DIFFERS, WARNING, "is SLOWER (", "Measure again"),
    "broken arm": (broken_arm, K.AA_DIFFERS, ERROR, "No parity can be trusted", "Find what is not"),
    "scatter": (lambda: slower(shaken), K.AMBIGUOUS, WARNING, "Smallest visible effect",
                "Add blocks"),
    "idle on a CPU": (lambda: make_run(blocks=12, aa=True), K.INEFFECTIVE, WARNING,
                      "off x graph, off x adaptive never fired", "Measure it on a GPU"),
    "attention": (lambda: with_header(sound(), "engine", cuda_graphs={"attention_untimed": "Why"}),
                  K.ATTENTION, WARNING, "(Why)", "Read why"),
    "graphs": (lambda: graphs(39), K.NO_GRAPH, WARNING, "40 tokens (8 requests, 4 drafts)",
               'Write --engine-args \'{"compilation_config": {"max_cudagraph_capture_size": 48}}'),
    "drafter": (lambda: of_drafter(128), K.DRAFTER_CONTEXT, WARNING,
                "at most 128 tokens and the target 1,024: in longer requests no draft is accepted "
                "(the longest of these has 164)", "--max-model-len 128."),
    "drafter of one engine": (lambda: with_header(of_drafter(1024), "engine", arms={
        "k=4": {"drafter_max_model_len": 256}}), K.DRAFTER_CONTEXT, WARNING, "at most 256", "256"),
    "no draft accepted": (lambda: none_accepted(of_drafter(1024)), K.ACCEPTANCE, WARNING,
                          "Only 0.0 % of first drafts", "Use text"),
    "blocks": (lambda: of_eight(5, num_gpu_blocks=31), K.CONCURRENCY, WARNING,
               "At most 5 of 8 requests ran at once: the cache has 31 blocks of 32 tokens, and a "
               "request takes up to 6.", "Write --requests 5. Or free more"),
    "state slots": (lambda: of_eight(5, state_slots=5), K.CONCURRENCY, WARNING,
                    "takes up to 6 and 5 slots of states", "one state slot a request"),
    "short outputs": (lambda: outputs(5, 40, 5), K.SHORT_OUTPUTS, WARNING,
                      "after 17 of 64 tokens", "Write --max-new-tokens 17."),
    "prefix block": (of_eagle, K.PREFIX_BLOCK, NOTE, "32 tokens or fewer are computed again",
                     "Use vLLM 0.33"),
    "states unmoved": (lambda: states(states_reason="states:not_called", states_committed=0),
                       K.STATES, WARNING, "window of stage x off, stage x graph, stage x adaptive "
                       "(states:not_called)", "Read states_reason"),
    "states, no reason": (states, K.STATES, WARNING, "(no reason given)", "Read states_reason"),
    "states, copied": (lambda: states("mamba_cache_mode:align", 0), K.STATES, NOTE,
                       "(mamba_cache_mode:align)", "\"enable_prefix_caching\": false}'."),
    "states, other layers": (lambda: states("unsupported_states:MambaMixer2", 0), K.STATES, NOTE,
                             "(unsupported_states:MambaMixer2)", "Nothing to do."),
    "states, failed": (lambda: states("states:RuntimeError", 0), K.STATES, NOTE,
                       "(states:RuntimeError)", "Read engine.log."),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_with_its_remedy(name: str) -> None:
    run, kind, severity, words, remedy = FAULTS[name]
    finding = the(kind, run())
    assert finding.severity is severity
    assert words in finding.message
    assert remedy in finding.remedy


def test_what_is_no_fault_is_no_finding() -> None:
    made = with_header(sound(), "engine", cuda_graphs={"attention_untimed": None})
    assert not found_in(made, K.ATTENTION)
    for most in (40, 64, None):  # as large as the windows, larger, none
        assert not found_in(graphs(most), K.NO_GRAPH)
    assert not found_in(states(states_committed=6), K.STATES)
    for run in (states(layers=0), sound()):  # no such layers, an older run
        assert not found_in(run, K.STATES)
    made = with_parts(graphs(16), spec={"engines": True})
    assert not found_in(made, K.NO_GRAPH)  # the facts of the engine without drafts
    made = change_windows(states(states_committed=6), lambda w: w.scv_mode == "graph",
                          states_committed=0)  # fmt: skip
    assert "of stage x graph (" in the(K.STATES, made).message  # one of three that stage


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (of_drafter(1024), K.DRAFTER_CONTEXT),
        (sound(), K.DRAFTER_CONTEXT),  # not known
        (of_drafter(1024), K.ACCEPTANCE),
        (none_accepted(of_drafter(128)), K.ACCEPTANCE),  # its context is the cause
        (
            with_header(
                none_accepted(sound()), "pair", speculative={"rejection_sample_method": "synthetic"}
            ),
            K.ACCEPTANCE,
        ),
        (of_eight(8, num_gpu_blocks=31), K.CONCURRENCY),
        (of_eight(5), K.CONCURRENCY),  # there is room: short requests end as others begin
        (with_header(of_eight(5, num_gpu_blocks=31), "pair", method="ngram"), K.CONCURRENCY),
        (outputs(5, 64, 64), K.SHORT_OUTPUTS),
        (outputs(20, 20, 20), K.SHORT_OUTPUTS),  # the batch was cut
        (of_eagle(asked=False), K.PREFIX_BLOCK),
        (of_eagle("0.33.0"), K.PREFIX_BLOCK),
        (of_eagle("0.100.0"), K.PREFIX_BLOCK),
        (of_eagle(disable_eagle_block_drop=True), K.PREFIX_BLOCK),
        (with_header(of_eagle(), "pair", method="draft_model"), K.PREFIX_BLOCK),
    ],
)
def test_what_has_another_cause_or_does_not_apply_is_no_finding(
    run: RunData, kind: FindingKind
) -> None:
    assert not found_in(run, kind)


def test_a_wrong_drafter_among_several_is_named() -> None:
    """Drafts of one method are as good as random, the other's are not."""
    arms = {("off", "graph"): "eagle k=2", ("off", "adaptive"): "ngram k=2"}
    made = kept(sound(), lambda r: (r.nwor_mode, r.scv_mode) in {*arms, ("off", "off")})
    made = kept(made, lambda r: r.arm is None)
    own = tuple(replace(r, arm=arms.get((r.nwor_mode, r.scv_mode)), scv_mode="off")
                for r in made.windows)  # fmt: skip
    batches = tuple(replace(r, arm=arms.get((r.nwor_mode, r.scv_mode)), scv_mode="off")
                    for r in made.batches)  # fmt: skip
    made = replace(made, windows=own, batches=batches)
    made = change_windows(made, lambda w: w.arm == "eagle k=2", accepted_per_position=(0,) * 4)
    assert "0.0 % of first drafts of eagle were" in the(K.ACCEPTANCE, made).message


def test_lookahead_hashes_switched_off_drop_the_block_again() -> None:
    assert found_in(of_eagle("0.33.0", disable_lookahead_block_hashes=True), K.PREFIX_BLOCK)


@pytest.mark.parametrize(
    ("reason", "elsewhere"),
    [
        ("attention:kv_cache_update_bypass", True),
        ("attention:kv_not_staged", True),
        ("graph_capture:layer_not_staged", True),
        ("graph_capture:OutOfMemoryError", False),
        ("mixed_batch", False),
    ],
)
def test_kv_that_another_kernel_wrote_are_a_finding(reason: str, elsewhere: bool) -> None:
    run = change_batches(
        sound(), lambda b: timed(b) and b.nwor_mode == "stage", fallbacks={reason: 3}
    )
    found = found_in(run, K.ELSEWHERE)
    assert bool(found) is elsewhere
    assert all(reason in each.message for each in found)


def test_draft_counts_need_a_longer_budget_on_a_cpu_too() -> None:
    """`worth` has no --batches, and its times are no statement on NWOR."""
    made = analysed(make_run(blocks=2, aa=True))
    counts = with_header(made.run, "spec", draft_counts=[0, 4])
    cells = [replace(cell, nwor_mode="off") for cell in made.cells]
    found = [f for f in find_all(Evidence(counts, cells, {})) if f.kind is K.AMBIGUOUS]
    assert {f.remedy for f in found} == {OF_DRAFTS}


def test_ambiguous_cells_are_named_with_what_they_could_have_seen() -> None:
    assert the(K.AMBIGUOUS, slower(shaken)).cell == "stage x off"
    assert found_in(make_run(blocks=2, aa=True), K.AMBIGUOUS)[0].remedy == ON_CPU
    found = found_in(slower(lambda w: 1.09 if w.arm else 1.0), K.AMBIGUOUS)
    assert {f.cell for f in found} == {"stage x off", "stage x graph", "stage x adaptive"}
    assert all("within the noise floor" in f.message for f in found)


# Interleaved windows.

EFFECTS = {"stage x graph": 0.972, "control x off": 0.985}
OF_WINDOWS = (K.WINDOWS_DISAGREE, K.CARRY_OVER, K.LONG_WINDOWS, K.HOST_PACE)
MOVED = (1980.0, 1410.0, 1700.0)


@cache
def planted_run(planted: str = "", graph: float = 0.972) -> RunData:
    """Interleaved cells with a fault; `graph` is the ratio of whole batches of stage x graph."""
    kinds = {
        "": Planted(EFFECTS),
        "carry-over": Planted(EFFECTS, carry_over=0.03),
        "long windows": Planted(EFFECTS, long_windows=0.04),
        "clocks": Planted(EFFECTS, clocks=MOVED),
        "host": Planted(EFFECTS, host_noise=0.0003),
        "clock effect": Planted(EFFECTS, clocks=MOVED, per_100_mhz=0.004),
    }
    batches = 30 if planted in ("long windows", "carry-over") else 12
    seed = 6 if planted == "clocks" else 5  # one seed in ten has a clock effect by chance
    whole = {"graph": graph, "control": 0.985}
    return interleaved_run(kinds[planted], batches, whole=whole, seed=seed)


@pytest.mark.parametrize(("slope", "severity"), [(0.0, NOTE), (-0.02, WARNING)])
def test_a_drift_of_times_says_if_ratios_drifted_too(slope: float, severity: Severity) -> None:
    """The clock falls by 165 MHz: times grow, and ratios by 2 % per 100 MHz if planted."""
    falling = Planted(EFFECTS, clocks=[1980.0 - 15 * place for place in range(12)],
                      per_100_mhz=slope)  # fmt: skip
    found = the(K.TREND, interleaved_run(falling))
    assert found.severity is severity
    (change,) = re.findall(r"So did ratios: .*of stage x graph by \+(\S+) %", found.message) or [0]
    assert float(change) == pytest.approx(-165 * slope, abs=0.5)
    assert ("no ratio drifted" in found.remedy) is (not slope)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "graph", "kind", "words"),
    [
        ("", 0.972, None, ""),
        ("", 1.1, K.WINDOWS_DISAGREE, "do not overlap"),
        ("carry-over", 0.972, K.CARRY_OVER, "In runs of two"),
        ("long windows", 0.972, K.LONG_WINDOWS, "The mean ratio is "),
    ],
)
def test_a_fault_of_windows_is_named_for_its_cell(planted, graph, kind, words) -> None:
    run = planted_run(planted, graph)
    if kind is None:
        assert not found_in(run, *OF_WINDOWS, K.TREND, K.FEW_GROUPS)
        return
    found = [f for f in found_in(run, kind) if f.cell == STAGE_GRAPH.label]
    assert [finding.severity for finding in found] == [WARNING]
    assert words in found[0].message


@pytest.mark.slow
def test_a_run_is_host_bound_if_both_clocks_scatter_alike() -> None:
    (finding,) = found_in(planted_run("host"), *OF_WINDOWS)
    assert (finding.kind, finding.severity, finding.cell) == (K.HOST_PACE, WARNING, None)
    assert "0.9" in finding.message
    windows = tuple(replace(window, device_ms=None) for window in planted_run("host").windows)
    assert not found_in(replace(planted_run("host"), windows=windows), K.HOST_PACE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "graph", "severity"),
    [("clocks", 0.972, NOTE), ("clock effect", 0.972, WARNING), ("clocks", 1.1, WARNING)],
)
def test_moved_clocks_are_a_note_if_windows_decide_and_no_ratio_depends_on_them(
    planted: str, graph: float, severity: Severity
) -> None:
    finding = the(K.CLOCKS, planted_run(planted, graph))
    assert finding.severity is severity
    assert "1410 to 1980 MHz" in finding.message
    assert "it throttled: " in finding.message
    depends = "the ratio of stage x graph depends on the clock: +0.4"
    assert (depends in finding.message) == (planted == "clock effect")
    unaffected = "no ratio depends on the clock" in finding.remedy
    assert unaffected == (severity is NOTE) == ("for 100 MHz" in finding.remedy)


@pytest.mark.slow
@pytest.mark.parametrize(("graph", "severity"), [(0.972, NOTE), (1.1, WARNING)])
def test_a_short_warm_up_is_a_note_if_windows_decide(graph: float, severity: Severity) -> None:
    run = with_parts(planted_run("", graph), warmup={"not_steady": "a spread of 11 %"})
    assert the(K.WARMUP, run).severity is severity


@pytest.mark.slow
def test_too_few_groups_for_an_interval_are_said() -> None:
    few = interleaved_run(Planted(EFFECTS), batches=2, groups=6)
    assert "Whole batches decide" in the(K.FEW_GROUPS, few).message
    short = replace(few, windows=tuple(replace(w, group=None) if w.run else w for w in few.windows))
    assert "stage x graph 0" in the(K.FEW_GROUPS, short).message
    # More batches would not help: they are too short for a group.
    assert all("--interleave batches" in f.remedy for f in found_in(short, K.AMBIGUOUS))
    whole = {batch.batch for batch in few.batches if batch.phase == Phase.TIMED}
    finding = the(K.FEW_GROUPS, kept(few, lambda record: record.batch not in whole))
    assert finding.severity is WARNING
    assert "Whole batches" not in finding.message
    assert "--max-new-tokens" in finding.remedy


# A time budget that warm-up and gate spent.


@pytest.mark.parametrize(
    ("run", "words", "remedy"),
    [
        # 1.3 x (66.2 s + 10 blocks of 7 batches of 1 s) = 177 s
        (spent_by_gate(), ("66 s", "61 s", "60 s", "no block was timed."), "3m"),
        (spent_by_gate(counters="dram"), ("no DRAM bytes were counted",), "5m"),  # ten more blocks
        # 1.3 x (8.25 + 7) = 19.8 s
        (spent_by_gate(measuring_s=8.25, batch_s=0.1), ("8.2 s", "no block was timed."), "20s"),
    ],
)
def test_a_budget_that_suffices_is_named(run: RunData, words: tuple[str], remedy: str) -> None:
    finding = the(K.TIME_BUDGET, run)
    assert all(word in finding.message for word in words)
    assert finding.remedy == f"Write --time-budget {remedy}."


@pytest.mark.parametrize(
    "parts",
    [
        {"status": RunStatus.PARTIAL},
        {"status": RunStatus.FAILED},
        {"spec": {"seed": 3}},
        {"stopped": None},
        {"measuring_s": None},
    ],
    ids=("interrupted", "failed", "no budget", "stopped by nothing", "an older run"),
)
def test_other_runs_without_a_block_get_no_such_advice(parts: dict[str, Any]) -> None:
    assert not found_in(with_parts(spent_by_gate(), **parts), K.TIME_BUDGET)
    block = make_run(blocks=1, device="cuda", aa=True)
    timed_one = replace(spent_by_gate(), batches=block.batches, windows=block.windows)
    assert nothing_timed(timed_one.header, summarised(timed_one)) is None
    assert not found_in(timed_one, K.TIME_BUDGET)


@given(measuring_s=st.floats(0.5, 5_000), batch_s=st.floats(0.01, 100), counters=st.booleans())
def test_the_budget_has_room_for_a_block_and_all_that_must_fit_behind_it(
    measuring_s: float, batch_s: float, counters: bool
) -> None:
    """Even if warm-up takes all of its share on top of what was spent."""
    run = spent_by_gate(measuring_s, batch_s, counters="dram" if counters else None)
    budget_s = seconds(sufficient_budget(run, summarised(run)))
    assert budget_s is not None
    needed = measuring_s + ((10 if counters else 0) + 1) * 7 * batch_s + batch_s  # seven cells
    assert (1 - WARMUP_SHARE) * budget_s >= needed


# Groups of findings.


OF_CELLS = (K.AMBIGUOUS, K.FALLBACKS, K.ELSEWHERE, *OF_WINDOWS[:3])


def group_of(kind: FindingKind, *cells: str | None, severity: Severity = WARNING) -> list[Finding]:
    (row,) = (row for row in ROWS if row.kind is kind)
    return [Finding(kind, severity, "Message.", row.remedy, cell) for cell in cells]


def test_cells_of_one_cause_share_a_line() -> None:
    three = group_of(K.AMBIGUOUS, "stage x off", "stage x graph", "stage x adaptive")
    (group,) = grouped(three)
    assert group.line.startswith("Too uncertain (3 cells): add blocks (--batches ")
    assert group.findings == tuple(three)
    (group,) = grouped(three[:1] * 2)
    assert group.line.startswith("Too uncertain: ")
    (group,) = grouped([replace(finding, remedy=ON_CPU) for finding in three[:2]])
    assert group.line == "Too uncertain (2 cells): nothing to do"


def test_rows_of_all_subjects_stand_in_the_order_of_kinds() -> None:
    assert [row.kind for row in ROWS] == list(FindingKind)


@pytest.mark.parametrize("kind", FindingKind)
def test_every_kind_has_one_row_whose_line_fits_a_terminal(kind: FindingKind) -> None:
    cells = map(str, range(12)) if kind in OF_CELLS else [None] * 12
    (group,) = grouped(group_of(kind, *cells))
    assert len(f"{WARNING}: {group.line}") <= 80
    assert len(group.findings) == 12


def test_the_severest_comes_first_and_speaks_for_its_group() -> None:
    groups = grouped(
        [
            *group_of(K.TREND, "stage x off", severity=NOTE),
            *group_of(K.FALLBACKS, "stage x off", severity=NOTE),
            *group_of(K.FALLBACKS, "stage x graph"),
            *group_of(K.AA_DIFFERS, "off x off A/A", severity=ERROR),
        ]
    )
    assert [group.severity for group in groups] == [ERROR, WARNING, NOTE]
    assert sum(len(group.findings) for group in groups) == 4
