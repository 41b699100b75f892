"""Rates from estimates alone: classes of batch sizes, and tokens of spans."""

from collections.abc import Mapping, Sequence
from math import exp, log

import numpy as np
import pytest

from nwor_bench.analysis.draft_rates import MIN_JUDGED, AtSize, SpanTokens, Worth, worth_at
from nwor_bench.records.types import Verdict
from nwor_bench.stats.interval import Interval, t_quantile
from nwor_bench.stats.paired import variance_inflation


@pytest.mark.parametrize(
    ("best", "least", "schedule"),
    [
        ({1: 4}, {}, [[1, 1, 4]]),
        ({1: 4, 2: 4, 8: 4}, {}, [[1, 8, 4]]),
        ({1: 4, 8: 2, 32: 0}, {}, [[1, 1, 4], [2, 8, 2], [9, 32, 0]]),
        ({1: 1, 4: 3}, {}, [[1, 3, 1], [4, 4, 3]]),  # between two sizes the smaller count
        ({8: 2}, {}, [[1, 8, 2]]),
        ({1: 4, 8: 2}, {8: 5}, [[1, 1, 4], [2, 8, 2]]),  # 2 to 4: the smaller count
        ({2: 1, 4: 3, 8: 3}, {4: 3, 8: 5}, [[1, 2, 1], [3, 8, 3]]),
        ({4: 3, 16: 0, 32: 0}, {4: 3, 16: 9, 32: 17}, [[1, 4, 3], [5, 32, 0]]),
        ({4: 1, 16: 3}, {4: 3, 16: 9}, [[1, 8, 1], [9, 16, 3]]),
    ],
)
def test_a_class_has_its_count_from_its_smallest_size_on(
    best: Mapping[int, int], least: Mapping[int, int], schedule: Sequence[Sequence[int]]
) -> None:
    found = Worth((), best, 0, {}, least) if least else Worth((), best, 0, {})
    assert found.schedule == schedule
    assert [found.sizes(size) for size in (1, *least)] == [
        "1",
        *(f"{first}-{last}" for last, first in least.items()),
    ]


def test_tokens_of_two_counts_differ_by_both_errors() -> None:
    tokens = SpanTokens({1: Interval.of(0.5, 0.03, 10, 40), 2: Interval.of(0.9, 0.04, 10, 40)})
    found = tokens.difference(2, 1)
    assert found is not None
    assert (found.value, found.error) == (pytest.approx(0.4), pytest.approx(0.05))
    # Welch: (9 + 16)^2 / (81 / 10 + 256 / 10)
    assert found.degrees == pytest.approx(625 / 33.7)
    alone = tokens.difference(1, 0)
    assert alone is not None
    assert (alone.value, alone.error, alone.degrees) == (0.5, 0.03, 10)
    assert tokens.difference(2, 3) is None
    assert (tokens.mean(2), tokens.mean(3)) == (pytest.approx(exp(0.9)), None)


@pytest.mark.slow
def test_intervals_of_a_server_include_the_truth_in_95_percent_of_runs() -> None:
    """Three counts of a class together, times and tokens each with an error of 2 %."""
    times, tokens, error, runs = {1: 1.2, 2: 1.4, 3: 1.7}, {1: 1.6, 2: 2.0, 3: 2.2}, 0.02, 200
    hits = right = 0
    for seed in range(runs):
        rng = np.random.default_rng(seed)

        def drawn(truth: float, rng: np.random.Generator = rng) -> Interval:
            scatter = error * (rng.chisquare(12) / 12) ** 0.5
            return Interval.of(log(truth) + rng.normal(0, error), scatter, 12, 60)

        ratios: dict[int | None, Interval] = {None: drawn(1.0)}
        ratios |= {k: drawn(t) for k, t in times.items()}
        at = AtSize(8, 5, ratios, SpanTokens({k: drawn(t) for k, t in tokens.items()}))
        found = worth_at([at], [1, 2, 3], 0)
        hits += all(r.ratio.low < tokens[r.drafts] / times[r.drafts] < r.ratio.high
                    for r in found.rates)  # fmt: skip
        right += found.best == {8: 1}  # 1.33, 1.43 and 1.29 times: k = 2 is better, not surely
        assert found.rates[0].verdict == Verdict.FASTER
    assert 0.92 < hits / runs < 0.99
    assert right / runs > 0.5


TWICE = SpanTokens({k: Interval.of(log(2), 0.0, 9, 50) for k in (1, 2, 3)})
"""Two tokens of a request in a window at each draft count, without an error."""


def from_bounds(ratio: float, low: float, high: float, groups: int) -> Interval:
    """The log time ratio that has this interval for one draft count."""
    half = (log(high) - log(low)) / 2
    return Interval.of(log(ratio), half / t_quantile(0.975, groups - 1), groups - 1, groups)


def at_size(
    times: Mapping[int, tuple[float, float, int]], noise: Interval | None, requests: int = 8
) -> AtSize:
    """Tokens/s over k = 0 by draft count, with the half width of its log time and its groups."""
    found: dict[int | None, Interval] = {} if noise is None else {None: noise}
    for k, (rate, half, groups) in times.items():
        quantile = t_quantile(1 - 0.025 / len(times), groups - 1)
        found[k] = Interval.of(log(2 / rate), half / quantile, groups - 1, groups)
    return AtSize(requests, requests, found, TWICE)


def quiet(groups: int = 40) -> Interval:
    """k = 0 over itself: 1 +- 1 %."""
    return from_bounds(1.0, 1 / 1.01, 1.01, groups)


@pytest.mark.parametrize(
    ("rate", "half", "groups", "noise", "verdict"),
    [
        # What two runs on a CPU printed with a line for vLLM each.
        (1.44, 0.34, 3, from_bounds(0.78, 0.62, 0.99, 3), Verdict.AMBIGUOUS),
        (1.47, 0.35, 3, from_bounds(0.81, 0.60, 1.10, 3), Verdict.AMBIGUOUS),
        (1.44, 0.34, 12, from_bounds(0.78, 0.62, 0.99, 12), Verdict.AMBIGUOUS),
        (1.44, 0.34, 3, quiet(), Verdict.AMBIGUOUS),
        (1.44, 0.34, 4, quiet(), Verdict.AMBIGUOUS),
        (1.44, 0.34, 5, quiet(), Verdict.FASTER),
        (1.44, 0.34, 5, None, Verdict.AMBIGUOUS),  # how far k = 0 is from itself is not known
        (0.90, 0.05, 12, quiet(), Verdict.SLOWER),
        (0.90, 0.05, 12, from_bounds(0.95, 0.88, 1.02, 12), Verdict.AMBIGUOUS),
        (1.001, 0.005, 12, quiet(), Verdict.SAME),
        (1.001, 0.005, 4, quiet(), Verdict.AMBIGUOUS),
    ],
)
def test_a_verdict_needs_groups_and_a_difference_beyond_the_noise(
    rate: float, half: float, groups: int, noise: Interval | None, verdict: Verdict
) -> None:
    """Ratio and interval are shown; the count is recommended only if it is FASTER, and none is
    without what a verdict needs."""
    found = worth_at([at_size({1: (rate, half, groups)}, noise)], [1], 9)
    (own,) = found.rates
    assert own.verdict == verdict
    assert own.ratio.value == pytest.approx(rate)
    assert own.ratio.low == pytest.approx(rate * exp(-half))
    judged = noise is not None and groups >= MIN_JUDGED
    assert found.best == ({8: int(verdict == Verdict.FASTER)} if judged else {})
    assert found.best_fixed == found.best.get(8)


@pytest.mark.parametrize(("groups", "best"), [(5, {8: 2}), (4, {})])
def test_a_count_of_too_few_groups_that_is_ahead_leaves_the_best_open(
    groups: int, best: Mapping[int, int]
) -> None:
    """In one engine k = 1 surely pays, and k = 2 seems to give far more."""
    size = at_size({1: (1.2, 0.02, 12), 2: (1.9, 0.1, groups)}, quiet())
    found = worth_at([size], [1, 2], 9)
    assert found.rates[0].verdict == Verdict.FASTER
    assert (found.best, found.best_fixed) == (best, best.get(8))


@pytest.mark.parametrize(("floor", "best"), [(1.01, 2), (1.06, 1)])
def test_a_larger_count_must_gain_more_than_the_noise_over_the_smaller(
    floor: float, best: int
) -> None:
    """k = 2 gives 5 % more than k = 1, +- 1 % each; also a gain that is all below 1 % counts."""
    noise = from_bounds(1.0, 1 / floor, floor, 40)
    times = {1: (1.5, 0.01, 40), 2: (1.5 * 1.05, 0.01, 40)}
    assert worth_at([at_size(times, noise)], [1, 2], 9).best == {8: best}
    noise = from_bounds(1.0, 1 / floor**0.1, floor**0.1, 40)
    times = {1: (1.5, 0.001, 40), 2: (1.5 * 1.005, 0.001, 40)}
    assert worth_at([at_size(times, noise)], [1, 2], 9).best == {8: best}


@pytest.mark.parametrize(
    ("small", "large", "best"),
    [
        # By count: rates at 1 and 8 requests, half widths of 2 % each.
        ({1: 1.3, 2: 1.6}, {1: 1.2, 2: 1.0}, 1),  # k = 2 over 1: 1.23 and 0.83, 1.01 on average
        ({1: 1.3, 2: 1.6}, {1: 1.2, 2: 1.1}, 2),  # 1.23 and 0.92: 1.06 on average, +- 3 %
        ({1: 0.9, 2: 0.8}, {1: 0.9, 2: 0.9}, 0),
        ({1: 1.2, 2: 1.3}, {1: 1.2}, 2),  # 8 requests lack k = 2: 1 request decides
        ({1: 1.2}, {1: 1.2}, None),  # nothing has all counts
    ],
)
def test_one_count_for_all_sizes_needs_a_sure_gain_on_average(
    small: Mapping[int, float], large: Mapping[int, float], best: int | None
) -> None:
    """The mean is no surer than each: the tokens of all sizes are the same texts'."""
    sizes = [
        at_size({k: (rate, 0.02, 40) for k, rate in own.items()}, quiet(), requests)
        for requests, own in ((1, small), (8, large))
    ]
    assert worth_at(sizes, [1, 2], 9).best_fixed == best
    # 6 % more at each of four sizes, +- 8 %: independent, the mean would be known to 4 %.
    unsure = [at_size({1: (1.06, 0.08, 40)}, quiet(), size) for size in (1, 2, 4, 8)]
    assert worth_at(unsure, [1], 9).best_fixed == 0


@pytest.mark.parametrize("groups", [3, 4, 5])
def test_a_steady_drift_is_noticed_from_the_fewest_groups_of_a_verdict_on(groups: int) -> None:
    """The reason for MIN_JUDGED: below, it counts as independent scatter."""
    noticed = variance_inflation(np.arange(groups, dtype=float)) > 1
    assert noticed == (groups >= MIN_JUDGED)
