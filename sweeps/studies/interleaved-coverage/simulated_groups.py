"""Group effects of simulated interleaved batches whose true effect is 0.

Window times are simulated one by one: the clock, then noise of the window's own. Two cells take
turns in runs of 2, 4 or 8 windows (85, 10 and 5 % of the groups, as batches had when the CSV was
made), and a group's effect is taken as the analysis takes it. Each function returns log effects of
n groups.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

Logs = NDArray[np.float64]
Sample = Callable[[np.random.Generator, int], Logs]

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


def normal(rng: np.random.Generator, windows: int) -> Logs:
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
    return normal(rng, windows) + late * rng.exponential(0.3, windows)


def autocorrelated(r: float) -> Sample:
    """Harder than in a run: the groups' effects themselves are autocorrelated, t3."""
    return lambda rng, groups: SIGMA * autoregression(rng.standard_t(3, groups), r)


def batch_effects(rng: np.random.Generator, groups: int) -> Logs:
    """Each batch of 20 groups has an effect of its own around the true one."""
    own = rng.standard_normal(groups // 20 + 1)
    return SIGMA * (rng.standard_t(3, groups) + 0.3 * np.repeat(own, 20)[:groups])


def autoregression(shocks: Logs, r: float) -> Logs:
    """x_i = r x_{i-1} + shock_i with the shocks' spread, from its stationary spread."""
    scaled = (1 - r**2) ** 0.5 * shocks
    scaled[0] = shocks[0]
    return np.asarray(lfilter([1.0], [1.0, -r], scaled))


NOISES: dict[str, Sample] = {
    "independent": Windows(steady, normal),
    "drifting clock": Windows(drifting, normal),
    "jumping clock": Windows(jumping, normal),
    "t, 2 degrees": Windows(steady, student(2)),
    "t, 3 degrees": Windows(steady, student(3)),
    "contaminated": Windows(steady, contaminated),
    "drifting clock, t 2": Windows(drifting, student(2)),
    "jumping clock, contaminated": Windows(jumping, contaminated),
    "wandering windows": Windows(steady, wandering),
    "groups correlate by 0.3, t 3": autocorrelated(0.3),
    "groups correlate by 0.6, t 3": autocorrelated(0.6),
    "batches of 20 differ": batch_effects,
}
