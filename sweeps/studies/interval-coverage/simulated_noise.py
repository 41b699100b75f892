"""Noise of simulated runs whose true ratio is 1: log ratios of blocks, and effects of groups.

Blocks: functions of a generator, a number of runs and of blocks return log ratios [runs, blocks] of
about unit spread. Groups (`NOISES`): window times are simulated one by one, the clock, then noise
of the window's own. Two cells alternate in runs of 2, 4 or 8 windows (85, 10 and 5 % of the
groups), and a group's effect is taken as the analysis takes it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

Logs = NDArray[np.float64]
Noise = Callable[[np.random.Generator, tuple[int, ...]], Logs]
Blocks = Callable[[np.random.Generator, int, int], Logs]
Sample = Callable[[np.random.Generator, int], Logs]
"""Log effects of so many groups, or log noise of so many windows."""

CELLS = 7
"""Cells a block: six and the A/A arm."""

DRIFT = 0.9
"""Autocorrelation of the machine's drift from one batch to the next."""


def heavy(rng: np.random.Generator, shape: tuple[int, ...]) -> Logs:
    """Student's t with 3 degrees of freedom, scaled to unit variance: no fourth moment."""
    return rng.standard_t(3, shape) / 3**0.5


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Logs:
    """For comparison."""
    return rng.standard_normal(shape)


def autoregression(shocks: Logs, r: float) -> Logs:
    """x_i = r x_{i-1} + shock_i along the last axis with the shocks' spread, from the start on."""
    scaled = (1 - r**2) ** 0.5 * shocks
    scaled[..., 0] = shocks[..., 0]
    return np.asarray(lfilter([1.0], [1.0, -r], scaled))


def independent(rng: np.random.Generator, runs: int, blocks: int, noise: Noise = heavy) -> Logs:
    """Independent blocks."""
    return noise(rng, (runs, blocks))


def design(
    rng: np.random.Generator, runs: int, blocks: int, noise: Noise = heavy, drift: float = DRIFT
) -> Logs:
    """A sweep: the machine drifts from batch to batch, every batch has noise of its own, and
    each block runs its cells in an order drawn at random. Two of the cells are compared."""
    return all_cells(rng, runs, blocks, noise, drift)[:, 0]


def all_cells(
    rng: np.random.Generator, runs: int, blocks: int, noise: Noise = heavy, drift: float = DRIFT
) -> Logs:
    """A sweep of `runs` runs, every cell against the first: [runs, CELLS - 1, blocks].

    The cells share the first one's noise, so that their ratios go up and down together.
    """
    drifting = autoregression(noise(rng, (runs, blocks * CELLS)), drift)
    times = drifting.reshape(runs, blocks, CELLS) + 0.7 * noise(rng, (runs, blocks, CELLS))
    order = np.argsort(rng.random((runs, blocks, CELLS)), axis=2)
    times = np.take_along_axis(times, order, axis=2)
    return np.moveaxis(times[:, :, 1:] - times[:, :, :1], 1, 2)


def design_t3(rng: np.random.Generator, runs: int, blocks: int) -> Logs:
    """`design` with heavy tails."""
    return design(rng, runs, blocks)


def neighbours_t3(
    rng: np.random.Generator, runs: int, blocks: int, noise: Noise = heavy, r: float = 0.3
) -> Logs:
    """Harder than any sweep should be: the log ratios themselves are autocorrelated."""
    return autoregression(noise(rng, (runs, blocks)), r)


BLOCKS: dict[str, Blocks] = {
    "independent, normal": partial(independent, noise=normal),
    "independent, heavy tails": independent,
    "a sweep that drifts, heavy tails": design,
    "neighbours correlate by 0.3, heavy tails": neighbours_t3,
}

SIGMA = 0.01
"""Scatter of a window's log time."""

LOW_MHZ, HIGH_MHZ = 1410.0, 1980.0
WINDOWS_A_CLOCK = 60
"""Windows between two jumps of the clock, on average."""

_LENGTHS = {2: 0.85, 4: 0.1, 8: 0.05}
_SIGNS = np.array([-1.0, 1.0, 1.0, -1.0])


@dataclass(frozen=True)
class Windows:
    """Groups made of simulated windows."""

    clock: Sample
    noise: Sample
    lengths: Mapping[int, float] = field(default_factory=lambda: _LENGTHS)
    """Windows of a run, and its share of the groups."""

    def __call__(self, rng: np.random.Generator, groups: int) -> Logs:
        """Log effects of so many groups."""
        lengths = rng.choice(list(self.lengths), groups, p=list(self.lengths.values()))
        ends = np.cumsum(4 * lengths)
        logs = self.clock(rng, ends[-1]) + self.noise(rng, ends[-1])
        effects = np.empty(groups)
        for length in self.lengths:
            own = np.flatnonzero(lengths == length)
            places = (ends[own] - 4 * length)[:, None] + np.arange(4 * length)
            runs = logs[places].reshape(len(own), 4, length)[:, :, 1:].mean(axis=2)
            effects[own] = runs @ _SIGNS / 2
        return effects * rng.choice([-1.0, 1.0], groups)  # who begins is drawn


def steady(_: np.random.Generator, windows: int) -> Logs:
    """A clock that does not change."""
    return np.zeros(windows)


def drifting(rng: np.random.Generator, windows: int) -> Logs:
    """A clock that drifts: an autoregression, 0.99 from window to window, of 5 %."""
    return 0.05 * autoregression(rng.standard_normal(windows), 0.99)


def jumping(rng: np.random.Generator, windows: int) -> Logs:
    """A clock that jumps between 1410 and 1980 MHz (a telegraph)."""
    jumps = rng.random(windows) < 1 / WINDOWS_A_CLOCK
    return np.where(np.cumsum(jumps) % 2, np.log(HIGH_MHZ / LOW_MHZ), 0.0)


def quiet(rng: np.random.Generator, windows: int) -> Logs:
    """Independent windows without heavy tails."""
    return SIGMA * rng.standard_normal(windows)


def wandering(rng: np.random.Generator, windows: int) -> Logs:
    """Neighbours correlate by 0.7, as on a busy host."""
    return SIGMA * autoregression(rng.standard_normal(windows), 0.7)


def student(degrees: float) -> Sample:
    """Heavy tails: Student's t."""
    return lambda rng, windows: SIGMA / 2 * rng.standard_t(degrees, windows)


def contaminated(rng: np.random.Generator, windows: int) -> Logs:
    """One window in twenty takes longer, by 30 % on average."""
    late = rng.random(windows) < 0.05
    return quiet(rng, windows) + late * rng.exponential(0.3, windows)


def correlated(r: float) -> Sample:
    """Harder than in a run: the groups' effects themselves are autocorrelated, t3."""
    return lambda rng, groups: SIGMA * autoregression(rng.standard_t(3, groups), r)


def batch_effects(rng: np.random.Generator, groups: int) -> Logs:
    """Each batch of 20 groups has an effect of its own around the true one."""
    own = rng.standard_normal(groups // 20 + 1)
    return SIGMA * (rng.standard_t(3, groups) + 0.3 * np.repeat(own, 20)[:groups])


NOISES: dict[str, Sample] = {
    "independent windows": Windows(steady, quiet),
    "clock drifts": Windows(drifting, quiet),
    "clock jumps": Windows(jumping, quiet),
    "windows t, 2 degrees": Windows(steady, student(2)),
    "clock drifts, t 2": Windows(drifting, student(2)),
    "one window in 20 late": Windows(steady, contaminated),
    "clock jumps, one in 20 late": Windows(jumping, contaminated),
    "windows correlate by 0.7": Windows(steady, wandering),
    "groups correlate by 0.3": correlated(0.3),
    "groups correlate by 0.6": correlated(0.6),
    "batches of 20 differ": batch_effects,
}
