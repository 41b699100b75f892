"""From rounds to lines: medians, bandwidth, ratios with intervals."""

from math import exp, log
from random import Random
from statistics import median

import pytest
from scipy import stats

from nwor_bench.microbench.cases import Group, Window
from nwor_bench.microbench.rows import Implementation, half_widths, timed_rows

GROUP = Group("commit", "bf16", Window(8, 4), 0.5)


def rounds_of(us: float, noise: list[float]) -> list[float]:
    return [us * factor for factor in noise]


def implementation(name: str, launches: int, bytes_moved: int) -> Implementation:
    return Implementation(name, launches, bytes_moved, [], str)


def test_a_line_holds_what_was_measured() -> None:
    random = Random(1)
    shared = [random.uniform(0.5, 2) for _ in range(12)]  # the clocks of each round
    own = [random.uniform(0.98, 1.02) for _ in range(12)]
    samples = {
        "nwor": rounds_of(4.0, shared),
        "vllm_cuda": rounds_of(80.0, [a * b for a, b in zip(shared, own, strict=True)]),
    }
    timed = [implementation("nwor", 1, 4_000_000), implementation("vllm_cuda", 28, 4_000_000)]
    rows = timed_rows(GROUP, timed, samples)
    ours, stock = rows
    assert [row.implementation for row in rows] == [each.name for each in timed]
    assert ours.time_us == pytest.approx(4 * median(shared))
    assert ours.gb_per_s == pytest.approx(4e6 / (4e-6 * median(shared)) / 1e9)
    assert (ours.time_over_nwor, ours.time_over_nwor_low) == (None, None)
    logs = [log(20 * factor) for factor in own]
    t = stats.ttest_1samp(logs, 0).confidence_interval(0.95)
    assert stock.time_over_nwor == pytest.approx(exp(sum(logs) / 12))
    assert stock.time_over_nwor_low is not None
    assert stock.time_over_nwor_low <= exp(t.low) * (1 + 1e-9)


def test_without_our_kernel_there_is_no_ratio() -> None:
    samples = {"vllm_cuda": rounds_of(4.0, [1, 1.1, 0.9])}
    (row,) = timed_rows(GROUP, [implementation("vllm_cuda", 1, 8)], samples)
    assert row.time_over_nwor is None
    assert half_widths(samples) == []
