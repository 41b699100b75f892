"""Put hardware samples and windows on one clock, and say what each window moved. Pure.

Windows are marked by events on the GPU's stream, samples carry times of the host's clock. Copies
of known size, marked the same way, show up in the samples: what lies between the two middles of a
copy is the offset of the clocks, what differs from copy to copy how well it is known, and the
bytes counted over the bytes copied whether the counters can be trusted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nwor_bench.instruments.pm_sampling import PmSamples

SEARCH_NS = 3_000_000
"""How far from where the host's clock puts it a copy is looked for."""

COVERED = 0.999
"""A window counts only if samples cover at least this part of it."""

READ = "dram_read_bytes"


@dataclass(frozen=True)
class ClockMatch:
    """How the events' clock lies on the samples'.

    Attributes:
        offset_ns: the samples' time of the events' zero.
        spread_ns: half the distance between the copies that differ most.
        copy_ratio: bytes read by all copies as counted, over the bytes that they are.
        copies: how many were found.
    """

    offset_ns: int
    spread_ns: float
    copy_ratio: float
    copies: int


def match_clocks(
    samples: PmSamples, copies: Sequence[tuple[float, float]], copy_bytes: int, guess_ns: int
) -> ClockMatch | None:
    """Find the copies among the samples; None if none of them shows.

    Args:
        samples: what was counted.
        copies: start and end of each copy in ns since the events' zero.
        copy_bytes: bytes that each of them reads.
        guess_ns: about where the events' zero lies on the samples' clock (within SEARCH_NS).
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
    """What was counted in each interval: [intervals, metrics]; NaN where samples are missing.

    Times are ns since the events' zero, which lies at `offset_ns` on the samples' clock. A sample
    that an interval's border cuts is shared in proportion to the time on either side.
    """
    count = len(starts_ns)
    if not len(samples.start_ns) or not count:
        return np.full((count, len(samples.names)), np.nan)
    base = int(samples.start_ns[0])
    shift = float(offset_ns - base)
    starts = np.asarray(starts_ns, dtype=np.float64) + shift
    ends = np.asarray(ends_ns, dtype=np.float64) + shift
    # Both ends of every sample in turn: within one the count rises, between two it stays.
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
