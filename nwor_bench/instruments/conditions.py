"""State of the machine during a batch: clocks, throttling, other processes, memory pressure.

`ConditionMonitor` reads before and after a batch, never during it, because a sampling thread would
be load itself. Counters are differences over the batch; gauges are values at its end. A value that
the machine does not report is left out, never 0.

Names in a batch's `conditions`:

- `cpu_other`: share of CPU time used by other processes; those that this one started are its own
- `cpu_steal`: share of CPU time taken by the hypervisor (psutil.cpu_times, Linux)
- `major_faults`: pages that this process read from disk
- `swapped_in_bytes`: bytes swapped in by the whole machine
- `memory_available_bytes`: gauge
- `gpu_sm_clock_mhz`, `gpu_memory_clock_mhz`: lowest over the GPUs in use, gauges
- `gpu_temperature_c`: highest over the GPUs in use, gauge
- `gpu_throttle_reasons`: NVML's bits of all GPUs in use, gauge; see `throttle_names`
- `gpu_throttled_ms`: time in which power or temperature lowered the clocks
- `gpu_other_processes`: other processes on these GPUs, gauge; likewise
"""

import resource
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import psutil

from nwor_bench.instruments.device import visible_handles

THROTTLE_BITS = {
    0x0000000000000004: "software power cap",
    0x0000000000000008: "hardware slowdown",
    0x0000000000000010: "synchronised clocks",
    0x0000000000000020: "software thermal slowdown",
    0x0000000000000040: "hardware thermal slowdown",
    0x0000000000000080: "hardware power brake",
}
"""NVML's clocks event reasons (nvml.h, nvmlClocksEventReason*) that lower the clocks. Idle (1),
application clocks (2) and display clocks (256) do not count."""

Conditions = dict[str, float]


@dataclass(frozen=True)
class _Reading:
    """Counters and gauges at one moment."""

    counters: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)


class ConditionMonitor:
    """Reads the machine before and after batches.

    Args:
        gpus: True to read the GPUs in CUDA_VISIBLE_DEVICES too, through NVML.
    """

    def __init__(self, gpus: bool = False):
        self._gpus = _open_gpus() if gpus else None
        self._before = self._read()

    def begin(self) -> None:
        """Read the machine; call it before a batch."""
        self._before = self._read()

    def end(self) -> Conditions:
        """Conditions since `begin`; call it after the batch."""
        after = self._read()
        since = {
            name: value - self._before.counters[name]
            for name, value in after.counters.items()
            if name in self._before.counters
        }
        shares = _processor_shares(since)
        for name in ("major_faults", "swapped_in_bytes", "gpu_throttled_ms"):
            if name in since:
                shares[name] = since[name]
        return {name: round(value, 4) for name, value in {**shares, **after.gauges}.items()}

    def _read(self) -> _Reading:
        family = _family()
        counters, gauges = _read_host(family)
        if self._gpus is not None:
            more_counters, more_gauges = self._gpus.read({process.pid for process in family})
            counters |= more_counters
            gauges |= more_gauges
        return _Reading(counters, gauges)


def throttle_names(bits: float | None) -> list[str]:
    """The reasons that lower the clocks, in words; empty if none does."""
    return [name for bit, name in THROTTLE_BITS.items() if int(bits or 0) & bit]


def _read_host(family: Sequence[psutil.Process]) -> tuple[dict[str, float], dict[str, float]]:
    all_cpus = psutil.cpu_times()
    idle = all_cpus.idle + getattr(all_cpus, "iowait", 0.0)
    steal = getattr(all_cpus, "steal", 0.0)
    # user and nice already include guest time (man 5 proc).
    total = all_cpus.user + all_cpus.system + idle + steal
    total += sum(getattr(all_cpus, name, 0.0) for name in ("nice", "irq", "softirq"))
    counters = {
        "cpu_total": total,
        "cpu_idle": idle,
        "steal": steal,
        "cpu_own": _cpu_seconds(family),
        "major_faults": float(resource.getrusage(resource.RUSAGE_SELF).ru_majflt),
    }
    swapped = getattr(psutil.swap_memory(), "sin", None)
    if swapped is not None:
        counters["swapped_in_bytes"] = float(swapped)
    gauges = {"memory_available_bytes": float(psutil.virtual_memory().available)}
    return counters, gauges


def _family() -> list[psutil.Process]:
    """Our process and all that it has started, directly or not."""
    this = psutil.Process()
    return [this, *this.children(recursive=True)]


def _cpu_seconds(family: Sequence[psutil.Process]) -> float:
    """CPU time of those that still run."""
    seconds = 0.0
    for process in family:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        seconds += times.user + times.system
    return seconds


def _processor_shares(since: Mapping[str, float]) -> Conditions:
    """Shares of CPU time; empty if the batch is too short for the clock's resolution."""
    total = since["cpu_total"]
    if total <= 0.1:
        return {}
    other = total - since["cpu_idle"] - since["steal"] - since["cpu_own"]
    return {"cpu_other": max(0.0, other / total), "cpu_steal": max(0.0, since["steal"] / total)}


class _Gpus:
    """The GPUs that this process uses, through NVML."""

    def __init__(self, nvml: Any, handles: list[Any]):
        self._nvml = nvml
        self._handles = handles

    def read(self, our_ids: Set[int]) -> tuple[dict[str, float], dict[str, float]]:
        """Counters and gauges; values that a GPU does not support are left out."""
        nvml = self._nvml
        sm = self._ask_all("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM)
        memory = self._ask_all("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM)
        temperature = self._ask_all("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)
        reasons = self._ask_all("nvmlDeviceGetCurrentClocksEventReasons")
        gauges: dict[str, float] = {}
        for name, values, pick in (
            ("gpu_sm_clock_mhz", sm, min),
            ("gpu_memory_clock_mhz", memory, min),
            ("gpu_temperature_c", temperature, max),
        ):
            if values:
                gauges[name] = float(pick(values))
        if reasons:
            bits = 0
            for reason in reasons:
                bits |= int(reason)
            gauges["gpu_throttle_reasons"] = float(bits)
        others = [self._others(handle, our_ids) for handle in self._handles]
        if others and None not in others:
            gauges["gpu_other_processes"] = float(sum(n for n in others if n is not None))
        return self._throttled(), gauges

    def _ask_all(self, name: str, *arguments: Any) -> list[Any]:
        answers = [self._ask(name, handle, *arguments) for handle in self._handles]
        return [answer for answer in answers if answer is not None]

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Result of one NVML query; None if this GPU does not support it."""
        try:
            return getattr(self._nvml, name)(*arguments)
        except self._nvml.NVMLError:
            return None

    def _throttled(self) -> dict[str, float]:
        policies = (self._nvml.NVML_PERF_POLICY_POWER, self._nvml.NVML_PERF_POLICY_THERMAL)
        answers = [a for p in policies for a in self._ask_all("nvmlDeviceGetViolationStatus", p)]
        if not answers:
            return {}
        return {"gpu_throttled_ms": sum(answer.violationTime for answer in answers) / 1e6}

    def _others(self, handle: Any, our_ids: Set[int]) -> int | None:
        """Number of other processes that compute on this GPU.

        In a container NVML may list host process ids. If none of ours is among them, one of the
        listed processes is taken to be ours.
        """
        running = self._ask("nvmlDeviceGetComputeRunningProcesses", handle)
        if running is None:
            return None
        others = sum(process.pid not in our_ids for process in running)
        return max(0, others - 1) if others == len(running) else others


def _open_gpus() -> _Gpus | None:
    """The GPUs in use; None without NVML."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return _Gpus(pynvml, visible_handles(pynvml))
    except pynvml.NVMLError:
        return None
