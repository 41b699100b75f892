"""Log ratios of simulated runs whose true ratio is 1: autocorrelated, with heavy tails.

Each function takes a generator, a number of runs and of blocks, and returns an array
[runs, blocks] of about unit spread.
"""

import numpy as np
from numpy.typing import NDArray

Logs = NDArray[np.float64]

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
    """x_i = r x_{i-1} + shock_i along the last axis, from its stationary spread."""
    series = np.array(shocks)
    series[..., 0] /= (1 - r**2) ** 0.5
    for i in range(1, series.shape[-1]):
        series[..., i] += r * series[..., i - 1]
    return series


def design(rng: np.random.Generator, runs: int, blocks: int, noise=heavy, drift=DRIFT) -> Logs:
    """A sweep: the machine drifts from batch to batch, every batch has noise of its own, and
    each block runs its cells in an order drawn at random. Two of the cells are compared."""
    times = _cell_times(rng, runs, blocks, noise, drift)
    return times[:, :, 0] - times[:, :, 1]


def all_cells(rng: np.random.Generator, runs: int, blocks: int, noise=heavy, drift=DRIFT) -> Logs:
    """The same sweep, every cell against the first: [runs, CELLS - 1, blocks].

    The cells share the first one's noise, so that their ratios go up and down together.
    """
    times = _cell_times(rng, runs, blocks, noise, drift)
    return np.moveaxis(times[:, :, 1:] - times[:, :, :1], 1, 2)


def _cell_times(rng: np.random.Generator, runs: int, blocks: int, noise, drift: float) -> Logs:
    """Log times [runs, blocks, CELLS] of equal cells."""
    batches = blocks * CELLS
    drifting = autoregression(noise(rng, (runs, batches)) * (1 - drift**2) ** 0.5, drift)
    times = drifting.reshape(runs, blocks, CELLS) + 0.7 * noise(rng, (runs, blocks, CELLS))
    order = np.argsort(rng.random((runs, blocks, CELLS)), axis=2)
    return np.take_along_axis(times, order, axis=2)


def design_t3(rng: np.random.Generator, runs: int, blocks: int) -> Logs:
    """`design` with heavy tails."""
    return design(rng, runs, blocks)


def neighbours_t3(rng: np.random.Generator, runs: int, blocks: int) -> Logs:
    """Harder than any sweep should be: the log ratios themselves are 0.3 autocorrelated."""
    return autoregression(heavy(rng, (runs, blocks)), 0.3)
