"""Findings: weaknesses of a run's numbers, each with what to do about it. Pure.

`ROWS` has a row for each kind: condition, text, remedy. A finding is typed so that a report can
group it and a CI job can act on it. Nothing is dropped because of a finding: noisy blocks and
batches count.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cached_property
from math import ceil, expm1, inf
from statistics import fmean, median
from typing import Any

from nwor_bench.analysis.effects import (
    WINDOWS,
    PairEffect,
    carries_over,
    correlation_of_clocks,
    mean_disagrees,
    sham_windows,
)
from nwor_bench.instruments.conditions import throttle_names
from nwor_bench.instruments.draft_counts import capture_size
from nwor_bench.models.methods import WITHOUT_DRAFTER
from nwor_bench.records.cell import SWITCHED, Cell, method_of
from nwor_bench.records.facts import EngineStatus, MemoryFacts
from nwor_bench.records.fallback_reasons import (
    NO_CUDA,
    mamba_cache_mode,
    unsupported_states,
    written_elsewhere,
)
from nwor_bench.records.header import RunHeader
from nwor_bench.records.lines import batch_key
from nwor_bench.records.store import RunData
from nwor_bench.records.types import (
    AA,
    BatchRecord,
    CellResult,
    NworMode,
    Phase,
    RunStatus,
    Verdict,
    WindowRecord,
)
from nwor_bench.stats.interval import Interval
from nwor_bench.stats.multiple import SIGNIFICANCE
from nwor_bench.stats.robust import MIN_GROUPS
from nwor_bench.stats.trend import trend
from nwor_bench.workload.run_spec import Counters


class Severity(StrEnum):
    """`note`: worth knowing. `warning`: it weakens a number. `error`: do not use the numbers."""

    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


class FindingKind(StrEnum):
    """Kinds of findings; the names are part of run.json's format."""

    TIME_BUDGET = "time_budget"
    AA_DIFFERS = "aa_differs"
    FEW_GROUPS = "few_groups"
    INEFFECTIVE = "ineffective"
    AMBIGUOUS = "ambiguous"
    FALLBACKS = "fallbacks"
    ELSEWHERE = "written_elsewhere"
    STATES = "states_by_stock"
    NO_GRAPH = "windows_without_graph"
    WINDOWS_DISAGREE = "windows_disagree"
    CARRY_OVER = "carry_over"
    LONG_WINDOWS = "long_windows"
    WARMUP = "warmup"
    TREND = "trend"
    HOST_PACE = "host_pace"
    ATTENTION = "attention_untimed"
    CLOCKS = "clocks"
    GPU_SHARED = "gpu_shared"
    CPU_BUSY = "cpu_busy"
    MEMORY_PRESSURE = "memory_pressure"
    DRAFTER_CONTEXT = "drafter_context"
    ACCEPTANCE = "as_random_drafts"
    CONCURRENCY = "fewer_requests_at_once"
    SHORT_OUTPUTS = "short_outputs"
    PREFIX_BLOCK = "prefix_block_dropped"


@dataclass(frozen=True)
class Finding:
    """Something that weakens the run's numbers; `cell` is a cell's label if it is one cell's."""

    kind: FindingKind
    severity: Severity
    message: str
    remedy: str
    cell: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for run.json."""
        return asdict(self)


@dataclass(frozen=True)
class Evidence:
    """What findings are found in."""

    run: RunData
    cells: Sequence[CellResult]
    effects: Mapping[Cell, PairEffect]
    """Effects of interleaved cells over off x off."""

    @property
    def engine(self) -> EngineStatus:
        """Facts of the engine; all None if it never started."""
        return self.run.header.engine

    @property
    def scenario(self) -> Mapping[str, Any]:
        """The run's scenario; empty if it is not known."""
        return self.run.header.scenario or {}

    @property
    def speculative(self) -> dict[str, Any]:
        """Further settings of vLLM's speculative_config."""
        header = self.run.header
        return {**(header.pair.speculative or {}), **(header.spec.speculative_config or {})}

    @property
    def drafter(self) -> int | None:
        """Longest context of a drafter, the shortest of several engines'; None if not known."""
        arms = (self.engine.arms or {}).values()
        known = [self.engine.drafter_max_model_len, *(a.get("drafter_max_model_len") for a in arms)]
        return min((length for length in known if length is not None), default=None)

    @property
    def longest(self) -> int:
        """Tokens of the longest request: its prompt in the gate, and its output."""
        return self.scenario.get("max_new_tokens", 0) + (self.run.header.gate.longest_prompt or 0)

    @cached_property
    def watched(self) -> list[BatchRecord]:
        """Timed batches whose conditions were recorded."""
        return [batch for batch in self.run.batches if batch.phase in _TIMED and batch.conditions]

    def conditions(self, name: str) -> list[float]:
        """A condition's value in each watched batch that has it."""
        return [batch.conditions[name] for batch in self.watched if name in batch.conditions]

    @cached_property
    def interleaved(self) -> list[tuple[CellResult, PairEffect]]:
        """Cells with a ratio that were interleaved with off x off."""
        return [
            (cell, self.effects[cell.cell])
            for cell in self.cells
            if cell.cell in self.effects and cell.interleaved and cell.ratio is not None
        ]

    @property
    def windows_decide(self) -> bool:
        """True if every ratio is that of neighbouring windows."""
        compared = [cell for cell in self.cells if cell.ratio is not None]
        return bool(compared) and all(cell.interleaved == WINDOWS for cell in compared)

    @property
    def compared_cells(self) -> int:
        """Number of cells with an effect, for Bonferroni's correction."""
        return sum(effect.decisive is not None for effect in self.effects.values())


@dataclass(frozen=True)
class Case:
    """One finding of a row: values of its placeholders, and texts that replace the row's."""

    values: Mapping[str, Any] = field(default_factory=dict)
    cell: str | None = None
    """A cell's label, the placeholder `{name}`."""

    severity: Severity | None = None
    sentence: str | None = None
    remedy: str | None = None


@dataclass(frozen=True)
class Row:
    """One kind of finding."""

    kind: FindingKind
    condition: Callable[[Evidence], Iterator[Case]]
    severity: Severity
    sentence: str
    """The message, with placeholders for a case's values."""
    remedy: str
    """What to do; a terminal shows the first sentence."""
    clause: str
    """All findings of the kind in a few words."""

    def findings(self, evidence: Evidence) -> Iterator[Finding]:
        """The findings of this kind."""
        for case in self.condition(evidence):
            values = {**case.values, "name": case.cell}
            message = (case.sentence or self.sentence).format(**values)
            remedy = (case.remedy or self.remedy).format(**values)
            yield Finding(self.kind, case.severity or self.severity, message, remedy, case.cell)


_TIMED = (Phase.TIMED, Phase.INTERLEAVED)

ENOUGH_BLOCKS = 10
"""With fewer, intervals are wide."""

ON_CPU = "Nothing to do. Times on a CPU do not apply to NWOR on a GPU."
NEIGHBOURS = "Nothing to do. Neighbouring windows are compared"

SHARES = 1.3
"""A budget over the time that it must leave: a fifth may go to warm-up."""

FINE_S = 120
"""Up to here a budget is rounded up to 10 s, above to whole minutes."""


def nothing_timed(header: RunHeader, cells: Sequence[CellResult]) -> str | None:
    """How the time budget was spent, as a clause, if it left no timed block; else None.

    None too for a run that was interrupted or failed: there the clock is not the cause.
    """
    budget_s = header.spec.time_budget_s
    timed = any(cell.batches or cell.groups for cell in cells)
    by_clock = header.status is RunStatus.COMPLETE and header.stopped is not None
    if not by_clock or timed or budget_s is None or header.measuring_s is None:
        return None
    gate_s = header.kv_gate.gate_seconds
    gate = "" if gate_s is None else f" (the gate {_seconds(gate_s)} of it)"
    lost = ["no block was timed"]
    lost += ["no DRAM bytes were counted"] if header.spec.counters == Counters.DRAM else []
    return (
        f"warm-up and gate took {_seconds(header.measuring_s)}{gate} of the time budget of "
        f"{budget_s:g} s, so {' and '.join(lost)}"
    )


def sufficient_budget(run: RunData, cells: Sequence[CellResult]) -> str:
    """A `--time-budget` with room for `ENOUGH_BLOCKS` timed blocks, for a run that timed none.

    SHARES x (spent + (ENOUGH_BLOCKS + counted) x block), rounded up: `spent` is the time of warm-up
    and gate, `counted` the blocks that count DRAM bytes and must fit in too (as
    `RunSpec.counted_blocks` plans them), `block` a batch of every cell at the median of those that
    ran (the run itself expects as much).
    """
    batch_s = median(batch.latency_ms for batch in run.batches) / 1e3 if run.batches else 0.0
    counted = int((run.header.scenario or {}).get("batches", ENOUGH_BLOCKS))
    blocks = ENOUGH_BLOCKS + (counted if run.header.spec.counters == Counters.DRAM else 0)
    wanted = SHARES * ((run.header.measuring_s or 0.0) + blocks * len(cells) * batch_s)
    return f"{10 * ceil(wanted / 10)}s" if wanted <= FINE_S else f"{ceil(wanted / 60)}m"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _time_budget(evidence: Evidence) -> Iterator[Case]:
    clause = nothing_timed(evidence.run.header, evidence.cells)
    if clause is not None:
        budget = sufficient_budget(evidence.run, evidence.cells)
        yield Case({"what": _capitalized(clause), "budget": budget})


def _aa_differs(evidence: Evidence) -> Iterator[Case]:
    for arm in (cell for cell in evidence.cells if cell.arm == AA):
        if arm.verdict == Verdict.INVALID:
            yield Case(
                {"reason": arm.reason},
                arm.label,
                Severity.ERROR,
                "off x off differs from itself: {reason}. No parity can be trusted.",
                "Find what is not deterministic in the engine. Try other --engine-args or another "
                "--dtype.",
            )
        if arm.ratio is not None and arm.verdict in (Verdict.FASTER, Verdict.SLOWER):
            ratio = _interval(arm.ratio)
            switching = ""
            if arm.interleaved == WINDOWS and sham_windows(evidence.run)[SWITCHED]:
                switching = " It switches as stage does, so switching itself may bias every ratio."
            yield Case({"verdict": arm.verdict, "ratio": ratio, "switching": switching}, arm.label)


def _few_groups(evidence: Evidence) -> Iterator[Case]:
    few = [c for c in evidence.cells if c.groups is not None and c.groups < MIN_GROUPS]
    if few:
        decide = " Whole batches decide." if any(c.half_width is not None for c in few) else ""
        listed = ", ".join(f"{cell.label} {cell.groups}" for cell in few)
        yield Case({"least": MIN_GROUPS, "groups": listed, "decide": decide})


def _ineffective(evidence: Evidence) -> Iterator[Case]:
    """Modes that never fired, one finding a reason; those beside a checked one weaken nothing."""
    cells = evidence.cells
    checked = any(cell.verdict == Verdict.CHECKED and cell.arm != AA for cell in cells)
    severity = Severity.NOTE if checked else Severity.WARNING
    idle: dict[str | None, list[CellResult]] = {}
    for cell in sorted(cells, key=lambda cell: cell.nwor_mode == NworMode.OFF):
        if cell.verdict == Verdict.INEFFECTIVE:
            idle.setdefault(cell.reason, []).append(cell)
    for reason, same in idle.items():
        no_cuda = all(NO_CUDA in c.scv_fallbacks and not c.fallbacks for c in same)
        remedy = "Measure it on a GPU. It needs CUDA." if no_cuda else None
        names = ", ".join(cell.label for cell in same)
        yield Case({"cells": names, "reason": reason}, severity=severity, remedy=remedy)


def _ambiguous(evidence: Evidence) -> Iterator[Case]:
    for cell in evidence.cells:
        if cell.verdict == Verdict.AMBIGUOUS and cell.ratio is not None and cell.arm != AA:
            effect = cell.smallest_effect
            least = "" if effect is None else f" Smallest visible effect: {_percent(effect)}."
            remedy = None
            if evidence.engine.device == "cpu":
                remedy = ON_CPU
            elif cell.groups is not None and cell.interleaved != WINDOWS:
                # Interleaved cells run whole batches in a few blocks, however many there are.
                remedy = f"Write --interleave batches, and --batches {ENOUGH_BLOCKS} or more."
            reason = cell.reason or "its interval is too wide"
            yield Case({"reason": reason, "least": least}, cell.label, remedy=remedy)


def _fallbacks(evidence: Evidence) -> Iterator[Case]:
    for cell in evidence.cells:
        if cell.fallbacks and cell.verdict != Verdict.INEFFECTIVE:
            share = sum(cell.fallbacks.values()) / max(1, cell.windows)
            reasons = ", ".join(f"{reason} {n}" for reason, n in cell.fallbacks.items())
            severity = Severity.WARNING if share > 0.1 else Severity.NOTE
            yield Case({"share": _percent(share), "reasons": reasons}, cell.label, severity)


def _elsewhere(evidence: Evidence) -> Iterator[Case]:
    for cell in evidence.cells:
        reasons = [reason for reason in cell.fallbacks if written_elsewhere(reason)]
        if reasons:
            yield Case({"reasons": ", ".join(reasons)}, cell.label)


_STATES_REMEDY = {
    mamba_cache_mode(""): "Write --engine-args '{{\"enable_prefix_caching\": false}}'. "
    "With prefix caching vLLM copies states at the end of each block.",
    unsupported_states(""): "Nothing to do. Only gated delta nets of known shapes stage states.",
}
"""Remedies by the refusal without its detail."""


def _states(evidence: Evidence) -> Iterator[Case]:
    """Recurrent states that stock wrote in mode stage: refused as the engine started, or in every
    window of a cell. Cells that staged nothing have another finding."""
    staged: dict[Cell, list[WindowRecord]] = defaultdict(list)
    for window in evidence.run.windows:
        if window.staged_tokens:
            staged[window.cell].append(window)
    cells = [cell.cell for cell in evidence.cells if cell.cell in staged]
    refused = evidence.engine.states_unavailable
    if refused is not None and cells:
        yield Case(
            {"reason": refused},
            severity=Severity.NOTE,
            sentence="Stage holds K/V only: stock writes the recurrent states ({reason}).",
            remedy=_STATES_REMEDY.get(
                refused[: refused.find(":") + 1], "Read engine.log. It has the traceback."
            ),
        )
    idle = [cell for cell in cells if not any(w.states_committed for w in staged[cell])]
    if evidence.engine.state_layers and idle:
        reasons = {w.states_reason or "no reason given" for cell in idle for w in staged[cell]}
        names = ", ".join(cell.label for cell in idle)
        yield Case({"cells": names, "reasons": ", ".join(sorted(reasons))})


def _no_graph(evidence: Evidence) -> Iterator[Case]:
    """Windows of all requests are larger than the largest of vLLM's full graphs. If each draft
    count has an engine, the header has the facts of the one without drafts."""
    graphs = evidence.engine.cuda_graphs
    most = None if graphs is None or evidence.run.header.spec.engines else graphs.largest_window
    requests, drafts = (evidence.scenario.get(name, 0) for name in ("requests", "draft_tokens"))
    tokens = requests * (drafts + 1)
    if most is not None and tokens > most:
        values = {"tokens": tokens, "requests": requests, "drafts": drafts, "most": most}
        yield Case({**values, "enough": capture_size(tokens)})


def _windows_disagree(evidence: Evidence) -> Iterator[Case]:
    for cell, effect in evidence.interleaved:
        if effect.decisive is not None and cell.interleaved != WINDOWS:
            whole = "" if cell.whole is None else _interval(cell.whole)
            yield Case({"windows": _interval(effect.decisive.robust), "batches": whole}, cell.label)


def _carry_over(evidence: Evidence) -> Iterator[Case]:
    for cell, effect in evidence.interleaved:
        if effect.carry_over is not None and carries_over(effect, evidence.compared_cells):
            yield Case({"ratio": _interval(effect.carry_over)}, cell.label)


def _long_windows(evidence: Evidence) -> Iterator[Case]:
    for cell, effect in evidence.interleaved:
        ratio = effect.decisive
        if ratio is not None and mean_disagrees(effect, evidence.compared_cells):
            values = {"mean": _interval(ratio.mean), "robust": _interval(ratio.robust)}
            yield Case(values, cell.label)


def _warmup(evidence: Evidence) -> Iterator[Case]:
    unsteady = evidence.run.header.warmup.not_steady
    if unsteady and evidence.windows_decide:
        yield Case({"why": unsteady}, severity=Severity.NOTE, remedy=f"{NEIGHBOURS}.")
    elif unsteady:
        yield Case({"why": unsteady})


def _trend(evidence: Evidence) -> Iterator[Case]:
    means = _baseline_means(evidence.run)
    drift = trend(means)
    if drift.matters:
        yield Case({"drift": 100 * drift.drift, "blocks": len(means), "p_value": drift.p_value})


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


HOST_BOUND = 0.75
"""Correlation of both clocks from which a run counts as host-bound. On H200s it was -0.04 to 0.59
in six settings that were not, 0.77 to 1 in 20 runs on a busy host (sweeps/studies/interleave)."""


def _host_pace(evidence: Evidence) -> Iterator[Case]:
    """A run is host-bound for all cells or for none."""
    pairs = [
        (correlation_of_clocks(effect.groups), effect.pair.treated.label)
        for effect in evidence.effects.values()
    ]
    known = [(together, name) for together, name in pairs if together is not None]
    if known and min(known)[0] >= HOST_BOUND:
        least, name = min(known)
        yield Case({"least": least, "pair": name})


def _attention(evidence: Evidence) -> Iterator[Case]:
    graphs = evidence.engine.cuda_graphs
    if graphs and graphs.attention_untimed:
        yield Case({"why": graphs.attention_untimed})


CLOCK_CHANGE = 0.02
"""Lowest below highest clock, as a share."""


def _clocks(evidence: Evidence) -> Iterator[Case]:
    """The clock moved, the GPU throttled, or a ratio depends on either. A note if neighbouring
    windows decide and no ratio does."""
    what = []
    clocks = evidence.conditions("gpu_sm_clock_mhz")
    if clocks and min(clocks) < (1 - CLOCK_CHANGE) * max(clocks):
        what.append(f"the GPU's SM clock ran from {min(clocks):.0f} to {max(clocks):.0f} MHz")
    reasons = Counter(
        name
        for batch in evidence.watched
        for name in throttle_names(batch.conditions.get("gpu_throttle_reasons"))
    )
    held_ms = sum(evidence.conditions("gpu_throttled_ms"))
    if reasons or held_ms > 0:
        listed = ", ".join(f"{name} in {count}" for name, count in reasons.most_common())
        listed = listed or "power or temperature"
        batches = f"of {len(evidence.watched)} batches, {held_ms:.0f} ms held down"
        what.append(f"{'it' if what else 'the GPU'} throttled: {listed} {batches}")
    cells, known = evidence.compared_cells, evidence.interleaved
    dependent = [(cell, effect) for cell, effect in known if _depends_on_clock(effect, cells)]
    for cell, effect in dependent:
        slopes = ", ".join(f"{_slope_words(slope)} {unit}" for slope, unit in _slopes(effect))
        what.append(f"the ratio of {cell.label} depends on the clock: {slopes}")
    if not what:
        return
    values = {"what": "; ".join(what)}
    if evidence.windows_decide and not dependent and all(_slopes(effect) for _, effect in known):
        steepest = [(*_slopes(effect)[0], cell.label) for cell, effect in known]
        slope, unit, name = max(steepest, key=lambda row: abs(row[0].value) + row[0].half_width)
        most = f"at most {name}, by {_slope_words(slope)} {unit}"
        remedy = f"{NEIGHBOURS}, and no ratio depends on the clock ({most})."
        yield Case(values, severity=Severity.NOTE, remedy=remedy)
    else:
        yield Case(values)


def _slopes(effect: PairEffect) -> list[tuple[Interval, str]]:
    """How the ratio changes with the clock and with throttling, as far as known."""
    state = effect.conditions
    known = ((state.per_100_mhz, "for 100 MHz more"), (state.if_throttled, "while throttled"))
    return [(slope, unit) for slope, unit in known if slope is not None]


def _depends_on_clock(effect: PairEffect, cells: int) -> bool:
    """True if the ratio depends on the clock or on throttling (Bonferroni over the cells)."""
    return effect.decisive is not None and any(
        slope.p_value * cells < SIGNIFICANCE for slope, _ in _slopes(effect)
    )


def _slope_words(slope: Interval) -> str:
    """`+0.02 % [-0.03, 0.07]`."""
    half = slope.half_width
    low, high = (100 * expm1(end) for end in (slope.value - half, slope.value + half))
    return f"{100 * expm1(slope.value):+.2f} % [{low:.2f}, {high:.2f}]"


def _gpu_shared(evidence: Evidence) -> Iterator[Case]:
    others = evidence.conditions("gpu_other_processes")
    if others and max(others) > 0:
        count = sum(other > 0 for other in others)
        yield Case({"most": max(others), "count": count, "batches": len(evidence.watched)})


BUSY = 0.05
"""Share of the processors' time that others may take without a finding."""


def _cpu_busy(evidence: Evidence) -> Iterator[Case]:
    what, severity = [], Severity.NOTE
    for name, who in (("cpu_other", "other processes used"), ("cpu_steal", "the hypervisor took")):
        shares = evidence.conditions(name)
        busy = [share for share in shares if share > BUSY]
        if busy:
            what.append(
                f"{who} up to {_percent(max(busy))} of the processors' time, more than "
                f"{_percent(BUSY)} in {len(busy)} of {len(shares)} timed batches"
            )
        if len(busy) > len(shares) / 10:
            severity = Severity.WARNING
    if what:
        yield Case({"what": _capitalized("; ".join(what))}, severity=severity)


LOW_MEMORY = 0.05
"""Memory available over memory in the machine."""


def _memory(evidence: Evidence) -> Iterator[Case]:
    faults = sum(evidence.conditions("major_faults"))
    swapped = sum(evidence.conditions("swapped_in_bytes"))
    environment = evidence.run.header.environment
    total = (environment.memory or MemoryFacts()).total_bytes
    free = min(evidence.conditions("memory_available_bytes"), default=None)
    low = total is not None and free is not None and free < LOW_MEMORY * total
    if swapped or faults > len(evidence.watched) or low:
        least = f", at least {free / 1e9:.1f} GB free" if free is not None else ""
        yield Case({"faults": faults, "swapped": swapped / 1e6, "least": least})


def _drafter_context(evidence: Evidence) -> Iterator[Case]:
    drafter, target = evidence.drafter, evidence.scenario.get("max_model_len", 0)
    if drafter is not None and drafter < target:
        yield Case({"drafter": drafter, "target": target, "longest": evidence.longest})


RANDOM = 0.02
"""Acceptance rate of the first draft up to which drafts are as good as random tokens."""


def _acceptance(evidence: Evidence) -> Iterator[Case]:
    """First drafts are as good as random ones, and requests no longer than the drafter's context.
    Synthetic acceptance is what was asked for."""
    is_long = evidence.drafter is not None and evidence.longest > evidence.drafter
    if is_long or evidence.speculative.get("rejection_sample_method") == "synthetic":
        return
    rates: dict[str | None, float] = {}
    for cell in evidence.cells:
        for rate in cell.acceptance_per_position[:1]:
            method = method_of(cell.cell.drafts)
            rates[method] = max(rate, rates.get(method, 0.0))
    for method, rate in rates.items():
        if rate <= RANDOM:
            yield Case({"rate": _percent(rate), "of": f" of {method}" if method else ""})


def _concurrency(evidence: Evidence) -> Iterator[Case]:
    """Prompt lookup does not draft for every request: there only windows at k = 0 show all."""
    engine, requests = evidence.engine, evidence.scenario.get("requests", 0)
    every = evidence.run.header.pair.method not in WITHOUT_DRAFTER
    most = max((w.num_reqs for w in evidence.run.windows if every or w.cell.drafts == 0), default=0)
    need = ceil(evidence.longest / (engine.block_size or 1))
    has_room = engine.state_slots is None and need * requests < (engine.num_gpu_blocks or inf)
    if 0 < most < requests and not has_room:
        slots = f" and {engine.state_slots} slots of states" if engine.state_slots else ""
        more = "one state slot a request (docs/states.md)" if slots else "an fp8 cache"
        values = {"most": most, "requests": requests, "need": need, "slots": slots, "more": more}
        yield Case({**values, "blocks": engine.num_gpu_blocks, "size": engine.block_size})


def _short_outputs(evidence: Evidence) -> Iterator[Case]:
    """Most outputs end before the longest one, which a batch may have cut."""
    batches = (batch for batch in evidence.run.batches if batch.phase in _TIMED)
    tokens = [tokens for batch in batches for tokens, _ in batch.request_tokens]
    most = evidence.scenario.get("max_new_tokens", 0)
    if tokens and fmean(tokens) < most / 2 and tokens.count(max(tokens)) < len(tokens) / 2:
        yield Case({"mean": ceil(fmean(tokens)), "most": most})


def _prefix_block(evidence: Evidence) -> Iterator[Case]:
    """vLLM 0.33 drops none unless it is asked to, as its hashes cover what the drafter reads."""
    header, engine, config = evidence.run.header, evidence.engine, evidence.speculative
    hashes = (engine.vllm or "") >= "0.33" and not config.get("disable_lookahead_block_hashes")
    keeps = hashes or config.get("disable_eagle_block_drop")
    caches = header.spec.engine_args.get("enable_prefix_caching")
    if header.pair.method in ("eagle", "eagle3", "mtp") and caches and not keeps:
        yield Case({"method": header.pair.method, "size": engine.block_size})


def _capitalized(clause: str) -> str:
    return f"{clause[0].upper()}{clause[1:]}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _interval(ratio: Interval) -> str:
    return f"{ratio.value:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]"


_K, _NOTE, _WARNING = FindingKind, Severity.NOTE, Severity.WARNING

ROWS = (
    Row(_K.TIME_BUDGET, _time_budget, _WARNING, "{what}.", "Write --time-budget {budget}.",
        "The gate left no time to measure"),
    Row(_K.AA_DIFFERS, _aa_differs, _WARNING,
        "off x off against itself is {verdict} ({ratio}): one in twenty runs is by chance, more if "
        "something drifts.{switching}",
        "Measure again. If it repeats, use a quieter machine.", "off x off differs from itself"),
    Row(_K.FEW_GROUPS, _few_groups, _WARNING,
        "An interval needs {least} groups of windows that count. There are: {groups}.{decide}",
        "Measure longer, in longer batches. Write a longer --time-budget or more --batches, and "
        "more --max-new-tokens: a group counts if it ends within its batch.",
        "Too few groups of windows"),
    Row(_K.INEFFECTIVE, _ineffective, _WARNING, "{cells} never fired: {reason}.",
        "Find the reason under Evidence (fallbacks). Ignore its cells' times.",
        "A mode never fired"),
    Row(_K.AMBIGUOUS, _ambiguous, _WARNING, "{name} is AMBIGUOUS: {reason}.{least}",
        "Add blocks (--batches 20). Four times as many halve the interval.",
        "Too uncertain"),
    Row(_K.FALLBACKS, _fallbacks, _WARNING,
        "{name}: {share} of its windows were written directly ({reasons}).",
        "The ratio is a mixture. Evidence explains the reasons.",
        "Windows that staged nothing"),
    Row(_K.ELSEWHERE, _elsewhere, _WARNING,
        "{name}: K/V did not come by the write that nwor-bench wraps ({reasons}). Another kernel "
        "wrote them, every draft token's too.",
        "Switch that fusion off. See --compilation-config, pass_config.",
        "K/V that another kernel wrote"),
    Row(_K.STATES, _states, _WARNING,
        "Stock wrote the recurrent states of every staged window of {cells} ({reasons}). What was "
        "measured there is K/V only.", "Read states_reason in windows.csv. engine.log may have a "
        "traceback.", "Stock wrote states"),
    Row(_K.NO_GRAPH, _no_graph, _WARNING,
        "Windows of {tokens:,} tokens ({requests} requests, {drafts} drafts) have no CUDA graph: "
        "vLLM captured none above {most:,} tokens. Launched one by one they take longer.",
        "Capture larger ones. Write --engine-args '{{\"compilation_config\": "
        "{{\"max_cudagraph_capture_size\": {enough}}}}}'. Serve with the same graphs.",
        "The largest windows have no CUDA graph"),
    Row(_K.WINDOWS_DISAGREE, _windows_disagree, _WARNING,
        "{name}: neighbouring windows give {windows}, whole batches {batches}. The intervals do "
        "not overlap, so whole batches decide.",
        "Use --interleave batches. Report the disagreement.", "Other ratios by windows"),
    Row(_K.CARRY_OVER, _carry_over, _WARNING,
        "{name}: its ratio depends on the length of runs of windows. In runs of two it is {ratio} "
        "times that in long ones.",
        "Use --interleave batches. A mode affects the window after it.",
        "Carry-over between windows"),
    Row(_K.LONG_WINDOWS, _long_windows, _WARNING,
        "{name}: a few long windows carry a difference. The mean ratio is {mean}, without their "
        "weight it is {robust}.",
        "The verdict leaves them out. Find the cause in windows.csv.", "A few long windows"),
    Row(_K.WARMUP, _warmup, _WARNING, "Window times were not steady when warm-up ended: {why}.",
        "Raise --max-warmup. Or find what else runs on the machine.",
        "Window times were not steady after warm-up"),
    Row(_K.TREND, _trend, _WARNING,
        "Window times of off x off drifted by {drift:+.1f} % over {blocks} blocks (Mann-Kendall "
        "p = {p_value:.3f}).",
        "Warm up longer (--warmup), fix the clocks. Ratios are unaffected, since every block holds "
        "all cells; absolute times are not.", "Window times drifted"),
    Row(_K.HOST_PACE, _host_pace, _WARNING,
        "The run is host-bound: groups of windows that took longer on the host's clock did so on "
        "the GPU's too (rank correlation {least:.2f} or more, {pair}). The GPU waited, so a "
        "difference in its work (shown beside the step) may not show in the step.",
        "Use a faster host, or more --requests. A quieter host or cores of its own (taskset) may "
        "do.", "The run is host-bound"),
    Row(_K.ATTENTION, _attention, _WARNING,
        "What attends windows could not be timed ({why}). A table chose it, so it may be slower "
        "than stock.", "Read why in engine.log. Or choose it with --attention.",
        "What attends windows could not be timed"),
    Row(_K.CLOCKS, _clocks, _WARNING, "In timed batches {what}.",
        "Lock it (nvidia-smi --lock-gpu-clocks). Or cool the GPU, raise its power limit, or add "
        "blocks.", "The GPU's clock changed"),
    Row(_K.GPU_SHARED, _gpu_shared, _WARNING,
        "Up to {most:.0f} other processes were on the GPU in {count} of {batches} timed batches.",
        "Measure on a GPU of your own.", "Other processes were on the GPU"),
    Row(_K.CPU_BUSY, _cpu_busy, _WARNING, "{what}.",
        "Stop what else runs here. If the hypervisor took the time, use a machine that is not "
        "shared, or measure at another time.", "Others used the CPU"),
    Row(_K.MEMORY_PRESSURE, _memory, _WARNING,
        "Memory ran short in timed batches: {faults:.0f} pages read from disk, {swapped:.1f} MB "
        "swapped in{least}.",
        "Free memory, or write fewer --requests. A smaller kv_cache_gib also helps.",
        "Memory ran short"),
    Row(_K.DRAFTER_CONTEXT, _drafter_context, _WARNING,
        "The drafter reads at most {drafter:,} tokens and the target {target:,}: in longer "
        "requests no draft is accepted (the longest of these has {longest:,}).",
        "Write --max-model-len {drafter}. Or take a drafter with a longer context.",
        "The drafter's context is short"),
    Row(_K.ACCEPTANCE, _acceptance, _WARNING,
        "Only {rate} of first drafts{of} were accepted, as of random ones: the drafter is not this "
        "target's, or the prompts are random tokens.",
        "Use text, and this target's drafter. --prompts takes a file.",
        "Drafts are like random ones"),
    Row(_K.CONCURRENCY, _concurrency, _WARNING,
        "At most {most} of {requests} requests ran at once: the cache has {blocks:,} blocks of "
        "{size:,} tokens, and a request takes up to {need:,}{slots}.",
        "Write --requests {most}. Or free more: a larger kv_cache_gib, {more}, or more ranks "
        "(--tensor-parallel-size).", "Some requests waited"),
    Row(_K.SHORT_OUTPUTS, _short_outputs, _WARNING,
        "Outputs end after {mean} of {most} tokens on average: the last windows of a batch "
        "have few requests.",
        "Write --max-new-tokens {mean}. Then more requests end together.",
        "Outputs are short"),
    Row(_K.PREFIX_BLOCK, _prefix_block, _NOTE,
        "With {method} this vLLM drops the last block of every prefix that it finds in its cache: "
        "{size:,} tokens or fewer are computed again.",
        "Use vLLM 0.33, which drops none. Or disable_eagle_block_drop in --speculative-config, "
        "which may cost acceptance.", "Cached prefixes lose a block"),
)  # fmt: skip
"""Rows in the order in which a report shows findings of equal severity."""


def find_all(
    run: RunData, cells: Sequence[CellResult], effects: Mapping[Cell, PairEffect]
) -> list[Finding]:
    """All findings of a run, the severest first; `effects` are those over off x off."""
    evidence = Evidence(run, cells, effects)
    every = [finding for row in ROWS for finding in row.findings(evidence)]
    return sorted(every, key=lambda finding: rank(finding.severity))


@dataclass(frozen=True)
class FindingGroup:
    """Findings of one cause."""

    severity: Severity
    """The severest of the findings."""

    line: str
    """Finding and remedy in one line."""

    findings: tuple[Finding, ...]


def grouped(findings: Sequence[Finding]) -> list[FindingGroup]:
    """The findings by cause, the severest group first."""
    groups = []
    for row in ROWS:
        same = tuple(finding for finding in findings if finding.kind is row.kind)
        if same:
            severity = min((finding.severity for finding in same), key=rank)
            groups.append(FindingGroup(severity, _line(row, same), same))
    return sorted(groups, key=lambda group: rank(group.severity))


def rank(severity: Severity) -> int:
    """Sort key, lowest for the severest."""
    return -list(Severity).index(severity)


def _line(row: Row, findings: Sequence[Finding]) -> str:
    remedy = findings[0].remedy.split(". ")[0].rstrip(".")
    cells = len({finding.cell for finding in findings})
    where = f" ({cells} cells)" if cells > 1 else ""
    return f"{row.clause}{where}: {remedy[0].lower()}{remedy[1:]}"
