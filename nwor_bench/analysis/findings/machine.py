"""Findings about the machine: was it steady, its own, and cool? Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean, median

from scipy.stats import median_abs_deviation

from nwor_bench.analysis.findings.finding import (
    HOST_REMEDY,
    Finding,
    FindingKind,
    Severity,
)
from nwor_bench.analysis.invariants import full_windows, windows_by_batch
from nwor_bench.analysis.trend import trend
from nwor_bench.instruments.conditions import throttle_names
from nwor_bench.records.engine_status import EngineStatus
from nwor_bench.records.environment import Environment, MemoryFacts
from nwor_bench.records.header import WarmupFacts
from nwor_bench.records.lines import batch_key
from nwor_bench.records.store import RunData
from nwor_bench.records.types import BatchRecord, Phase

BUSY = 0.05
"""Share of the processors' time that others may take before it is said."""

CLOCK_CHANGE = 0.02
"""Lowest below highest clock, as a share."""

LOW_MEMORY = 0.05
"""Memory available over memory in the machine."""

HOST_SCATTER = 0.03
HOST_OVER_GPU = 3.0
"""The host is said to set the pace where windows scatter by more than the first, and by more than
the second times what the forward pass in them does on the GPU. Seen on H200s: windows 4 to 20 %,
forward passes 1 to 4 %."""

_TIMED = (Phase.TIMED, Phase.INTERLEAVED)

PACED_WINDOWS = 16
"""Fewest windows from which a scatter is told."""


def machine_findings(run: RunData) -> Iterator[Finding]:
    """Warm-up, drift, and what the batches' conditions tell."""
    yield from _time(run)
    yield from _pace(run)
    yield from _launches(run)
    timed = [batch for batch in run.batches if batch.phase in _TIMED and batch.conditions]
    if timed:
        yield from _gpu(timed)
        yield from _host(run, timed)


def _time(run: RunData) -> Iterator[Finding]:
    """Was the machine steady before and while blocks were timed?"""
    unsteady = (run.header.warmup or WarmupFacts()).not_steady
    if unsteady:
        yield Finding(
            FindingKind.WARMUP,
            Severity.WARNING,
            f"Window times were not steady when warm-up ended: {unsteady}.",
            "Write a larger --max-warmup, or look for what else runs on the machine.",
        )
    means = _baseline_means(run)
    drift = trend(means)
    if drift.matters:
        yield Finding(
            FindingKind.TREND,
            Severity.WARNING,
            f"Window times of off x off drifted by {100 * drift.drift:+.1f} % over "
            f"{len(means)} blocks (Mann-Kendall p = {drift.p_value:.3f}).",
            "Ratios bear it, since every block holds all cells; absolute times do not. Warm up "
            "longer (--warmup), and fix the clocks if you may.",
        )


def _pace(run: RunData) -> Iterator[Finding]:
    """Is it the host that windows wait for? From the batches that time phases on the device."""
    probed = [b for b in run.batches if b.phase == Phase.PROBE and b.cell.is_baseline]
    windows = full_windows(probed, windows_by_batch(run))
    pairs = [(w.wall_ms, w.forward_ms) for w in windows if w.wall_ms and w.forward_ms]
    if len(pairs) < PACED_WINDOWS:
        return
    (wall, wall_scatter), (forward, forward_scatter) = (
        (median(times), median_abs_deviation(times, scale="normal") / median(times))
        for times in zip(*pairs, strict=True)
    )
    if wall_scatter > max(HOST_SCATTER, HOST_OVER_GPU * forward_scatter):
        yield Finding(
            FindingKind.HOST_PACE,
            Severity.WARNING,
            f"The host sets the pace: a window took {wall:.2f} ms and scattered by "
            f"{100 * wall_scatter:.0f} %, the forward pass in it took the GPU {forward:.2f} ms and "
            f"scattered by {100 * forward_scatter:.1f} %.",
            HOST_REMEDY,
        )


def _baseline_means(run: RunData) -> list[float]:
    """Mean window time of off x off in each timed block, in ms.

    Where cells take turns those batches alone count: only the first blocks have whole ones too.
    """
    interleaved = {batch_key(b) for b in run.batches if b.phase == Phase.INTERLEAVED}
    blocks = {batch.block for batch in run.batches if batch.phase in _TIMED}
    times: dict[int, list[float]] = defaultdict(list)
    for window in run.windows:
        counts = not interleaved or batch_key(window) in interleaved
        if counts and window.cell.is_baseline and window.wall_ms is not None:
            times[window.block].append(window.wall_ms)
    return [fmean(times[block]) for block in sorted(blocks & times.keys())]


def _launches(run: RunData) -> Iterator[Finding]:
    """Were commits and masks launched in the slower way?"""
    refused = (run.header.engine or EngineStatus()).launch_refusals
    if refused:
        why = ", ".join(f"{reason} ({number})" for reason, number in sorted(refused.items()))
        yield Finding(
            FindingKind.LAUNCHES,
            Severity.NOTE,
            f"Triton launched kernels that the driver launches directly elsewhere: {why}.",
            "It costs the host some microseconds a window; vLLM's own Triton and a driver of CUDA "
            "12.4 or later are known to do.",
        )


def _gpu(timed: Sequence[BatchRecord]) -> Iterator[Finding]:
    reasons = Counter(
        name for b in timed for name in throttle_names(b.conditions.get("gpu_throttle_reasons"))
    )
    held = sum(b.conditions.get("gpu_throttled_ms", 0.0) for b in timed)
    if reasons or held > 0:
        listed = ", ".join(f"{name} in {count}" for name, count in reasons.most_common())
        yield Finding(
            FindingKind.THROTTLING,
            Severity.WARNING,
            f"The GPU throttled in timed batches: {listed or 'power or temperature'} of "
            f"{len(timed)} batches, {held:.0f} ms held down.",
            "Cool it, raise the power limit, or lock lower clocks that it can hold.",
        )
    clocks = _values(timed, "gpu_sm_clock_mhz")
    if clocks and min(clocks) < (1 - CLOCK_CHANGE) * max(clocks):
        yield Finding(
            FindingKind.CLOCKS,
            Severity.WARNING,
            f"The GPU's SM clock ran from {min(clocks):.0f} to {max(clocks):.0f} MHz in timed "
            "batches.",
            "Lock the clocks (nvidia-smi --lock-gpu-clocks) if you may; else add blocks.",
        )
    others = _values(timed, "gpu_other_processes")
    if others and max(others) > 0:
        yield Finding(
            FindingKind.GPU_SHARED,
            Severity.WARNING,
            f"Up to {max(others):.0f} other processes were on the GPU in "
            f"{sum(other > 0 for other in others)} of {len(timed)} timed batches.",
            "Measure on a GPU of your own.",
        )


def _host(run: RunData, timed: Sequence[BatchRecord]) -> Iterator[Finding]:
    for name, kind, words, remedy in (
        ("cpu_other", FindingKind.CPU_BUSY, "Other processes used", "Stop what else runs here."),
        ("cpu_steal", FindingKind.CPU_STEAL, "The hypervisor took",
         "Measure on a machine that is not shared, or at another time."),
    ):  # fmt: skip
        shares = _values(timed, name)
        busy = [share for share in shares if share > BUSY]
        if busy:
            yield Finding(
                kind,
                Severity.WARNING if len(busy) > len(shares) / 10 else Severity.NOTE,
                f"{words} up to {_percent(max(busy))} of the processors' time, more than "
                f"{_percent(BUSY)} in {len(busy)} of {len(shares)} timed batches.",
                remedy,
            )
    faults = sum(_values(timed, "major_faults"))
    swapped = sum(_values(timed, "swapped_in_bytes"))
    memory = (run.header.environment or Environment()).memory or MemoryFacts()
    total = memory.total_bytes
    free = min(_values(timed, "memory_available_bytes"), default=None)
    low = total is not None and free is not None and free < LOW_MEMORY * total
    if swapped or faults > len(timed) or low:
        least = f", {free / 1e9:.1f} GB free at the least" if free is not None else ""
        yield Finding(
            FindingKind.MEMORY_PRESSURE,
            Severity.WARNING,
            f"Memory ran short in timed batches: {faults:.0f} pages read from disk, "
            f"{swapped / 1e6:.1f} MB swapped in{least}.",
            "Free memory, or write a smaller kv_cache_gib or fewer --requests.",
        )


def _values(batches: Sequence[BatchRecord], name: str) -> list[float]:
    return [batch.conditions[name] for batch in batches if name in batch.conditions]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
