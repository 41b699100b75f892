"""Tokens per second over off x off: its value, its scatter, its interval."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import log

import numpy as np
import pytest
from interleaved_run import OFF, STAGE_GRAPH, Planted, group_windows, interleaved_run
from report_runs import faster
from synthetic_run import summarised

from nwor_bench.analysis.groups import Group, Pair, find_groups
from nwor_bench.analysis.paired import PairedTimes
from nwor_bench.analysis.throughput import rate_of_blocks, rate_of_groups
from nwor_bench.records.store import RunData
from nwor_bench.records.types import WindowRecord

PAIR = (OFF, STAGE_GRAPH)


def only(windows: list[WindowRecord]) -> Group:
    (group,) = find_groups(windows).counted
    return group


def accepting(accepted: int) -> dict[str, int]:
    return {"accepted_tokens": accepted, "committed_tokens": accepted}


def test_tokens_are_a_requests_own_and_its_accepted_drafts() -> None:
    """2 requests gain 7 tokens a window with off and 9 of 8 + 2 with stage, in 10 and 12 ms."""
    windows = [
        replace(w, **accepting(7), rejected_tokens=1, device_ms=12.0)
        if w.cell == STAGE_GRAPH
        else w
        for w in group_windows(PAIR, 4)
    ]
    group = only(windows)
    assert group.tokens == pytest.approx(log(9 / 7))
    assert group.pace == pytest.approx(log(12 / 10))


def test_the_time_is_the_devices_if_it_has_one() -> None:
    """The host's clock counts a part of a window in the neighbour's."""
    windows = [
        replace(w, wall_ms=15.0, device_ms=11.0) if w.cell == STAGE_GRAPH
        else replace(w, wall_ms=10.0, device_ms=10.0)
        for w in group_windows(PAIR, 4)
    ]  # fmt: skip
    group = only(windows)
    assert group.pace == pytest.approx(log(11 / 10))
    found = rate_of_groups([group] * 10)
    assert found is not None
    assert (found.clock, found.ratio.value) == ("device_ms", pytest.approx(10 / 11))


def test_a_runs_first_window_counts_for_tokens_and_not_for_time() -> None:
    windows = [
        replace(w, **accepting(8), wall_ms=900.0) if w.run in (1, 2) and w.position == 0 else w
        for w in group_windows(PAIR, 2)
    ]
    assert only(windows).tokens == pytest.approx(log((10 + 7) / 14))
    assert only(windows).pace == 0
    other = [replace(w, num_reqs=1) if w.position == 0 else w for w in windows]
    assert only(other).tokens == 0  # another batch size
    unstaged = [replace(w, fallback_reason="x") if w.position == 0 else w for w in windows]
    assert only(unstaged).tokens == 0


def test_tokens_of_finished_requests_are_none() -> None:
    """One of two requests had finished before each window with off, with 2 of the 5 accepted."""
    half = {"uncounted_draft_tokens": 4, "uncounted_accepted_tokens": 2}
    late = [replace(w, **half) if w.cell == OFF else w for w in group_windows(PAIR, 2)]
    assert only(late).tokens == pytest.approx(log(7 / 4))
    both = {"uncounted_draft_tokens": 8, "uncounted_accepted_tokens": 5}
    none = only([replace(w, **both) for w in group_windows(PAIR, 2)])
    assert none.tokens is None  # its time counts
    found = rate_of_groups([none, *[only(late)] * 10])
    assert found is not None
    assert found.ratio.value == pytest.approx(7 / 4)


def simulated(
    rng: np.random.Generator, groups: int, requests: int, more: float, ratio: float
) -> Iterator[Group]:
    """Groups of cells whose requests accept each of 4 drafts at a rate of their own.

    Args:
        rng: of all draws.
        groups: how many.
        requests: of each window.
        more: factor on the rates in B.
        ratio: B's time over A's; windows scatter by 3 %.
    """
    for length in rng.choice([2, 4], groups):
        rates = np.clip(rng.uniform(0.3, 0.9, requests), 0, 1)
        tokens = [
            1 + np.cumprod(rng.random((2 * length, 4, requests)) < own, axis=1).sum(axis=1)
            for own in (rates, more * rates)
        ]
        times = np.exp(0.03 * rng.standard_normal((2, 2 * length - 2))).mean(axis=1)
        yield Group(
            pair=Pair(*PAIR), block=1, batch=1, number=1, run_length=length, num_reqs=requests,
            host=0.0, device=None, work=None, tokens=log(tokens[1].mean() / tokens[0].mean()),
            pace=log(ratio * times[1] / times[0]),
        )  # fmt: skip


def expected_tokens(more: float) -> float:
    """Expected tokens of a request's window, over uniform rates."""
    rates = more * np.linspace(0.3, 0.9, 10_001)
    return float(sum(rates**n for n in range(5)).mean())


@pytest.mark.slow
@pytest.mark.parametrize(("requests", "more"), [(1, 1.0), (8, 0.95)])
def test_the_interval_includes_the_truth_in_19_of_20_simulated_runs(
    requests: int, more: float
) -> None:
    rng = np.random.default_rng(requests)
    truth = expected_tokens(more) / expected_tokens(1.0) / 0.972
    inside = 0
    for _ in range(100):
        found = rate_of_groups(list(simulated(rng, 30, requests, more, 0.972)))
        assert found is not None
        inside += found.ratio.holds(truth)
    assert inside >= 90


def test_the_larger_scatter_is_named() -> None:
    groups = list(simulated(np.random.default_rng(1), 20, 1, 1.0, 0.972))
    for tokens, noise in ((1.0, "acceptance"), (0.0, "time")):
        found = rate_of_groups([replace(g, tokens=tokens * (g.tokens or 0)) for g in groups])
        assert found is not None
        assert found.noise == noise


def test_few_groups_have_no_rate() -> None:
    assert rate_of_groups([only(group_windows(PAIR, 2))] * 9) is None


@pytest.mark.parametrize("blocks", [2, 3])
def test_whole_batches_are_paired_block_by_block(blocks: int) -> None:
    """An interval needs three blocks; 4 % more tokens in 2 % less time are 1.04 / 0.98."""
    tokens, times = (log(1.04),) * blocks, (log(0.98),) * blocks
    numbers = tuple(range(blocks))
    ones = (1.0,) * blocks
    found = rate_of_blocks(PairedTimes("latency_ms", numbers, ones, ones, tokens, times))
    assert found is not None
    assert found.ratio.value == pytest.approx(1.04 / 0.98)
    assert (found.clock, found.ratio.is_bounded) == ("latency_ms", blocks == 3)
    assert rate_of_blocks(PairedTimes("latency_ms", numbers, ones, ones, (), times)) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "clock"),
    [
        (lambda: interleaved_run(Planted({"stage x graph": 0.972}, host=0.5),
                                 whole={"graph": 0.972}), "device_ms"),
        (faster, "window_ms"),
    ],
    ids=("interleaved", "whole batches"),
)  # fmt: skip
def test_cells_of_the_same_tokens_have_the_inverse_of_the_verdicts_time(
    make: Callable[[], RunData], clock: str
) -> None:
    cells = summarised(make())
    for cell in cells:
        if cell.ratio is None:
            assert cell.rate is cell.tokens_per_s_clock is None
            continue
        assert cell.rate is not None
        assert cell.rate.value == pytest.approx(1 / cell.ratio.value)
        assert cell.rate.low == pytest.approx(1 / cell.ratio.high)
        if cell.sure_rate is not None:
            assert cell.sure_rate.low < cell.rate.low < cell.rate.high < cell.sure_rate.high
    (cell,) = (cell for cell in cells if cell.cell == STAGE_GRAPH)
    assert (cell.compared, cell.tokens_per_s_clock, cell.tokens_per_s_noise) == (
        clock, clock, "time"
    )  # fmt: skip
    assert cell.rate is not None
    assert cell.rate.value == pytest.approx(1 / 0.972, abs=0.002)
