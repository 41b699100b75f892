"""Samples from a stand-in for cupti-python, and one message for everything that can be missing."""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
from refusals import refused

from nwor_bench.errors import ExitCode
from nwor_bench.instruments import pm_sampling
from nwor_bench.instruments.pm_sampling import CountersUnavailable, PmSampler, check_counters


@dataclass
class Sample:
    start_timestamp: int
    end_timestamp: int
    metric_values: list[float]


@dataclass
class Collector:
    """What cupti-python's does, as seen on an H200."""

    refuses: ClassVar[tuple[str, ...]] = ()
    enable_error: ClassVar[Exception | None] = None
    made: ClassVar[list["Collector"]] = []
    device: int = 0
    metrics: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        Collector.made.append(self)

    def enable(self) -> None:
        if self.enable_error is not None:
            raise self.enable_error
        self.log.append("enable")

    def configure(self, *, metrics: list[str], sampling_interval: int) -> None:
        if set(metrics) & set(self.refuses):
            raise ValueError("cannot be collected in a single pass")
        self.metrics = metrics

    def start(self) -> None:
        self.log.append("start")

    def stop(self) -> None:
        self.log.append("stop")

    def disable(self) -> None:
        self.log.append("disable")

    def decode(self, room: int) -> list[Sample]:
        self.log.append(f"decode {room}")
        values = [float(n + 1) for n in range(len(self.metrics))]
        first = Sample(5, 10_000, [9e9] * len(self.metrics))
        return [first, *(Sample(10_000 * i, 10_000 * (i + 1), values) for i in (1, 2, 3))]


@pytest.fixture
def cupti(monkeypatch: pytest.MonkeyPatch) -> type[Collector]:
    package, module = ModuleType("cupti"), ModuleType("cupti.pm_sampling")
    module.Collector = Collector  # type: ignore[attr-defined]
    package.pm_sampling = module  # type: ignore[attr-defined]
    now = lambda: time.clock_gettime_ns(time.CLOCK_REALTIME)  # noqa: E731
    package.cupti = SimpleNamespace(get_timestamp=now)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupti", package)
    monkeypatch.setitem(sys.modules, "cupti.pm_sampling", module)
    monkeypatch.setattr(pm_sampling, "version", lambda name: "13.4.0")
    monkeypatch.setattr(Collector, "refuses", ())
    monkeypatch.setattr(Collector, "enable_error", None)
    monkeypatch.setattr(Collector, "made", [])
    return Collector


def test_the_sample_that_reaches_back_is_dropped(cupti: type[Collector]) -> None:
    sampler = PmSampler(interval_ns=10_000)
    sampler.start()
    samples = sampler.stop(0.001)
    assert samples.names == ("dram_read_bytes", "dram_write_bytes")
    assert samples.start_ns.tolist() == [10_000, 20_000, 30_000]
    assert samples.end_ns.tolist() == [20_000, 30_000, 40_000]
    assert samples.values.tolist() == [[1.0, 2.0]] * 3
    sampler.close()
    assert cupti.made[0].log == ["enable", "start", "stop", "decode 1110", "disable"]


def test_a_batch_too_long_for_one_decode_is_refused(cupti: type[Collector]) -> None:
    sampler = PmSampler()
    sampler.start()
    with refused("--counters dram", CountersUnavailable, naming="--max-new-tokens"):
        sampler.stop(60.0)


def test_a_clock_that_another_profiler_left_is_found_out(
    cupti: type[Collector], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on an H200: after PyTorch's profiler CUPTI tells the processor's cycles."""
    cycles = SimpleNamespace(get_timestamp=lambda: 218_000_000_000)
    monkeypatch.setattr(sys.modules["cupti"], "cupti", cycles)
    with refused("--counters dram", CountersUnavailable, naming="PyTorch's profiler"):
        PmSampler()
    assert cupti.made[0].log == ["enable", "disable"]


def message(has_gpu: bool = True) -> str:
    with pytest.raises(CountersUnavailable) as refusal:
        check_counters(lambda: has_gpu)
    assert refusal.value.exit_code is ExitCode.BAD_USAGE
    text = str(refusal.value)
    assert text.startswith("--counters dram: ")
    assert "\n" not in text
    return text


def test_counters_that_work_are_let_go(cupti: type[Collector]) -> None:
    check_counters(lambda: True)
    assert cupti.made[0].log == ["enable", "disable"]


def test_each_obstacle_has_its_remedy(
    cupti: type[Collector], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no CUDA device" in message(has_gpu=False)
    cupti.enable_error = PermissionError("Insufficient privileges")
    assert "NVreg_RestrictProfilingToAdminUsers=0" in message()
    cupti.enable_error = RuntimeError("could not load nvperf")
    assert "LD_LIBRARY_PATH" in message()
    cupti.enable_error = OSError("odd")
    assert "odd" in message()
    monkeypatch.setattr(pm_sampling, "version", lambda name: "13.3.9")
    assert "13.3.9 is too old, 13.4 is needed" in message()


def test_a_gpu_without_dram_counters_points_to_ncu(cupti: type[Collector]) -> None:
    cupti.refuses = ("dram__bytes_read.sum",)
    with refused("--counters dram", CountersUnavailable, naming="profile ncu"):
        PmSampler()
    assert cupti.made[0].log == ["enable", "disable"]


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise pm_sampling.PackageNotFoundError(name)

    monkeypatch.setattr(pm_sampling, "version", missing)
    assert "pip install 'nwor-bench[counters]'" in message()
    assert "no CUDA device" in message(has_gpu=False)  # installing it would not help there


def test_a_package_that_does_not_load_says_why(
    cupti: type[Collector], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupti", ModuleType("cupti"))
    monkeypatch.delitem(sys.modules, "cupti.pm_sampling")
    assert "does not load" in message()


def test_the_library_beside_the_package_comes_first_in_the_path_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """test_counters_wanted.py starts the process again with this environment."""
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcupti.so.13").touch()
    (tmp_path / "cupti").mkdir()
    (tmp_path / "cupti" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert pm_sampling.cupti_folder() == folder
    environ = pm_sampling.cupti_environment({"LD_LIBRARY_PATH": "/before"}, folder)
    assert environ is not None
    assert environ["LD_LIBRARY_PATH"] == f"{folder}:/before"
    assert pm_sampling.cupti_environment(environ, folder) is None
    assert pm_sampling.cupti_environment({"LD_LIBRARY_PATH": str(folder)}, folder) is None
    assert pm_sampling.cupti_environment({}, None) is None
