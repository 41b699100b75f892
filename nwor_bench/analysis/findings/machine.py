"""The machine: window times that drift, clocks, and others who use the GPU, the CPU or memory."""

from collections import Counter, defaultdict
from math import expm1
from statistics import fmean

from nwor_bench.analysis.effects import PairEffect, correlation_of_clocks
from nwor_bench.analysis.findings.finding import Case, Cases, Evidence, FindingKind, Row, Severity
from nwor_bench.instruments.conditions import throttle_names
from nwor_bench.records.facts import MemoryFacts
from nwor_bench.records.lines import batch_key
from nwor_bench.records.types import Phase
from nwor_bench.stats.interval import Interval
from nwor_bench.stats.multiple import SIGNIFICANCE
from nwor_bench.stats.trend import trend

NEIGHBOURS = "Nothing to do. Neighbouring windows are compared"

HOST_BOUND = 0.75
"""Correlation of both clocks from which a run counts as host-bound. On H200s it was -0.04 to 0.59
in six settings that were not, 0.77 to 1 in 20 runs on a busy host (sweeps/studies/interleave)."""

CLOCK_CHANGE = 0.02
"""Lowest below highest clock, as a share."""
BUSY = 0.05
"""Share of the processors' time that others may take without a finding."""
LOW_MEMORY = 0.05
"""Memory available over memory in the machine."""


def _warmup(evidence: Evidence) -> Cases:
    unsteady = evidence.run.header.warmup.not_steady
    if unsteady and evidence.windows_decide:
        yield Case({"why": unsteady}, severity=Severity.NOTE, remedy=f"{NEIGHBOURS}.")
    elif unsteady:
        yield Case({"why": unsteady})


def _trend(evidence: Evidence) -> Cases:
    """A note if neighbouring windows decide and no ratio drifted with the times."""
    means = _baseline_means(evidence)
    drift = trend(means)
    if not drift.matters:
        return
    slopes = {cell.label: own.conditions.over_the_run for cell, own in evidence.interleaved}
    moved = ", ".join(f"of {name} by {_percent(own)}" for name, own in slopes.items()
                      if own and own.p_value * evidence.compared_cells < SIGNIFICANCE)  # fmt: skip
    values = {"drift": 100 * drift.drift, "blocks": len(means), "p_value": drift.p_value,
              "ratios": moved and f" So did ratios: {moved}."}  # fmt: skip
    steady = evidence.windows_decide and not moved and all(slopes.values())
    remedy = f"{NEIGHBOURS}, and no ratio drifted." if steady else None
    yield Case(values, severity=Severity.NOTE if steady else None, remedy=remedy)


def _baseline_means(evidence: Evidence) -> list[float]:
    """Mean window time of off x off in each timed block, in ms. If cells were interleaved, only
    those batches count: whole ones ran in the first blocks only."""
    interleaved = {batch_key(b) for b in evidence.timed if b.phase == Phase.INTERLEAVED}
    times: dict[int, list[float]] = defaultdict(list)
    for window in evidence.run.windows:
        counts = not interleaved or batch_key(window) in interleaved
        if counts and window.cell.is_baseline and window.wall_ms is not None:
            times[window.block].append(window.wall_ms)
    blocks = {batch.block for batch in evidence.timed}
    return [fmean(times[block]) for block in sorted(blocks & times.keys())]


def _host_pace(evidence: Evidence) -> Cases:
    """A run is host-bound for all cells or for none."""
    effects = evidence.effects.values()
    pairs = [(correlation_of_clocks(own.groups), own.pair.treated.label) for own in effects]
    known = ((together, name) for together, name in pairs if together is not None)
    least, name = min(known, default=(0.0, ""))
    if least >= HOST_BOUND:
        yield Case({"least": least, "pair": name})


def _clocks(evidence: Evidence) -> Cases:
    """The clock moved, the GPU throttled, or a ratio depends on either. A note if neighbouring
    windows decide and no ratio does."""
    what = []
    clocks = evidence.conditions("gpu_sm_clock_mhz")
    if clocks and min(clocks) < (1 - CLOCK_CHANGE) * max(clocks):
        what.append(f"the GPU's SM clock ran from {min(clocks):.0f} to {max(clocks):.0f} MHz")
    codes = evidence.conditions("gpu_throttle_reasons")
    reasons = Counter(name for code in codes for name in throttle_names(code))
    held_ms = sum(evidence.conditions("gpu_throttled_ms"))
    if reasons or held_ms > 0:
        listed = ", ".join(f"{name} in {count}" for name, count in reasons.most_common())
        listed = listed or "power or temperature"
        batches = f"of {len(evidence.watched)} batches, {held_ms:.0f} ms held down"
        what.append(f"{'it' if what else 'the GPU'} throttled: {listed} {batches}")
    cells = evidence.compared_cells  # Bonferroni over them
    known = [(cell.label, effect, _slopes(effect)) for cell, effect in evidence.interleaved]
    dependent = [
        f"the ratio of {name} depends on the clock: {', '.join(words for _, words in slopes)}"
        for name, effect, slopes in known
        if effect.decisive is not None and any(s.p_value * cells < SIGNIFICANCE for s, _ in slopes)
    ]
    what += dependent
    if not what:
        return
    values = {"what": "; ".join(what)}
    if evidence.windows_decide and not dependent and all(slopes for *_, slopes in known):
        steepest = [(*slopes[0], name) for name, _, slopes in known]
        _, words, name = max(steepest, key=lambda row: abs(row[0].value) + row[0].half_width)
        remedy = f"{NEIGHBOURS}, and no ratio depends on the clock (at most {name}, by {words})."
        yield Case(values, severity=Severity.NOTE, remedy=remedy)
    else:
        yield Case(values)


def _slopes(effect: PairEffect) -> list[tuple[Interval, str]]:
    """How the ratio changes with the clock and with throttling, as far as known, and in words:
    `+0.02 % [-0.03, 0.07] while throttled`."""
    state = effect.conditions
    known = ((state.per_100_mhz, "for 100 MHz more"), (state.if_throttled, "while throttled"))
    return [(slope, f"{_percent(slope)} {unit}") for slope, unit in known if slope is not None]


def _percent(change: Interval) -> str:
    value, low, high = (100 * expm1(end) for end in (change.value, change.low, change.high))
    return f"{value:+.2f} % [{low:.2f}, {high:.2f}]"


def _gpu_shared(evidence: Evidence) -> Cases:
    others = evidence.conditions("gpu_other_processes")
    if others and max(others) > 0:
        count = sum(other > 0 for other in others)
        yield Case({"most": max(others), "count": count, "batches": len(evidence.watched)})


def _cpu_busy(evidence: Evidence) -> Cases:
    what, severity = [], Severity.NOTE
    for name, who in (("cpu_other", "other processes used"), ("cpu_steal", "the hypervisor took")):
        shares = evidence.conditions(name)
        busy = [share for share in shares if share > BUSY]
        if busy:
            what.append(
                f"{who} up to {100 * max(busy):.1f} % of the processors' time, more than "
                f"{100 * BUSY:.1f} % in {len(busy)} of {len(shares)} timed batches"
            )
        if len(busy) > len(shares) / 10:
            severity = Severity.WARNING
    if what:
        clause = "; ".join(what)
        yield Case({"what": f"{clause[0].upper()}{clause[1:]}"}, severity=severity)


def _memory(evidence: Evidence) -> Cases:
    faults = sum(evidence.conditions("major_faults"))
    swapped = sum(evidence.conditions("swapped_in_bytes"))
    total = (evidence.run.header.environment.memory or MemoryFacts()).total_bytes
    free = min(evidence.conditions("memory_available_bytes"), default=None)
    low = total is not None and free is not None and free < LOW_MEMORY * total
    if swapped or faults > len(evidence.watched) or low:
        least = f", at least {free / 1e9:.1f} GB free" if free is not None else ""
        yield Case({"faults": faults, "swapped": swapped / 1e6, "least": least})


ROWS = (
    Row(FindingKind.WARMUP, _warmup, "Window times were not steady when warm-up ended: {why}.",
        "Raise --max-warmup. Or find what else runs on the machine.",
        "Window times were not steady after warm-up"),
    Row(FindingKind.TREND, _trend,
        "Window times of off x off drifted by {drift:+.1f} % over {blocks} blocks (Mann-Kendall "
        "p = {p_value:.3f}).{ratios}",
        "Warm up longer (--warmup), fix the clocks. What drifts in all cells cancels in ratios, "
        "since every block holds all cells.", "Window times drifted"),
    Row(FindingKind.HOST_PACE, _host_pace,
        "The run is host-bound: groups of windows that took longer on the host's clock did so on "
        "the GPU's too (rank correlation {least:.2f} or more, {pair}). The GPU waited, so a "
        "difference in its work (shown beside the step) may not show in the step.",
        "Use a faster host, or more --requests. A quieter host or cores of its own (taskset) may "
        "do.", "The run is host-bound"),
    Row(FindingKind.CLOCKS, _clocks, "In timed batches {what}.",
        "Lock it (nvidia-smi --lock-gpu-clocks). Or cool the GPU, raise its power limit, or add "
        "blocks.", "The GPU's clock changed"),
    Row(FindingKind.GPU_SHARED, _gpu_shared,
        "Up to {most:.0f} other processes were on the GPU in {count} of {batches} timed batches.",
        "Measure on a GPU of your own.", "Other processes were on the GPU"),
    Row(FindingKind.CPU_BUSY, _cpu_busy, "{what}.",
        "Stop what else runs here. If the hypervisor took the time, use a machine that is not "
        "shared, or measure at another time.", "Others used the CPU"),
    Row(FindingKind.MEMORY_PRESSURE, _memory,
        "Memory ran short in timed batches: {faults:.0f} pages read from disk, {swapped:.1f} MB "
        "swapped in{least}.",
        "Free memory, or write fewer --requests. A smaller kv_cache_gib also helps.",
        "Memory ran short"),
)  # fmt: skip
