"""Coverage of the interval from groups of neighbouring windows.

    python sweeps/studies/interleaved-coverage/measure.py [--runs 2000] [--output FOLDER]

Simulated runs whose true effect is known (`simulated_groups.py`), 20 to 1,000 groups each, and the
95 % intervals of five ways to locate them. `ours` is
`nwor_bench.instruments.robust.robust_location`; `mean` its `mean_location`; the other
three have Huber's location too, and differ in the variance: Newey and West's, one that takes
groups for independent, and a first-order autoregression's. Writes coverage.csv.gz.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas as pd
from simulated_groups import NOISES, Logs

from nwor_bench.instruments import robust
from nwor_bench.instruments.robust import Estimate, mean_location, robust_location

GROUPS = (10, 20, 50, 200, 1000)
EFFECTS = (0.0, 0.003, -0.03)

Variance = Callable[[Logs], tuple[float, float]]
Line = dict[str, object]


def independent(scores: Logs) -> tuple[float, float]:
    """As if groups were independent."""
    return float(scores.var(ddof=1)), len(scores) - 1


def newey_west(scores: Logs) -> tuple[float, float]:
    """Bartlett's kernel with Newey and West's automatic bandwidth (1994, section 3).

    Its degrees of freedom are those of the smoothed spectrum, n over 2/3 of the bandwidth
    (Priestley, Spectral Analysis and Time Series, 1981, section 6.2.4).
    """
    count = len(scores)
    around = scores - scores.mean()
    first = int(4 * (count / 100) ** (2 / 9))
    lags = [_lag(around, k) for k in range(first + 1)]
    total = lags[0] + 2 * sum(lags[1:])
    slope = 2 * sum(k * lag for k, lag in enumerate(lags))
    rate = 1.1447 * abs(slope / total) ** (2 / 3) if total > 0 else 0.0
    width = min(int(rate * count ** (1 / 3)) + 1, count // 4) + 1
    found = _lag(around, 0) + 2 * sum((1 - k / width) * _lag(around, k) for k in range(1, width))
    return max(found, 0.0) * count / (count - 1), min(count - 1, 1.5 * count / width)


def autoregression(scores: Logs) -> tuple[float, float]:
    """(1 + r) / (1 - r), r without its bias (as `statistics.variance_inflation`)."""
    count = len(scores)
    around = scores - scores.mean()
    r = _lag(around, 1) / _lag(around, 0)
    r = min(max(r + (1 + 4 * r) / count, -0.5), 0.9)
    spread = 2 / count + 4 / (1 - r**2) / count
    return float(scores.var(ddof=1)) * (1 + r) / (1 - r), min(count - 1, 2 / spread)


def _lag(around: Logs, k: int) -> float:
    return float((around[k:] * around[: len(around) - k]).sum()) / len(around)


def with_variance(variance: Variance) -> Callable[[Logs], Estimate | None]:
    """Huber's location with another variance of its scores."""

    def locate(values: Logs) -> Estimate | None:
        with patch.object(robust, "long_run_variance", variance):
            return robust_location(values)

    return locate


WAYS: dict[str, Callable[[Logs], Estimate | None]] = {
    "ours": robust_location,
    "mean": mean_location,
    "Newey-West": with_variance(newey_west),
    "autoregression": with_variance(autoregression),
    "independent": with_variance(independent),
}


def lines(runs: int) -> Iterator[Line]:
    """A line for each noise, number of groups, effect and way."""
    for noise, sample in NOISES.items():
        for groups in GROUPS:
            for effect in EFFECTS:
                rng = np.random.default_rng([groups, round(1e4 * effect) % 1000])
                held: dict[str, list[bool]] = {way: [] for way in WAYS}
                widths: dict[str, list[float]] = {way: [] for way in WAYS}
                for _ in range(runs):
                    values = sample(rng, groups) + effect
                    for way, locate in WAYS.items():
                        found = locate(values)
                        assert found is not None
                        half = found.half_width()
                        held[way].append(abs(found.value - effect) <= half)
                        widths[way].append(half)
                for way in WAYS:
                    yield {
                        "noise": noise, "groups": groups, "effect": effect, "way": way,
                        "runs": runs, "held": float(np.mean(held[way])),
                        "half_width": float(np.median(widths[way])),
                    }  # fmt: skip


def main() -> None:
    """Simulate; write the CSV."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    table = args.output / "coverage.csv.gz"
    pd.DataFrame(lines(args.runs)).to_csv(table, index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
