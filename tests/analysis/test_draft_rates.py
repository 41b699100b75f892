"""Rates from estimates alone: classes of batch sizes, and tokens of spans."""

from collections.abc import Mapping, Sequence
from math import exp, log

import numpy as np
import pytest

from nwor_bench.analysis.draft_rates import AtSize, SpanTokens, Worth, worth_at
from nwor_bench.instruments.robust import Estimate, as_ratio, of_ratio
from nwor_bench.records.types import Verdict


@pytest.mark.parametrize(
    ("best", "least", "schedule"),
    [
        ({1: 4, 8: 2}, {8: 5}, [[1, 1, 4], [2, 8, 2]]),  # 2 to 4: the smaller count
        ({2: 1, 4: 3, 8: 3}, {4: 3, 8: 5}, [[1, 2, 1], [3, 8, 3]]),
        ({4: 3, 16: 0, 32: 0}, {4: 3, 16: 9, 32: 17}, [[1, 4, 3], [5, 32, 0]]),
        ({4: 1, 16: 3}, {4: 3, 16: 9}, [[1, 8, 1], [9, 16, 3]]),
    ],
)
def test_a_class_has_its_count_from_its_smallest_size_on(
    best: Mapping[int, int], least: Mapping[int, int], schedule: Sequence[Sequence[int]]
) -> None:
    found = Worth((), best, 0, {}, least)
    assert found.schedule == schedule
    assert [found.sizes(size) for size in (1, *least)] == [
        "1",
        *(f"{first}-{last}" for last, first in least.items()),
    ]


def test_an_estimate_comes_back_from_its_interval() -> None:
    for value, error, count in ((0.3, 0.02, 60), (-1.0, 0.2, 12), (0.0, 0.0, 400)):
        degrees = int(max(4, int(0.4 * count ** (2 / 3))))
        given = Estimate(value, error, degrees, count)
        ratio = as_ratio(given)
        found = of_ratio(ratio.ratio, ratio.low, ratio.high, count)
        assert found.value == pytest.approx(value)
        assert found.standard_error == pytest.approx(error)
        assert (found.degrees, found.count) == (degrees, count)


def test_tokens_of_two_counts_differ_by_both_errors() -> None:
    tokens = SpanTokens({1: Estimate(0.5, 0.03, 10, 40), 2: Estimate(0.9, 0.04, 10, 40)})
    found = tokens.difference(2, 1)
    assert found is not None
    assert (found.value, found.standard_error) == (pytest.approx(0.4), pytest.approx(0.05))
    # Welch: (9 + 16)^2 / (81 / 10 + 256 / 10)
    assert found.degrees == pytest.approx(625 / 33.7)
    alone = tokens.difference(1, 0)
    assert alone is not None
    assert (alone.value, alone.standard_error, alone.degrees) == (0.5, 0.03, 10)
    assert tokens.difference(2, 3) is None
    assert (tokens.mean(2), tokens.mean(3)) == (pytest.approx(exp(0.9)), None)


@pytest.mark.slow
def test_intervals_of_a_server_include_the_truth_in_95_percent_of_runs() -> None:
    """Three counts of a class together, times and tokens each with an error of 2 %."""
    times, tokens, error, runs = {1: 1.2, 2: 1.4, 3: 1.7}, {1: 1.6, 2: 2.0, 3: 2.2}, 0.02, 1000
    hits = right = 0
    for seed in range(runs):
        rng = np.random.default_rng(seed)

        def drawn(truth: float, rng: np.random.Generator = rng) -> Estimate:
            scatter = error * (rng.chisquare(12) / 12) ** 0.5
            return Estimate(log(truth) + rng.normal(0, error), scatter, 12, 60)

        at = AtSize(8, 5, {k: drawn(t) for k, t in times.items()},
                    SpanTokens({k: drawn(t) for k, t in tokens.items()}))  # fmt: skip
        found = worth_at([at], [1, 2, 3], 0)
        hits += all((r.low or 0) < tokens[r.drafts] / times[r.drafts] < (r.high or 0)
                    for r in found.rates)  # fmt: skip
        right += found.best == {8: 1}  # 1.33, 1.43 and 1.29 times: k = 2 is better, not surely
        assert found.rates[0].verdict == Verdict.FASTER
    assert 0.94 < hits / runs < 0.98
    assert right / runs > 0.5
