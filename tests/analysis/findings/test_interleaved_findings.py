"""Findings about interleaved windows: each planted fault is named, a sound run has none."""

from dataclasses import replace
from functools import cache

import pytest
from interleaved_run import STAGE_GRAPH, Planted, interleaved_run
from synthetic_run import analysed, kept

from nwor_bench.analysis.findings.table import Finding, FindingKind, Severity, grouped
from nwor_bench.records.header import WarmupFacts
from nwor_bench.records.store import RunData
from nwor_bench.records.types import Phase

pytestmark = pytest.mark.slow  # whole runs


EFFECTS = {"stage x graph": 0.972, "control x off": 0.985}
WHOLE = {"graph": 0.972, "control": 0.985}
OF_WINDOWS = {
    FindingKind.WINDOWS_DISAGREE,
    FindingKind.CARRY_OVER,
    FindingKind.LONG_WINDOWS,
    FindingKind.CLOCK_EFFECT,
    FindingKind.HOST_PACE,
}


@cache
def planted_run(planted: str = "", graph: float = 0.972) -> RunData:
    kinds = {
        "": Planted(EFFECTS),
        "carry-over": Planted(EFFECTS, carry_over=0.03),
        "long windows": Planted(EFFECTS, long_windows=0.04),
        "clocks": Planted(EFFECTS, clocks=(1980.0, 1410.0, 1700.0)),
        "host": Planted(EFFECTS, host_noise=0.0003),
        "clock effect": Planted(EFFECTS, clocks=(1980.0, 1410.0, 1700.0), per_100_mhz=0.004),
    }
    batches = 30 if planted in ("long windows", "carry-over") else 12
    seed = 6 if planted == "clocks" else 5  # one seed in ten has a clock effect by chance
    return interleaved_run(kinds[planted], batches, whole={**WHOLE, "graph": graph}, seed=seed)


def found_in(run: RunData, *kinds: FindingKind) -> list[Finding]:
    return [f for f in analysed(run).findings if f.kind in (kinds or OF_WINDOWS)]


def test_a_sound_run_has_none_of_them() -> None:
    run = planted_run()
    assert found_in(run) == []
    assert found_in(run, FindingKind.FEW_BLOCKS, FindingKind.TREND) == []


@pytest.mark.parametrize(
    ("planted", "graph", "kind", "words"),
    [
        ("", 1.1, FindingKind.WINDOWS_DISAGREE, "do not overlap"),
        ("carry-over", 0.972, FindingKind.CARRY_OVER, "In runs of two"),
        ("long windows", 0.972, FindingKind.LONG_WINDOWS, "The mean ratio is "),
        ("clock effect", 0.972, FindingKind.CLOCK_EFFECT, "for 100 MHz more"),
    ],
)
def test_a_planted_fault_is_named(
    planted: str, graph: float, kind: FindingKind, words: str
) -> None:
    run = planted_run(planted, graph)
    own = [f for f in found_in(run, kind) if f.cell == STAGE_GRAPH.label]
    assert len(own) == 1
    assert own[0].severity is Severity.WARNING
    assert words in own[0].message
    assert len(grouped(own)) == 1


def test_the_host_sets_the_pace_if_both_clocks_scatter_alike() -> None:
    (found,) = found_in(planted_run("host"))
    assert found.kind is FindingKind.HOST_PACE
    assert found.severity is Severity.WARNING
    assert found.cell is None
    assert "0.9" in found.message


def test_nobody_knows_the_pace_without_a_devices_clock() -> None:
    run = planted_run("host")
    windows = tuple(replace(window, device_ms=None) for window in run.windows)
    assert found_in(replace(run, windows=windows), FindingKind.HOST_PACE) == []


def test_blocks_are_few_only_if_they_decide() -> None:
    (found,) = found_in(planted_run("", 1.1), FindingKind.FEW_BLOCKS)
    assert "whole batches: 3" in found.message  # 12 blocks were timed
    assert "--interleave batches" in found.remedy


def test_too_few_groups_for_an_interval_are_said() -> None:
    few = interleaved_run(Planted(EFFECTS), batches=2, groups=6)
    (found,) = found_in(few, FindingKind.FEW_GROUPS)
    assert "Whole batches decide" in found.message
    timed = {batch.batch for batch in few.batches if batch.phase == Phase.TIMED}
    few = kept(few, lambda record: record.batch not in timed)
    (found,) = found_in(few, FindingKind.FEW_GROUPS)
    assert found.severity is Severity.WARNING
    assert "Whole batches" not in found.message
    assert "--max-new-tokens" in found.remedy
    assert found_in(planted_run(), FindingKind.FEW_GROUPS) == []


def test_batches_too_short_for_a_second_cells_turn_are_said() -> None:
    run = interleaved_run(Planted(EFFECTS), batches=2, groups=6)
    short = replace(run, windows=tuple(replace(w, group=None) if w.run else w for w in run.windows))
    (found,) = found_in(short, FindingKind.FEW_GROUPS)
    assert "stage x graph 0" in found.message
    (blocks,) = found_in(short, FindingKind.FEW_BLOCKS)
    assert "--interleave batches" in blocks.remedy  # more of these batches would not help


def test_clocks_that_move_are_a_note_if_ratios_do_not_go_with_them() -> None:
    clocks, throttled = found_in(planted_run("clocks"), FindingKind.CLOCKS, FindingKind.THROTTLING)
    for found in (clocks, throttled):
        assert found.severity is Severity.NOTE
        assert "no ratio depends on the clock" in found.remedy
        assert "for 100 MHz" in found.remedy


def test_clocks_that_move_the_ratio_stay_a_warning() -> None:
    own = found_in(planted_run("clock effect"), FindingKind.CLOCKS, FindingKind.THROTTLING)
    assert {found.severity for found in own} == {Severity.WARNING}


def test_clocks_that_move_stay_a_warning_if_batches_decide() -> None:
    run = planted_run("clocks", 1.1)
    own = found_in(run, FindingKind.CLOCKS, FindingKind.THROTTLING)
    assert {found.severity for found in own} == {Severity.WARNING}


@pytest.mark.parametrize(("graph", "severity"), [(0.972, Severity.NOTE), (1.1, Severity.WARNING)])
def test_a_short_warm_up_is_a_note_if_windows_decide(graph: float, severity: Severity) -> None:
    run = planted_run("", graph)
    facts = WarmupFacts(batches=2, lookback=5, not_steady="a spread of 11 % over 5 batches")
    run = replace(run, header=run.header.model_copy(update={"warmup": facts}))
    (found,) = found_in(run, FindingKind.WARMUP)
    assert found.severity is severity
