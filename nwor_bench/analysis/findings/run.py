"""All findings of a run: those of its cells, its A/A arm, its records and its time budget.

Nothing is dropped because of a finding: noisy blocks and batches count.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from statistics import median

from nwor_bench.analysis.effects import WINDOWS, PairEffect, sham_windows
from nwor_bench.analysis.engine_times import by_engines
from nwor_bench.analysis.findings.interleaved import interleaved_findings, unaffected_as_notes
from nwor_bench.analysis.findings.machine import machine_findings
from nwor_bench.analysis.findings.table import Finding, FindingKind, Severity, found, rank
from nwor_bench.analysis.paired import LATENCY_MS
from nwor_bench.instruments.draft_counts import capture_size
from nwor_bench.records.cell import SWITCHED, Cell
from nwor_bench.records.facts import EngineStatus
from nwor_bench.records.fallback_reasons import NO_CUDA, mamba_cache_mode, unsupported_states
from nwor_bench.records.header import GATE, INTERLEAVED, WARM_UP, WHOLE, KvGateFacts, RunHeader
from nwor_bench.records.store import RunData
from nwor_bench.records.types import AA, CellResult, NworMode, RunStatus, Verdict, WindowRecord
from nwor_bench.stats.robust import MIN_GROUPS
from nwor_bench.workload.run_spec import Counters
from nwor_bench.workload.stopping import CHECK_SHARE

FEW_BLOCKS = 10
"""With fewer, intervals are wide."""

ENOUGH_GROUPS = 100
"""Groups of each cell that an interleaved run should have."""

ON_CPU = "Nothing to do. Times on a CPU do not apply to NWOR on a GPU."

SHARES = 1.3
"""A budget over the time that it must leave: a fifth may go to warm-up."""

_FINE_S = 120
"""Up to here a budget is rounded up to 10 s, above to whole minutes."""

_UNMATCHED = 0.05
"""Share of windows that may be unmatched without a finding."""

_BLOCKS_HELP = (FindingKind.FEW_BLOCKS, FindingKind.AMBIGUOUS, FindingKind.NOISE_FLOOR)
"""More blocks would help, on a GPU."""

_STATES_REMEDY = {
    mamba_cache_mode(""): "Write --engine-args '{{\"enable_prefix_caching\": false}}'. "
    "With prefix caching vLLM copies states at the end of each block.",
    unsupported_states(""): "Nothing to do. Only gated delta nets of known shapes stage states.",
}
"""By the refusal without its detail."""

_IN_LOG = "Read engine.log. It has the traceback."


def find_all(
    run: RunData, cells: Sequence[CellResult], effects: Mapping[Cell, PairEffect]
) -> list[Finding]:
    """All findings of a run, the severest first; `effects` are those over off x off."""
    every = [
        *_time_budget(run, cells),
        *_noise(run, cells),
        *_few(run.header, cells),
        *_no_graph(run.header),
        *_idle(cells),
        *_states(run, cells),
        *(finding for cell in cells for finding in _one_cell(cell)),
        *interleaved_findings(effects, cells),
        *machine_findings(run),
    ]
    every = unaffected_as_notes(every, effects, cells)
    if by_engines(run.header):  # the answer has times per token, without the prefill
        every = [finding for finding in every if finding.kind is not FindingKind.LATENCY]
    if (run.header.engine or EngineStatus()).device == "cpu":
        every = [replace(f, remedy=ON_CPU) if f.kind in _BLOCKS_HELP else f for f in every]
    return sorted(every, key=lambda finding: rank(finding.severity))


def nothing_timed(header: RunHeader, cells: Sequence[CellResult]) -> str | None:
    """How the time budget was spent, as a clause, if it left no timed block; else None.

    None too for a run that was interrupted or failed: there the clock is not the cause.
    """
    spec = header.spec or {}
    budget_s = spec.get("time_budget_s")
    timed = any(cell.batches or cell.groups for cell in cells)
    by_clock = header.status is RunStatus.COMPLETE and header.stopped is not None
    if not by_clock or timed or budget_s is None or header.measuring_s is None:
        return None
    gate_s = (header.kv_gate or KvGateFacts()).gate_seconds
    gate = "" if gate_s is None else f" (the gate {_seconds(gate_s)} of it)"
    lost = ["no block was timed"]
    lost += ["no DRAM bytes were counted"] if spec.get("counters") == Counters.DRAM else []
    return (
        f"warm-up and gate took {_seconds(header.measuring_s)}{gate} of the time budget of "
        f"{budget_s:g} s, so {' and '.join(lost)}"
    )


def sufficient_budget(run: RunData, cells: Sequence[CellResult]) -> str:
    """A `--time-budget` with room for `FEW_BLOCKS` timed blocks, for a run that timed none.

    SHARES x (spent + (FEW_BLOCKS + counted) x block), rounded up: `spent` is the time of warm-up
    and gate, `counted` the blocks that count DRAM bytes and must fit in too, `block` a
    batch of every cell at the median of those that ran (the run itself expects as much).
    """
    batch_s = median(batch.latency_ms for batch in run.batches) / 1e3 if run.batches else 0.0
    blocks = FEW_BLOCKS + _counted_blocks(run.header)
    return _rounded(SHARES * ((run.header.measuring_s or 0.0) + blocks * len(cells) * batch_s))


def _rounded(wanted: float) -> str:
    """A budget, rounded up."""
    return f"{10 * ceil(wanted / 10)}s" if wanted <= _FINE_S else f"{ceil(wanted / 60)}m"


def _counted_blocks(header: RunHeader) -> int:
    """As `RunSpec.counted_blocks` plans them."""
    spec, scenario = header.spec or {}, header.scenario or {}
    return int(scenario.get("batches", FEW_BLOCKS)) if spec.get("counters") == Counters.DRAM else 0


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _time_budget(run: RunData, cells: Sequence[CellResult]) -> Iterator[Finding]:
    clause = nothing_timed(run.header, cells)
    if clause is not None:
        budget = sufficient_budget(run, cells)
        clause = f"{clause[0].upper()}{clause[1:]}"
        yield found(FindingKind.TIME_BUDGET, clause=clause, budget=budget)
        return
    budget_s = (run.header.spec or {}).get("time_budget_s")
    by_part = run.header.spent_s or {}
    spent = sum(by_part.get(part, 0.0) for part in (WARM_UP, GATE, WHOLE))
    if budget_s and by_part.get(INTERLEAVED) and spent > CHECK_SHARE * budget_s:
        enough = _rounded(spent / CHECK_SHARE)
        values = {"spent": _seconds(spent), "budget": budget_s, "enough": enough}
        yield found(FindingKind.CHECKS, **values)


def _noise(run: RunData, cells: Sequence[CellResult]) -> Iterator[Finding]:
    """The A/A arm, and effects smaller than its noise."""
    arms = [cell for cell in cells if cell.arm == AA]
    if cells and not arms:
        yield _no_arm(run)
    for arm in arms:
        if arm.verdict == Verdict.INVALID:
            yield found(
                FindingKind.AA_DIFFERS,
                arm.label,
                severity=Severity.ERROR,
                sentence="off x off differs from itself: {reason}. No parity can be trusted.",
                remedy="Find what is not deterministic in the engine. Try other --engine-args or "
                "another --dtype.",
                reason=arm.reason,
            )
        if arm.verdict in (Verdict.FASTER, Verdict.SLOWER):
            ratio = f"{arm.ratio_to_off:.4f} [{arm.ratio_ci_low:.4f}, {arm.ratio_ci_high:.4f}]"
            switching = ""
            if arm.interleaved == WINDOWS and sham_windows(run)[SWITCHED]:
                switching = " It switches as stage does, so switching itself may bias every ratio."
            yield found(
                FindingKind.AA_DIFFERS,
                arm.label,
                verdict=arm.verdict,
                ratio=ratio,
                switching=switching,
            )
        if arm.ratio_ci_low is None or arm.ratio_ci_high is None:
            continue
        floor = max(abs(arm.ratio_ci_low - 1), abs(arm.ratio_ci_high - 1))
        drowned = [cell.label for cell in cells if _is_drowned(cell, floor)]
        if drowned:
            yield found(FindingKind.NOISE_FLOOR, floor=100 * floor, cells=", ".join(drowned))


def _no_arm(run: RunData) -> Finding:
    planned = [label for block in run.header.blocks or () for label in block.order or ()]
    if not any(AA in label for label in planned):
        return found(FindingKind.AA_MISSING)
    return found(
        FindingKind.AA_MISSING,
        sentence="The run ended before its A/A arm (off x off against itself) ran.",
        remedy="Resume the run. `nwor-bench sweep --resume` and its folder.",
    )


def _is_drowned(cell: CellResult, floor: float) -> bool:
    ratio = cell.ratio_to_off
    compared = cell.arm != AA and cell.verdict == Verdict.AMBIGUOUS
    return compared and ratio is not None and abs(ratio - 1) <= floor


def _few(header: RunHeader, cells: Sequence[CellResult]) -> Iterator[Finding]:
    """Too few blocks for cells that these decide, too few groups for interleaved ones."""
    by_blocks = [c for c in cells if c.ratio_to_off is not None and c.interleaved != WINDOWS]
    least = min((cell.batches for cell in by_blocks), default=FEW_BLOCKS)
    if least < FEW_BLOCKS and all(cell.groups is None for cell in by_blocks):
        yield found(FindingKind.FEW_BLOCKS, of="Timed blocks", blocks=least)
    elif least < FEW_BLOCKS:
        # Interleaved cells run whole batches in a few blocks, however many there are.
        remedy = f"Write --interleave batches, and --batches {FEW_BLOCKS} or more."
        of = "Timed blocks of whole batches"
        yield found(FindingKind.FEW_BLOCKS, remedy=remedy, of=of, blocks=least)
    few = [c for c in cells if c.groups is not None and c.groups < MIN_GROUPS]
    groups = min((cell.groups for cell in cells if cell.groups), default=ENOUGH_GROUPS)
    if few:
        yield found(
            FindingKind.FEW_GROUPS,
            least=MIN_GROUPS,
            groups=", ".join(f"{cell.label} {cell.groups}" for cell in few),
            decide=" Whole batches decide." if any(c.ratio_ci_low is not None for c in few) else "",
        )
    elif groups < ENOUGH_GROUPS and (header.stopped or "").startswith("--time-budget"):
        budget = _rounded(ENOUGH_GROUPS / groups * (header.measuring_s or 0.0))
        yield found(
            FindingKind.FEW_GROUPS,
            severity=Severity.NOTE,
            sentence="The budget allowed {groups} groups of windows a cell; {enough} are better.",
            remedy="Write --time-budget {budget}. Or fewer --cells, or more --max-new-tokens, "
            "which leaves less time to prefills.",
            groups=groups,
            enough=ENOUGH_GROUPS,
            budget=budget,
        )


def _idle(cells: Sequence[CellResult]) -> Iterator[Finding]:
    """Modes that never fired, one finding a reason; those beside a checked one weaken nothing."""
    checked = any(cell.verdict == Verdict.CHECKED and cell.arm != AA for cell in cells)
    severity = Severity.NOTE if checked else Severity.WARNING
    idle: dict[str | None, list[CellResult]] = {}
    for cell in sorted(cells, key=lambda cell: cell.nwor_mode == NworMode.OFF):
        if cell.verdict == Verdict.INEFFECTIVE:
            idle.setdefault(cell.reason, []).append(cell)
    for reason, own in idle.items():
        no_cuda = all(NO_CUDA in c.scv_fallbacks and not c.fallbacks for c in own)
        remedy = "Measure it on a GPU. It needs CUDA." if no_cuda else None
        names = ", ".join(cell.label for cell in own)
        yield found(
            FindingKind.INEFFECTIVE, severity=severity, remedy=remedy, cells=names, reason=reason
        )


def _no_graph(header: RunHeader) -> Iterator[Finding]:
    """Windows of all requests are larger than the largest of vLLM's full graphs. If each draft
    count has an engine, the header has the facts of the one without drafts."""
    if by_engines(header):
        return
    graphs = (header.engine or EngineStatus()).cuda_graphs
    most = None if graphs is None else graphs.largest_window
    scenario = header.scenario or {}
    requests, drafts = scenario.get("requests", 0), scenario.get("draft_tokens", 0)
    tokens = requests * (drafts + 1)
    if most is not None and tokens > most:
        values = {"tokens": tokens, "requests": requests, "drafts": drafts, "most": most}
        yield found(FindingKind.NO_GRAPH, enough=capture_size(tokens), **values)


def _states(run: RunData, cells: Sequence[CellResult]) -> Iterator[Finding]:
    """Recurrent states that stock wrote in mode stage: refused as the engine started, or in every
    window of a cell. Cells that staged nothing have another finding."""
    staged: dict[Cell, list[WindowRecord]] = {cell.cell: [] for cell in cells}
    for window in run.windows:
        if window.staged_tokens and window.cell in staged:
            staged[window.cell].append(window)
    staged = {cell: windows for cell, windows in staged.items() if windows}
    engine = run.header.engine or EngineStatus()
    refused = engine.states_unavailable
    if refused is not None and staged:
        yield found(
            FindingKind.STATES,
            severity=Severity.NOTE,
            sentence="Stage holds K/V only: stock writes the recurrent states ({reason}).",
            remedy=_STATES_REMEDY.get(refused[: refused.find(":") + 1], _IN_LOG),
            reason=refused,
        )
    idle = [cell for cell, own in staged.items() if not any(w.states_committed for w in own)]
    if engine.state_layers and idle:
        reasons = {w.states_reason or "no reason given" for cell in idle for w in staged[cell]}
        names = ", ".join(cell.label for cell in idle)
        yield found(FindingKind.STATES, cells=names, reasons=", ".join(sorted(reasons)))


def _one_cell(cell: CellResult) -> Iterator[Finding]:
    name = cell.label
    if cell.verdict == Verdict.AMBIGUOUS and cell.ratio_to_off is not None and cell.arm != AA:
        effect = cell.smallest_effect
        least = "" if effect is None else f" Smallest visible effect: {_percent(effect)}."
        reason = cell.reason or "its interval is too wide"
        yield found(FindingKind.AMBIGUOUS, name, reason=reason, least=least)
    if cell.compared == LATENCY_MS:
        yield found(FindingKind.LATENCY, name)
    left_out, matched = cell.unmatched_windows or 0, cell.matched_windows or 0
    if left_out > _UNMATCHED * (2 * matched + left_out):
        yield found(FindingKind.UNMATCHED, name, left_out=left_out, matched=matched)
    if cell.fallbacks and cell.verdict != Verdict.INEFFECTIVE:
        share = sum(cell.fallbacks.values()) / max(1, cell.windows)
        yield found(
            FindingKind.FALLBACKS,
            name,
            severity=Severity.WARNING if share > 0.1 else Severity.NOTE,
            share=_percent(share),
            reasons=", ".join(f"{reason} {n}" for reason, n in cell.fallbacks.items()),
        )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
