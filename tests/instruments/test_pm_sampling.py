"""CUPTI's samples: from a stand-in, joined to windows by hand, and from a real GPU."""

import sys
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from nwor_bench.errors import ConfigError, ExitCode
from nwor_bench.instruments import pm_sampling
from nwor_bench.instruments.pm_sampling import (
    PmSampler,
    PmSamples,
    check_counters,
    counted_between,
    match_clocks,
)


class Collector:
    """cupti-python's, as seen on an H200."""

    refuses: ClassVar[tuple[str, ...]] = ()
    enable_error: ClassVar[Exception | None] = None
    log: ClassVar[list[str]] = []

    def __init__(self, device: int) -> None:
        self.log.clear()

    def enable(self) -> None:
        if self.enable_error is not None:
            raise self.enable_error
        self.log.append("enable")

    def configure(self, *, metrics: list[str], sampling_interval: int) -> None:
        if set(metrics) & set(self.refuses):
            raise ValueError("cannot be collected in a single pass")

    def __getattr__(self, name: str) -> Any:
        return lambda: self.log.append(name)

    def decode(self, room: int) -> list[Any]:
        self.log.append(f"decode {room}")
        samples = [(5, 10_000, [9e9, 9e9])]
        samples += [(10_000 * i, 10_000 * (i + 1), [1.0, 2.0]) for i in (1, 2, 3)]
        names = ("start_timestamp", "end_timestamp", "metric_values")
        return [SimpleNamespace(**dict(zip(names, each, strict=True))) for each in samples]


@pytest.fixture
def cupti(monkeypatch: pytest.MonkeyPatch) -> type[Collector]:
    package: Any = ModuleType("cupti")
    package.pm_sampling = SimpleNamespace(Collector=Collector)
    clock = lambda: time.clock_gettime_ns(time.CLOCK_REALTIME)  # noqa: E731
    package.cupti = SimpleNamespace(get_timestamp=clock)
    monkeypatch.setitem(sys.modules, "cupti", package)
    monkeypatch.setattr(pm_sampling, "version", lambda name: "13.4.0")
    monkeypatch.setattr(Collector, "refuses", ())
    monkeypatch.setattr(Collector, "enable_error", None)
    return Collector


def test_the_sample_that_reaches_back_is_dropped(cupti: type[Collector]) -> None:
    sampler = PmSampler(interval_ns=10_000)
    sampler.start()
    samples = sampler.stop(0.001)
    assert samples.start_ns.tolist() == [10_000, 20_000, 30_000]
    assert samples.end_ns.tolist() == [20_000, 30_000, 40_000]
    assert samples.values.tolist() == [[1.0, 2.0]] * 3
    sampler.close()
    assert cupti.log == ["enable", "start", "stop", "decode 1110", "disable"]


def test_a_batch_too_long_for_one_decode_is_refused(cupti: type[Collector]) -> None:
    sampler = PmSampler()
    with refused("--counters dram", naming="at most 18 s") as refusal:
        sampler.stop(60.0)
    assert "--max-new-tokens" in str(refusal.value)


def test_a_sampler_that_cannot_sample_lets_go(cupti: type[Collector]) -> None:
    """On an H200 CUPTI tells the processor's cycles after PyTorch's profiler."""
    cupti.refuses = ("dram__bytes_read.sum",)
    with refused("--counters dram", naming="profile ncu"):
        PmSampler()
    assert cupti.log == ["enable", "disable"]
    sys.modules["cupti"].cupti = SimpleNamespace(get_timestamp=lambda: 218_000_000_000)  # type: ignore[attr-defined]
    with refused("--counters dram", naming="PyTorch's profiler"):
        PmSampler()
    assert cupti.log == ["enable", "disable"]
    check_counters(lambda: True)
    assert cupti.log == ["enable", "disable"]


def test_each_obstacle_has_its_remedy(
    cupti: type[Collector], monkeypatch: pytest.MonkeyPatch
) -> None:
    def message(has_gpu: bool = True) -> str:
        with refused("--counters dram") as refusal:
            check_counters(lambda: has_gpu)
        assert refusal.value.exit_code is ExitCode.BAD_USAGE
        assert "\n" not in str(refusal.value)
        return str(refusal.value)

    assert "no CUDA device" in message(has_gpu=False)
    cupti.enable_error = PermissionError("Insufficient privileges")
    assert "NVreg_RestrictProfilingToAdminUsers=0" in message()
    cupti.enable_error = RuntimeError("could not load nvperf")
    assert "could not load nvperf" in message()
    assert "LD_LIBRARY_PATH" in message()
    monkeypatch.setitem(sys.modules, "cupti", ModuleType("cupti"))
    assert "does not load" in message()
    monkeypatch.setattr(pm_sampling, "version", lambda name: "13.3.9")
    assert "13.3.9 is too old, 13.4 is needed" in message()
    monkeypatch.setattr(pm_sampling, "version", Mock(side_effect=PackageNotFoundError("cupti")))
    assert "pip install 'nwor-bench[counters]'" in message()
    assert "no CUDA device" in message(has_gpu=False)  # installing it would not help there


def test_the_library_beside_the_package_comes_first_in_the_path_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """test_dram_runs.py starts the process again with this environment."""
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    for file in (folder / "libcupti.so.13", tmp_path / "cupti" / "__init__.py"):
        file.parent.mkdir(parents=True)
        file.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert pm_sampling.cupti_folder() == folder
    environ = pm_sampling.cupti_environment({"LD_LIBRARY_PATH": "/before"}, folder)
    assert environ is not None
    assert environ["LD_LIBRARY_PATH"] == f"{folder}:/before"
    assert pm_sampling.cupti_environment(environ, folder) is None
    assert pm_sampling.cupti_environment({"LD_LIBRARY_PATH": str(folder)}, folder) is None
    assert pm_sampling.cupti_environment({}, None) is None


# Samples and windows on one clock.

BASE = 1_795_256_057_766_808_452  # nanoseconds of CLOCK_REALTIME do not fit into a float64
SAMPLE = 50_000


def samples_of(values: np.ndarray, missing: slice = slice(0)) -> PmSamples:
    starts = BASE + SAMPLE * np.arange(len(values), dtype=np.int64)
    kept = np.delete(np.arange(len(values)), missing)
    return PmSamples(starts[kept], starts[kept] + SAMPLE, values[kept])


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
    nothing = samples_of(np.empty((0, 2)))
    assert np.isnan(counted_between(nothing, BASE, [0.0], [1.0])).all()
    assert match_clocks(nothing, [(0.0, 1.0)], 100, BASE) is None


def samples_of_copies(copies: list[tuple[int, int]], size: float) -> PmSamples:
    values = np.zeros((2000, 2))
    edges = SAMPLE * np.arange(2001)
    for start, end in copies:
        inside = np.clip(np.minimum(edges[1:], end) - np.maximum(edges[:-1], start), 0, None)
        values[:, 0] += size * inside / (end - start)
    return samples_of(values)


@examples(30)
@given(
    st.integers(-1_000_000, 1_000_000),
    st.lists(st.integers(0, 900_000), min_size=3, max_size=6),
    st.sampled_from([1.0, 0.9]),  # counters may miss a tenth
)
def test_the_offset_is_found_to_a_sample(offset: int, jitter: list[int], seen: float) -> None:
    starts = [10_000_000 * i + late for i, late in enumerate(jitter, start=1)]
    copies = [(start, start + 420_000) for start in starts]
    events = [(float(start - offset), float(end - offset)) for start, end in copies]
    match = match_clocks(samples_of_copies(copies, seen * 2.7e8), events, int(2.7e8), BASE)
    assert match is not None
    assert match.copies == len(copies)
    assert abs(match.offset_ns - BASE - offset) < SAMPLE / 4
    assert match.copy_ratio == pytest.approx(seen, abs=1e-6)


def test_copies_that_do_not_show_are_no_match() -> None:
    copies = [(10_000_000, 10_500_000)]
    for seen in (0.0, 0.49):
        samples = samples_of_copies(copies, seen * 1e8)
        assert match_clocks(samples, [(1e7, 1.05e7)], int(1e8), BASE) is None


@pytest.mark.gpu
def test_a_copy_on_a_gpu_reads_and_writes_its_own_bytes() -> None:
    from nwor_bench.plugin.observe.window_counters import COPY_BYTES, StreamSampler

    try:
        check_counters(lambda: True)
    except ConfigError as reason:
        pytest.skip(str(reason))
    sampler = StreamSampler(interval_ns=20_000)
    for _ in range(2):  # a second time: the first sample after a restart must not count
        sampler.start()
        began = time.perf_counter()
        anchor = sampler.anchor()
        marks = []
        for _ in range(4):
            time.sleep(0.01)
            start = sampler.mark()
            sampler.copy()
            marks.append((start, sampler.mark()))
            sampler.ns(marks[-1][1])
        time.sleep(0.01)
        samples = sampler.stop(time.perf_counter() - began)
        copies = [(sampler.ns(start), sampler.ns(end)) for start, end in marks]
        match = match_clocks(samples, copies, COPY_BYTES, anchor)
        assert match is not None
        assert match.copies == 4
        assert match.copy_ratio == pytest.approx(1.0, abs=0.01)
        around = [(start - 3e6, end + 3e6) for start, end in copies]
        found = counted_between(samples, match.offset_ns, *zip(*around, strict=True))
        assert found[:, 0] == pytest.approx(COPY_BYTES, rel=0.02)
        assert found[:, 1] == pytest.approx(COPY_BYTES, rel=0.3)  # L2 writes back when it likes
    sampler.close()
