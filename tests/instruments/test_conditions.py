"""What the machine did: counters as differences, gauges as they are, a stand-in for NVML."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from nwor_bench.instruments.conditions import (
    THROTTLE_BITS,
    ConditionMonitor,
    _cpu_seconds,
    _family,
    throttle_names,
)


class FakeNvml:
    """Two GPUs; the first is throttled for 5 ms more at every reading."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_PERF_POLICY_POWER, NVML_PERF_POLICY_THERMAL = 0, 1
    NVMLError = ArithmeticError

    def __init__(self, *pids: list[int], unsupported: Sequence[str] = ()):
        throttled = count(5_000_000, 5_000_000)
        processes = [[SimpleNamespace(pid=pid) for pid in own] for own in pids or ([], [])]
        answers = {
            "Init": lambda: None,
            "DeviceGetCount": lambda: 2,
            "DeviceGetHandleByIndex": lambda index: index,
            "DeviceGetUUID": lambda gpu: f"GPU-{gpu}aaa",
            "DeviceGetClockInfo": lambda gpu, kind: {1: 1980 - gpu, 2: 2619}[kind],
            "DeviceGetTemperature": lambda gpu, kind: 40 + gpu,
            "DeviceGetCurrentClocksEventReasons": lambda gpu: [0x1, 0x20][gpu],
            "DeviceGetViolationStatus": lambda gpu, policy: SimpleNamespace(
                violationTime=77_000_000 if gpu or policy else next(throttled)
            ),
            "DeviceGetComputeRunningProcesses": lambda gpu: processes[gpu],
        }
        for name, answer in answers.items():
            refuses = Mock(side_effect=self.NVMLError(name))
            setattr(self, f"nvml{name}", refuses if name in unsupported else answer)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(nvml: FakeNvml) -> ConditionMonitor:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return ConditionMonitor(gpus=True)

    return install


def test_the_host_is_read_without_a_gpu(use: Any) -> None:
    monitor = use(FakeNvml(unsupported=["Init"]))
    monitor.begin()
    assert "cpu_other" not in monitor.end()  # a batch of no time has no shares
    monitor.begin()
    ended = time.process_time() + 0.1  # a busy machine gives this process no time at once
    while time.process_time() < ended:
        pass
    found = monitor.end()
    assert 0 <= found["cpu_other"] < 1
    assert 0 <= found["cpu_steal"] < 1
    assert found["memory_available_bytes"] > 0
    assert found["major_faults"] >= 0
    assert not [name for name in found if name.startswith("gpu")]


def test_gpus_are_read_the_worst_of_them(use: Any) -> None:
    monitor = use(FakeNvml([os.getpid(), 5], [os.getpid()]))
    monitor.begin()
    found = monitor.end()
    assert (found["gpu_sm_clock_mhz"], found["gpu_memory_clock_mhz"]) == (1979, 2619)
    assert found["gpu_temperature_c"] == 41
    assert throttle_names(found["gpu_throttle_reasons"]) == ["software thermal slowdown"]
    assert found["gpu_throttled_ms"] == 5  # within the batch, not since the machine started
    assert found["gpu_other_processes"] == 1


@pytest.mark.slow
def test_processes_that_this_one_has_started_are_its_own(use: Any) -> None:
    busy = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    code = f"{busy}\nprint(flush=True)\ntime.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        monitor = use(FakeNvml([os.getpid(), child.pid], [child.pid, 5]))
        before = _cpu_seconds(_family())
        assert child.stdout is not None
        child.stdout.read(1)  # it has used its half second
        assert _cpu_seconds(_family()) - before > 0.4
        assert monitor.end()["gpu_other_processes"] == 1.0
    finally:
        child.kill()
        child.communicate()


def test_one_process_is_ours_if_our_number_is_not_known(use: Any) -> None:
    found = use(FakeNvml([4001], [4001, 4002])).end()
    assert found["gpu_other_processes"] == 1


def test_what_a_gpu_does_not_tell_is_left_out(use: Any) -> None:
    nvml = FakeNvml(unsupported=["DeviceGetViolationStatus", "DeviceGetTemperature",
                                 "DeviceGetComputeRunningProcesses"])  # fmt: skip
    found = use(nvml).end()
    assert {name for name in found if name.startswith("gpu")} == {
        "gpu_sm_clock_mhz", "gpu_memory_clock_mhz", "gpu_throttle_reasons",
    }  # fmt: skip


@pytest.mark.parametrize(("visible", "clock"), [("0", 1980), ("1", 1979), ("GPU-0", 1980)])
def test_only_visible_gpus_are_read(
    use: Any, monkeypatch: pytest.MonkeyPatch, visible: str, clock: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert use(FakeNvml()).end()["gpu_sm_clock_mhz"] == clock


def test_idle_and_wanted_clocks_are_no_throttling() -> None:
    assert throttle_names(None) == throttle_names(0x1 | 0x2 | 0x100) == []
    assert throttle_names(sum(THROTTLE_BITS)) == list(THROTTLE_BITS.values())


@pytest.mark.gpu
def test_a_real_gpu_answers() -> None:
    monitor = ConditionMonitor(gpus=True)
    monitor.begin()
    found = monitor.end()
    assert 100 < found["gpu_sm_clock_mhz"] < 5000
    assert 10 < found["gpu_temperature_c"] < 110
    assert "gpu_throttle_reasons" in found
