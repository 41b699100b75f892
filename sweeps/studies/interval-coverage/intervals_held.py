"""Coverage of several intervals over simulated runs."""

import numpy as np
from scipy import stats
from simulated_noise import Logs

from nwor_bench.analysis.statistics import paired_ratio, simultaneous_bounds
from nwor_bench.workload.stopping import StoppingRule

RESAMPLES = 999


def interval(logs: Logs) -> tuple[float, float]:
    """Mean and half-width of the log ratio, by `paired_ratio`."""
    found = paired_ratio(np.exp(logs).tolist(), [1.0] * len(logs))
    assert found is not None
    return float(np.log(found.ratio)), float(np.log(found.high / found.low) / 2)


def ours(logs: Logs) -> float:
    """The interval that the reports give."""
    return float(np.mean([abs(mean) <= half for mean, half in map(interval, logs)]))


def students_t(logs: Logs) -> float:
    """Without any correction for autocorrelation."""
    return float(np.mean(stats.ttest_1samp(logs, 0.0, axis=1).pvalue > 0.05))


def bootstraps(logs: Logs) -> list[float]:
    """Percentile, BCa and studentised, whole blocks drawn with replacement."""
    held = np.zeros(3)
    for number, row in enumerate(logs):
        rng = np.random.default_rng(number)
        for place, method in enumerate(("percentile", "BCa")):
            found = stats.bootstrap(
                (row,), np.mean, n_resamples=RESAMPLES, method=method, rng=rng
            ).confidence_interval
            held[place] += found.low <= 0 <= found.high
        held[2] += _studentised(row, rng)
    return list(held / len(logs))


def _studentised(row: Logs, rng: np.random.Generator) -> bool:
    drawn = row[rng.integers(0, len(row), (RESAMPLES, len(row)))]
    errors = drawn.std(axis=1, ddof=1) + 1e-12
    quantile = np.quantile(np.abs(drawn.mean(axis=1) - row.mean()) / errors, 0.95)
    return bool(abs(row.mean()) <= quantile * row.std(ddof=1))


def best_of(logs: Logs, truth: float = 0.0) -> tuple[float, float]:
    """Share of runs whose fastest cell's own and simultaneous interval hold the log ratio `truth`.

    `logs` are log ratios [runs, cells, blocks], all cells of the same true ratio.
    """
    held = np.zeros(2)
    for run in logs:
        best = run[int(np.argmin(run.mean(axis=1)))]
        found = paired_ratio(np.exp(best).tolist(), [1.0] * len(best))
        assert found is not None
        bounds = ((found.low, found.high), simultaneous_bounds(found, len(run)))
        held += [low <= np.exp(truth) <= high for low, high in bounds]
    return float(held[0] / len(logs)), float(held[1] / len(logs))


def stop(logs: Logs, rule: StoppingRule) -> tuple[bool, int, bool]:
    """Coverage at the stop, blocks at the stop, and whether the intervals of all looks covered."""
    ended, held, never_out = None, False, True
    for n in (*rule.looks, rule.max_blocks):
        mean, half = interval(logs[:n])
        holds = abs(mean) <= half
        never_out &= holds
        if ended is None and (half <= (rule.ci_width or 0) or n == rule.max_blocks):
            ended, held = n, holds
    assert ended is not None
    return held, ended, never_out
