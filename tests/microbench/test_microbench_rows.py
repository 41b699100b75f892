"""From rounds to lines: medians, bandwidth, ratios with intervals, and the goals' verdicts."""

from dataclasses import replace
from math import exp, log
from random import Random
from statistics import median

import pytest
from scipy import stats

from nwor_bench.microbench.cases import L2, Group, LaunchMode, Window
from nwor_bench.microbench.result import GOALS, Verdict, goal_results
from nwor_bench.microbench.rows import Row, Sample, Status, Timed, blank, half_widths, timed_rows

GROUP = Group("commit", "bf16", Window(8, 4), 0.5)


def rounds_of(us: float, noise: list[float], host_us: float | None = None) -> list[Sample]:
    return [Sample(us * factor, host_us) for factor in noise]


def test_a_line_holds_what_was_measured() -> None:
    random = Random(1)
    shared = [random.uniform(0.5, 2) for _ in range(12)]  # the clocks of each round
    own = [random.uniform(0.98, 1.02) for _ in range(12)]
    samples = {
        "nwor": rounds_of(4.0, shared, 10.0),
        "vllm_cuda": rounds_of(80.0, [a * b for a, b in zip(shared, own, strict=True)], 140.0),
        "copy": rounds_of(1.6, shared, 5.0),
        "empty": rounds_of(0.7, shared, 5.0),
    }
    timed = [
        Timed("nwor", 1, 4_000_000),
        Timed("vllm_cuda", 28, 4_000_000),
        Timed("empty", 1, None),
        Timed("copy", 1, 2_000_000),
    ]
    rows = timed_rows(GROUP, L2.COLD, LaunchMode.EAGER, timed, samples, discarded=3)
    ours, stock, empty, copy = rows
    assert [row.implementation for row in rows] == [each.name for each in timed]
    assert ours.time_us == pytest.approx(4 * median(shared))
    assert ours.gb_per_s == pytest.approx(4e6 / (4e-6 * median(shared)) / 1e9)
    assert ours.share_of_copy == pytest.approx(0.8)  # twice the bytes in 2.5 times the time
    assert copy.share_of_copy == 1
    assert (empty.gb_per_s, empty.share_of_copy) == (None, None)
    assert (ours.time_over_nwor, ours.time_over_nwor_low) == (None, None)
    assert copy.time_over_nwor == pytest.approx(0.4)  # what the rounds share cancels
    logs = [log(20 * factor) for factor in own]
    t = stats.ttest_1samp(logs, 0).confidence_interval(0.95)
    assert stock.time_over_nwor == pytest.approx(exp(sum(logs) / 12))
    assert stock.time_over_nwor_low is not None
    assert stock.time_over_nwor_low <= exp(t.low) * (1 + 1e-9)
    assert (stock.host_us_per_call, stock.host_us_per_launch) == (140, 5)
    assert {row.discarded_rounds for row in rows} == {3}
    assert {row.written_tokens for row in rows} == {16}


def test_graph_replays_have_no_host_time() -> None:
    samples = {"nwor": rounds_of(4.0, [1, 1, 1])}
    (row,) = timed_rows(GROUP, L2.WARM, LaunchMode.GRAPH, [Timed("nwor", 1, 8)], samples)
    assert (row.host_us_per_call, row.host_us_per_launch) == (None, None)


def test_without_our_kernel_there_is_no_ratio() -> None:
    samples = {"copy": rounds_of(4.0, [1, 1.1, 0.9])}
    (row,) = timed_rows(GROUP, L2.WARM, LaunchMode.GRAPH, [Timed("copy", 1, 8)], samples)
    assert row.time_over_nwor is None
    assert half_widths(samples) == []


def test_half_widths_are_relative() -> None:
    noise = [1.0, 1.02, 0.98, 1.01]
    flat = {"nwor": rounds_of(1.0, [1] * 4)}
    (near,) = half_widths({**flat, "vllm_cuda": rounds_of(1.0, noise)})
    (far,) = half_widths({**flat, "vllm_cuda": rounds_of(100.0, noise)})
    assert near == pytest.approx(far)


def measured(kernel: str, peer: str, ratio: float, spread: float = 0.01, **more: object) -> Row:
    row = blank(Group(kernel, "bf16", Window(8, 4)), peer, L2.WARM, LaunchMode.GRAPH, Status.OK)
    numbers = {
        "time_over_nwor": ratio,
        "time_over_nwor_low": ratio - spread,
        "time_over_nwor_high": ratio + spread,
    }
    return replace(row, **{**numbers, **more})


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [(8.5, Verdict.MET), (7.5, Verdict.MISSED), (8.0, Verdict.UNCLEAR)],
)
def test_a_goal_is_judged_by_the_interval(ratio: float, verdict: Verdict) -> None:
    results = goal_results([measured("commit", "vllm_cuda", ratio)])
    assert [result.verdict for result in results] == [verdict, Verdict.NOT_MEASURED]


def test_the_worst_case_decides() -> None:
    rows = [
        measured("commit", "vllm_cuda", 20.0),
        measured("commit", "vllm_cuda", 7.0, l2=L2.COLD),
        measured("commit", "vllm_cuda", 1.0, launch=LaunchMode.EAGER),
        measured("commit", "copy", 0.5),
        measured("commit", "vllm_cuda", 3.0, status=Status.INVALID),
    ]
    result = goal_results(rows)[0]
    assert (result.verdict, result.cases, result.met) == (Verdict.MISSED, 2, 1)
    assert result.worst is rows[1]


def test_a_mask_is_held_against_an_empty_kernel_with_its_counts_in_l2() -> None:
    warm, cold = measured("mask", "empty", 0.95), measured("mask", "empty", 0.5, l2=L2.COLD)
    (result,) = goal_results([warm, cold])
    assert (result.verdict, result.cases) == (Verdict.MET, 1)


def test_goals_of_kernels_that_did_not_run_are_left_out() -> None:
    assert goal_results([]) == []
    assert {
        result.goal.kernel for result in goal_results([measured("stage", "vllm_cuda", 1.2)])
    } == {"stage"}
    assert {goal.kernel for goal in GOALS} == {"commit", "stage", "mask", "verify_attention"}
