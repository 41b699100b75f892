"""Put hardware samples and windows on one clock, and count each window's bytes. Pure.

Windows are marked by events on the GPU's stream; samples carry host times. Copies of known size
are marked by events too and show up in the samples:

- clock offset: the distance between a copy's middle by events and by samples;
- precision of the offset: how much it differs between copies;
- trust in the counters: bytes counted over bytes copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nwor_bench.instruments.pm_sampling import PmSamples

SEARCH_NS = 3_000_000
"""A copy is searched for within this distance of its time by the host's clock."""

COVERED = 0.999
"""A window counts only if samples cover at least this share of it."""

READ = "dram_read_bytes"


@dataclass(frozen=True)
class ClockMatch:
    """Offset between the events' clock and the samples' clock.

    Attributes:
        offset_ns: the samples' time of the events' zero.
        spread_ns: half the largest difference between two copies' offsets.
        copy_ratio: bytes counted for all copies, over the bytes that they read.
        copies: number of copies found.
    """

    offset_ns: int
    spread_ns: float
    copy_ratio: float
    copies: int


def match_clocks(
    samples: PmSamples, copies: Sequence[tuple[float, float]], copy_bytes: int, guess_ns: int
) -> ClockMatch | None:
    """Find the copies in the samples; None if no copy is found.

    Args:
        samples: the samples.
        copies: start and end of each copy in ns since the events' zero.
        copy_bytes: bytes that each copy reads.
        guess_ns: the events' zero on the samples' clock, to within SEARCH_NS.
    """
    if not len(samples.start_ns):
        return None
    base = int(samples.start_ns[0])
    middles = (samples.start_ns - base + (samples.end_ns - base)) / 2
    read = samples.values[:, samples.names.index(READ)]
    offsets, counted = [], 0.0
    for start, end in copies:
        about = guess_ns - base + (start + end) / 2
        near = np.abs(middles - about) <= SEARCH_NS + (end - start) / 2
        total = float(read[near].sum())
        if total < copy_bytes / 2:
            continue
        centre = float((read[near] * middles[near]).sum()) / total
        offsets.append(centre - (start + end) / 2)
        counted += total
    if not offsets:
        return None
    return ClockMatch(
        offset_ns=base + round(float(np.median(offsets))),
        spread_ns=(max(offsets) - min(offsets)) / 2,
        copy_ratio=counted / (copy_bytes * len(offsets)),
        copies=len(offsets),
    )


def counted_between(
    samples: PmSamples, offset_ns: int, starts_ns: Sequence[float], ends_ns: Sequence[float]
) -> NDArray[np.float64]:
    """Counts in each interval, [intervals, metrics]; NaN if samples are missing.

    Times are ns since the events' zero, which is `offset_ns` on the samples' clock. A sample that
    crosses an interval's border is divided in proportion to time.
    """
    count = len(starts_ns)
    if not len(samples.start_ns) or not count:
        return np.full((count, len(samples.names)), np.nan)
    base = int(samples.start_ns[0])
    shift = float(offset_ns - base)
    starts = np.asarray(starts_ns, dtype=np.float64) + shift
    ends = np.asarray(ends_ns, dtype=np.float64) + shift
    # Cumulative counts at both ends of every sample: they rise within a sample, not between two.
    borders = (
        np.column_stack([samples.start_ns - base, samples.end_ns - base]).ravel().astype(float)
    )
    lengths = (samples.end_ns - samples.start_ns).astype(np.float64)
    rising = np.column_stack([lengths, samples.values])
    before = np.vstack([np.zeros(rising.shape[1]), np.cumsum(rising, axis=0)])
    level = np.repeat(before, 2, axis=0)[1:-1]
    found = np.column_stack(
        [
            np.interp(ends, borders, column) - np.interp(starts, borders, column)
            for column in level.T
        ]
    )
    missing = found[:, 0] < COVERED * (ends - starts)
    result: NDArray[np.float64] = found[:, 1:]
    result[missing] = np.nan
    return result
