"""How often do the intervals hold the truth, and what does stopping early do to them?

    .venv/bin/python -m tests.benchmarks.coverage [--runs 2000]

Simulated runs whose true ratio is 1 (tests/simulated_noise.py), most of them with noise that is
autocorrelated and heavy-tailed. The first table compares ways to make an interval from n blocks:
`ours` (nwor_bench.analysis.statistics.paired_ratio), plain Student's t, the percentile bootstrap
over blocks, BCa, and the studentised bootstrap. The second stops a run at the first look at which
the interval is narrow enough (nwor_bench.workload.stopping), and, to compare, as soon as it
excludes 1. The third takes the cell that came out fastest of six equal ones: its own interval, and
the one that holds for all six at once (nwor_bench.analysis.statistics.simultaneous_bounds), which a
report's answer gives.
"""

import argparse
from collections.abc import Callable
from functools import partial

import numpy as np
from scipy import stats

from nwor_bench.analysis.statistics import paired_ratio, simultaneous_bounds
from nwor_bench.workload.stopping import StoppingRule
from tests.simulated_noise import (
    Logs,
    all_cells,
    autoregression,
    design,
    heavy,
    neighbours_t3,
    normal,
)

RESAMPLES = 999
BLOCKS = (5, 8, 10, 20, 40, 60)
SCALE = 0.02
"""Spread of a block's log ratio."""


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--bootstraps", type=int, default=1000, help="runs that are resampled too")
    args = parser.parse_args()
    beside = 100 * 2 * (0.05 * 0.95 / args.runs) ** 0.5
    print(f"per cent of {args.runs} runs whose interval holds the truth (+- {beside:.1f})\n")
    print(f"{'noise':32} {'n':>3} {'ours':>6} {'t':>6} {'perc.':>6} {'BCa':>6} {'stud.':>6}")
    for name, model in MODELS.items():
        for blocks in BLOCKS:
            logs = SCALE * model(np.random.default_rng(blocks), args.runs, blocks)
            some = logs[: args.bootstraps]
            shares = [ours(logs), students_t(logs), *bootstraps(some)]
            print(f"{name:32} {blocks:3d} " + " ".join(f"{100 * s:6.1f}" for s in shares))
    stopping(args.runs)
    chosen_best(args.runs)


def chosen_best(runs: int) -> None:
    """The third table."""
    print(f"\nper cent of {runs} runs in which the fastest of six cells' interval holds the truth")
    print(f"{'noise':32} {'n':>3} {'own':>6} {'simultaneous':>13}")
    for name, noise in (("a sweep, normal", normal), ("a sweep, heavy tails", heavy)):
        for blocks in BLOCKS:
            logs = SCALE * all_cells(np.random.default_rng(blocks), runs, blocks, noise)
            own, simultaneous = best_of(logs)
            print(f"{name:32} {blocks:3d} {100 * own:6.1f} {100 * simultaneous:13.1f}")


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


def stopping(runs: int) -> None:
    """The second table."""
    print(f"\nper cent of {runs} runs of at most 100 blocks whose interval holds the truth")
    print(f"{'noise':32} {'half-width':>10} {'blocks':>7} {'at stop':>8} {'on verdict':>11}")
    for name in ("heavy tails", "a sweep, heavy tails"):
        logs = SCALE * MODELS[name](np.random.default_rng(1), runs, 100)
        spread = float(logs.std())
        for share in (0.8, 0.6, 0.4, 0.3, 0.2):
            rule = StoppingRule(5, 100, ci_width=share * spread)
            held, blocks, never = zip(*(stop(row, rule) for row in logs), strict=True)
            print(
                f"{name:32} {share:8.1f} s {np.mean(blocks):7.1f} {100 * np.mean(held):8.1f} "
                f"{100 * np.mean(never):11.1f}"
            )


def stop(logs: Logs, rule: StoppingRule) -> tuple[bool, int, bool]:
    """Held at the stop; blocks then; and had no look on the way excluded the truth?"""
    ended, held, never_out = None, False, True
    for n in (*rule.looks, rule.max_blocks):
        mean, half = interval(logs[:n])
        holds = abs(mean) <= half
        never_out &= holds
        if ended is None and (half <= (rule.ci_width or 0) or n == rule.max_blocks):
            ended, held = n, holds
    assert ended is not None
    return held, ended, never_out


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


def independent(noise: Callable[..., Logs], rng: np.random.Generator, runs: int, n: int) -> Logs:
    """Blocks that know nothing of each other."""
    return noise(rng, (runs, n))


def neighbours_normal(rng: np.random.Generator, runs: int, n: int) -> Logs:
    """Log ratios that are 0.3 autocorrelated, without heavy tails."""
    return autoregression(normal(rng, (runs, n)), 0.3)


MODELS: dict[str, Callable[[np.random.Generator, int, int], Logs]] = {
    "normal": partial(independent, normal),
    "heavy tails": partial(independent, heavy),
    "a sweep, normal": partial(design, noise=normal),
    "a sweep, heavy tails": design,
    "a sweep, heavy tails, drift 0.99": partial(design, drift=0.99),
    "neighbours 0.3, normal": neighbours_normal,
    "neighbours 0.3, heavy tails": neighbours_t3,
}

if __name__ == "__main__":
    main()
