"""A stand-in for a GPU's counters and stream: time is the host's, traffic is made up and known."""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nwor_bench.instruments.pm_sampling import PmSamples

NAMES = ("dram_read_bytes", "dram_write_bytes")
SAMPLE_NS = 50_000
COPY_BYTES = 4_000_000
RATES = (0.02, 0.003)
"""Bytes read and written in a nanosecond while an engine's step is under way."""


@dataclass
class SimulatedGpu:
    """Sampler and timeline at once. `skew_ns` is what the two clocks differ by."""

    skew_ns: int = 137_000
    copy_bytes: int = COPY_BYTES
    counts_copies: float = 1.0
    names: tuple[str, ...] = NAMES
    interval_ns: int = SAMPLE_NS
    copies: list[tuple[int, int]] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    opened: int = 0
    closed: int = 0
    _began: int = 0
    _zero: int = 0
    _in_copy: bool = False

    # The sampler.

    def start(self) -> None:
        self.opened += 1
        self._began = time.time_ns()
        self.copies, self.marks = [], []

    def stop(self, seconds: float) -> PmSamples:
        assert seconds > 0
        starts = np.arange(self._began, time.time_ns(), SAMPLE_NS, dtype=np.int64)
        ends = starts + SAMPLE_NS
        values = np.zeros((len(starts), 2))
        for begin, end in self.copies:
            share = _overlap(starts, ends, begin, end) / (end - begin)
            values[:, 0] += share * COPY_BYTES * self.counts_copies
        steps = _steps(self.marks)
        if steps:
            inside = _overlap(starts, ends, steps[0], steps[-1])
            values += inside[:, None] * np.array(RATES)
        return PmSamples(starts + self.skew_ns, ends + self.skew_ns, values, self.names)

    def close(self) -> None:
        self.closed += 1

    # The timeline.

    def anchor(self) -> int:
        self._zero = time.time_ns()
        return self._zero

    def mark(self) -> int:
        now = time.time_ns()
        if not self._in_copy:
            self.marks.append(now)
        return now

    def ns(self, mark: Any) -> float:
        return float(mark - self._zero)

    def copy(self) -> None:
        begin = time.time_ns()
        time.sleep(0.001)
        self.copies.append((begin, time.time_ns()))


def _overlap(starts: np.ndarray, ends: np.ndarray, begin: int, end: int) -> np.ndarray:
    return np.clip(np.minimum(ends, end) - np.maximum(starts, begin), 0, None).astype(float)


def _steps(marks: list[int]) -> list[int]:
    """The marks of steps: copies before and after a batch are marked twice each."""
    return marks[6:-6]
