"""Coverage of the intervals, and the effect of stopping early on it.

    python sweeps/studies/interval-coverage/measure.py [--runs 2000] [--output FOLDER]

Simulated runs whose true ratio is 1 (`simulated_noise.py`), most of them with noise that is
autocorrelated and heavy-tailed. Three questions, all in coverage.csv:

- intervals: ways to make an interval from n blocks. `ours` is
  `nwor_bench.analysis.statistics.paired_ratio`.
- stopping: a run ends at the first look at which the interval is narrow enough
  (`nwor_bench.workload.stopping`), or, to compare, as soon as it excludes 1.
- fastest of six: the fastest of six equal cells, by its own interval and by the one that holds for
  all six at once (`simultaneous_bounds`), which a report's answer gives.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from intervals_held import best_of, bootstraps, ours, stop, students_t
from simulated_noise import Logs, all_cells, autoregression, design, heavy, neighbours_t3, normal

from nwor_bench.workload.stopping import StoppingRule

BLOCKS = (5, 8, 10, 20, 40, 60)
SCALE = 0.02
"""Spread of a block's log ratio."""

Line = dict[str, object]


def intervals(runs: int, resampled: int) -> Iterator[Line]:
    """Each way to make an interval, by noise and number of blocks."""
    ways = ("ours", "Student's t", "percentile", "BCa", "studentised")
    for name, model in MODELS.items():
        for blocks in BLOCKS:
            logs = SCALE * model(np.random.default_rng(blocks), runs, blocks)
            shares = [ours(logs), students_t(logs), *bootstraps(logs[:resampled])]
            for place, (way, share) in enumerate(zip(ways, shares, strict=True)):
                counted = runs if place < 2 else min(runs, resampled)
                yield {
                    "question": "intervals", "noise": name, "blocks": blocks, "way": way,
                    "runs": counted, "held": share,
                }  # fmt: skip


def stopping(runs: int) -> Iterator[Line]:
    """Runs of at most 100 blocks: stopped on the interval's width, and on a verdict."""
    for name in ("heavy tails", "a sweep, heavy tails"):
        logs = SCALE * MODELS[name](np.random.default_rng(1), runs, 100)
        spread = float(logs.std())
        for share in (0.8, 0.6, 0.4, 0.3, 0.2):
            rule = StoppingRule(5, 100, ci_width=share * spread)
            held, blocks, never = zip(*(stop(row, rule) for row in logs), strict=True)
            for way, found in (("on the width", held), ("on a verdict", never)):
                yield {
                    "question": "stopping", "noise": name, "blocks": float(np.mean(blocks)),
                    "half_width": share, "way": way, "runs": runs, "held": float(np.mean(found)),
                }  # fmt: skip


def fastest_of_six(runs: int) -> Iterator[Line]:
    """The fastest of six equal cells."""
    for name, noise in (("a sweep, normal", normal), ("a sweep, heavy tails", heavy)):
        for blocks in BLOCKS:
            logs = SCALE * all_cells(np.random.default_rng(blocks), runs, blocks, noise)
            for way, share in zip(("its own", "simultaneous"), best_of(logs), strict=True):
                yield {
                    "question": "fastest of six", "noise": name, "blocks": blocks, "way": way,
                    "runs": runs, "held": share,
                }  # fmt: skip


def independent(noise: Callable[..., Logs], rng: np.random.Generator, runs: int, n: int) -> Logs:
    """Independent blocks."""
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


def main() -> None:
    """Simulate; write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--bootstraps", type=int, default=1000, help="runs that are resampled too")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    lines = [
        *intervals(args.runs, args.bootstraps),
        *stopping(args.runs),
        *fastest_of_six(args.runs),
    ]
    table = args.output / "coverage.csv"
    pd.DataFrame(lines).to_csv(table, index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
