"""Findings about the machine: was it steady, its own, and cool? Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean

from nwor_bench.analysis.findings.table import Finding, FindingKind, Severity, found
from nwor_bench.instruments.conditions import throttle_names
from nwor_bench.records.facts import EngineStatus, Environment, MemoryFacts
from nwor_bench.records.header import WarmupFacts
from nwor_bench.records.lines import batch_key
from nwor_bench.records.store import RunData
from nwor_bench.records.types import BatchRecord, Phase
from nwor_bench.stats.trend import trend

BUSY = 0.05
"""Share of the processors' time that others may take without a finding."""

CLOCK_CHANGE = 0.02
"""Lowest below highest clock, as a share."""

LOW_MEMORY = 0.05
"""Memory available over memory in the machine."""

_TIMED = (Phase.TIMED, Phase.INTERLEAVED)


def machine_findings(run: RunData) -> Iterator[Finding]:
    """Warm-up, drift, the host, and the batches' conditions."""
    yield from _time(run)
    engine = run.header.engine or EngineStatus()
    if engine.cuda_graphs and engine.cuda_graphs.attention_untimed:
        yield found(FindingKind.ATTENTION, why=engine.cuda_graphs.attention_untimed)
    refused = engine.launch_refusals
    if refused:
        why = ", ".join(f"{reason} ({number})" for reason, number in sorted(refused.items()))
        yield found(FindingKind.LAUNCHES, why=why)
    timed = [batch for batch in run.batches if batch.phase in _TIMED and batch.conditions]
    if timed:
        yield from _gpu(timed)
        yield from _cpu(timed)
        yield from _memory(run, timed)


def _time(run: RunData) -> Iterator[Finding]:
    """Was the machine steady before and while blocks were timed?"""
    unsteady = (run.header.warmup or WarmupFacts()).not_steady
    if unsteady:
        yield found(FindingKind.WARMUP, why=unsteady)
    means = _baseline_means(run)
    drift = trend(means)
    if drift.matters:
        yield found(
            FindingKind.TREND, drift=100 * drift.drift, blocks=len(means), p_value=drift.p_value
        )


def _baseline_means(run: RunData) -> list[float]:
    """Mean window time of off x off in each timed block, in ms.

    If cells were interleaved, only those batches count: whole ones ran in the first blocks only.
    """
    interleaved = {batch_key(b) for b in run.batches if b.phase == Phase.INTERLEAVED}
    blocks = {batch.block for batch in run.batches if batch.phase in _TIMED}
    times: dict[int, list[float]] = defaultdict(list)
    for window in run.windows:
        counts = not interleaved or batch_key(window) in interleaved
        if counts and window.cell.is_baseline and window.wall_ms is not None:
            times[window.block].append(window.wall_ms)
    return [fmean(times[block]) for block in sorted(blocks & times.keys())]


def _gpu(timed: Sequence[BatchRecord]) -> Iterator[Finding]:
    reasons = Counter(
        name for b in timed for name in throttle_names(b.conditions.get("gpu_throttle_reasons"))
    )
    held = sum(b.conditions.get("gpu_throttled_ms", 0.0) for b in timed)
    if reasons or held > 0:
        listed = ", ".join(f"{name} in {count}" for name, count in reasons.most_common())
        listed = listed or "power or temperature"
        yield found(FindingKind.THROTTLING, reasons=listed, batches=len(timed), held=held)
    clocks = _values(timed, "gpu_sm_clock_mhz")
    if clocks and min(clocks) < (1 - CLOCK_CHANGE) * max(clocks):
        yield found(FindingKind.CLOCKS, low=min(clocks), high=max(clocks))
    others = _values(timed, "gpu_other_processes")
    if others and max(others) > 0:
        count = sum(other > 0 for other in others)
        yield found(FindingKind.GPU_SHARED, most=max(others), count=count, batches=len(timed))


def _cpu(timed: Sequence[BatchRecord]) -> Iterator[Finding]:
    for name, kind in (("cpu_other", FindingKind.CPU_BUSY), ("cpu_steal", FindingKind.CPU_STEAL)):
        shares = _values(timed, name)
        busy = [share for share in shares if share > BUSY]
        if busy:
            yield found(
                kind,
                severity=Severity.WARNING if len(busy) > len(shares) / 10 else Severity.NOTE,
                most=f"{100 * max(busy):.1f} %",
                busy=f"{100 * BUSY:.1f} %",
                count=len(busy),
                batches=len(shares),
            )


def _memory(run: RunData, timed: Sequence[BatchRecord]) -> Iterator[Finding]:
    faults = sum(_values(timed, "major_faults"))
    swapped = sum(_values(timed, "swapped_in_bytes"))
    total = ((run.header.environment or Environment()).memory or MemoryFacts()).total_bytes
    free = min(_values(timed, "memory_available_bytes"), default=None)
    low = total is not None and free is not None and free < LOW_MEMORY * total
    if swapped or faults > len(timed) or low:
        least = f", at least {free / 1e9:.1f} GB free" if free is not None else ""
        yield found(FindingKind.MEMORY_PRESSURE, faults=faults, swapped=swapped / 1e6, least=least)


def _values(batches: Sequence[BatchRecord], name: str) -> list[float]:
    return [batch.conditions[name] for batch in batches if name in batch.conditions]
