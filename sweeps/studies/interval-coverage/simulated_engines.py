"""Simulated runs of `worth --engines` whose truth is known, and what their intervals say.

Nothing differs between the draft counts: a true gain of 1 at each. In every block all counts run,
with what a block has in common, a scatter of each count, and lasting offsets of the engines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from types import SimpleNamespace
from typing import Any

import numpy as np

from nwor_bench.analysis.draft_rates import AtSize, Worth, worth_at
from nwor_bench.analysis.engine_times import block_times
from nwor_bench.records.header import StoredSpec
from nwor_bench.records.types import Phase, Verdict
from nwor_bench.stats.interval import Interval

COUNTS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Noise:
    """What makes times of steps differ, as fractions."""

    blocks: int = 8
    scatter: float = 0.01
    of_last: float = 0.01
    """Scatter of the largest count."""
    drift: float = 0.0
    """Autocorrelation of each engine's scatter from block to block."""
    engines: float = 0.0
    """Lasting differences between engines."""

    def logs(self, rng: np.random.Generator) -> dict[int | None, list[float]]:
        """Log time of a step by draft count and block; None: the A/A engine."""
        shared = rng.normal(0, 0.05, self.blocks)
        found = {}
        for count in (None, 0, *COUNTS):
            scatter = self.of_last if count == COUNTS[-1] else self.scatter
            own, last = [], rng.normal(0, scatter)
            for _ in range(self.blocks):
                own.append(last)
                last = self.drift * last + rng.normal(0, scatter * (1 - self.drift**2) ** 0.5)
            found[count] = list(shared + own + rng.normal(0, self.engines))
        return found


class OneToken:
    """Tokens that are the same at every draft count, and known."""

    def mean(self, k: int) -> float:
        """Tokens of a request in a window."""
        return 1.0

    def difference(self, k: int, other: int) -> Interval:
        """No difference."""
        return Interval.of(0.0, 0.0, 1, 20)


def run_of(logs: Mapping[int | None, Sequence[float]]) -> Any:
    """A run with these times of steps, as far as `block_times` reads it."""
    batches = [
        SimpleNamespace(
            phase=Phase.TIMED, block=block, cell=SimpleNamespace(drafts=count), requests=1,
            request_times=SimpleNamespace(tpot_ms=[exp(time)]), request_acceptance=((10, 0),),
            request_tokens=((11, 0),), output_tokens=11,
        )
        for count, own in logs.items()
        for block, time in enumerate(own)
    ]  # fmt: skip
    finished = {(Phase.TIMED, batch.block) for batch in batches}
    header = SimpleNamespace(pair=SimpleNamespace(method="mtp"), spec=StoredSpec(engines=True))
    return SimpleNamespace(batches=batches, finished=finished, header=header)


def worth_of_noise(noise: Noise, seed: int) -> Worth:
    """What `worth --engines` says of one simulated run."""
    times = block_times(run_of(noise.logs(np.random.default_rng(seed))))
    return worth_at([AtSize(8, 8, times, OneToken())], COUNTS, 20)


@dataclass(frozen=True)
class Shares:
    """Shares of simulated runs."""

    covered: float
    """Intervals of all counts include the truth."""
    false: float
    """A count is FASTER or SLOWER."""
    line: float
    """A draft count is recommended."""


def shares(noise: Noise, runs: int) -> Shares:
    """Coverage and false verdicts over this many simulated runs."""
    found = [worth_of_noise(noise, seed) for seed in range(runs)]
    differ = {str(Verdict.FASTER), str(Verdict.SLOWER)}
    covered = [
        all(r.ratio is not None and r.ratio.low < 1 < r.ratio.high for r in each.rates)
        for each in found
    ]
    false = [any(rate.verdict in differ for rate in each.rates) for each in found]
    line = [any(each.best.values()) for each in found]
    return Shares(*(float(np.mean(each)) for each in (covered, false, line)))
