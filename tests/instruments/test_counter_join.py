"""Samples and windows on one clock: against sums made sample by sample, on random traffic."""

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from nwor_bench.instruments.pm_sampling import PmSamples, counted_between, match_clocks

BASE = 1_795_256_057_766_808_452  # nanoseconds of CLOCK_REALTIME do not fit into a float64
SAMPLE = 50_000
NAMES = ("dram_read_bytes", "dram_write_bytes")


def samples_of(values: np.ndarray, missing: slice | None = None) -> PmSamples:
    starts = BASE + SAMPLE * np.arange(len(values), dtype=np.int64)
    ends = starts + SAMPLE
    if missing is not None:
        keep = np.ones(len(values), dtype=bool)
        keep[missing] = False
        starts, ends, values = starts[keep], ends[keep], values[keep]
    return PmSamples(starts, ends, values, NAMES)


def slowly(samples: PmSamples, start: int, end: int) -> list[float]:
    """Share by share, in Python's whole numbers."""
    total = [0.0, 0.0]
    for s, e, row in zip(samples.start_ns, samples.end_ns, samples.values, strict=True):
        part = max(0, min(int(e), end) - max(int(s), start)) / (int(e) - int(s))
        total = [t + part * float(v) for t, v in zip(total, row, strict=True)]
    return total


@examples(40)
@given(st.integers(0, 2**31), st.lists(st.integers(0, 90 * SAMPLE), min_size=2, max_size=8))
def test_every_window_gets_its_share(seed: int, borders: list[int]) -> None:
    samples = samples_of(np.random.default_rng(seed).uniform(1, 1e6, (100, 2)))
    times = sorted(borders)
    offset = BASE + 5 * SAMPLE + 12_345
    found = counted_between(samples, offset, times[:-1], times[1:])
    for row, start, end in zip(found, times[:-1], times[1:], strict=True):
        wanted = slowly(samples, offset + start, offset + end)
        assert row == pytest.approx(wanted, rel=1e-6, abs=1.0)


def test_a_window_with_missing_samples_is_not_a_number() -> None:
    samples = samples_of(np.full((100, 2), 7.0), missing=slice(40, 45))
    starts = [10.0 * SAMPLE, 39.0 * SAMPLE, 60.0 * SAMPLE, 98.0 * SAMPLE]
    found = counted_between(samples, BASE, starts, [s + 10 * SAMPLE for s in starts])
    assert np.isnan(found[[1, 3]]).all()
    assert found[[0, 2]] == pytest.approx(np.full((2, 2), 70.0))


def test_without_samples_nothing_is_counted() -> None:
    nothing = samples_of(np.empty((0, 2)))
    assert np.isnan(counted_between(nothing, BASE, [0.0], [1.0])).all()
    assert match_clocks(nothing, [(0.0, 1.0)], 100, BASE) is None


def traffic_with_copies(
    copies: list[tuple[int, int]], size: float, count: int = 2000
) -> np.ndarray:
    values = np.zeros((count, 2))
    edges = SAMPLE * np.arange(count + 1)
    for start, end in copies:
        inside = np.clip(np.minimum(edges[1:], end) - np.maximum(edges[:-1], start), 0, None)
        values[:, 0] += size * inside / (end - start)
    return values


@examples(30)
@given(
    offset=st.integers(-1_000_000, 1_000_000),
    jitter=st.lists(st.integers(0, 900_000), min_size=3, max_size=6),
)
def test_the_offset_is_found_to_a_sample(offset: int, jitter: list[int]) -> None:
    copies = [(10_000_000 * (i + 1) + j, 10_000_000 * (i + 1) + j + 420_000)
              for i, j in enumerate(jitter)]  # fmt: skip
    samples = samples_of(traffic_with_copies(copies, 2.7e8))
    events = [(start - offset, end - offset) for start, end in copies]
    match = match_clocks(samples, [tuple(map(float, e)) for e in events], int(2.7e8), BASE)
    assert match is not None
    assert match.copies == len(copies)
    assert abs(match.offset_ns - BASE - offset) < SAMPLE / 4
    assert match.spread_ns < SAMPLE / 4
    assert match.copy_ratio == pytest.approx(1.0, abs=1e-6)


def test_counters_that_miss_a_tenth_are_told() -> None:
    copies = [(10_000_000, 10_500_000), (30_000_000, 30_500_000)]
    samples = samples_of(traffic_with_copies(copies, 0.9e8))
    match = match_clocks(samples, [(1e7, 1.05e7), (3e7, 3.05e7)], int(1e8), BASE)
    assert match is not None
    assert match.copy_ratio == pytest.approx(0.9, abs=1e-6)


def test_copies_that_do_not_show_are_no_match() -> None:
    samples = samples_of(np.zeros((500, 2)))
    assert match_clocks(samples, [(1e6, 1.5e6)], int(1e8), BASE) is None
