"""The sample: too little was timed, or the ratios differ by how they are taken."""

from collections.abc import Sequence
from math import ceil
from statistics import median

from nwor_bench.analysis.effects import WINDOWS, carries_over, mean_disagrees, sham_windows
from nwor_bench.analysis.findings.finding import Case, Cases, Evidence, FindingKind, Row, Severity
from nwor_bench.records.cell import SWITCHED
from nwor_bench.records.header import RunHeader
from nwor_bench.records.store import RunData
from nwor_bench.records.types import AA, CellResult, RunStatus, Verdict
from nwor_bench.stats.interval import Interval
from nwor_bench.stats.robust import MIN_GROUPS
from nwor_bench.workload.run_spec import Counters

ENOUGH_BLOCKS = 10
"""Fewest blocks at which intervals are not wide."""

ON_CPU = "Nothing to do. Times on a CPU do not apply to NWOR on a GPU."
OF_DRAFTS = "Write a longer --time-budget. Four times as many blocks halve the interval."
"""Remedies: NWOR on a CPU; draft counts, which are no statement on NWOR and have no --batches."""

SHARES = 1.3
"""A budget over the time that it must leave: a fifth may go to warm-up."""
FINE_S = 120
"""Up to here a budget is rounded up to 10 s, above to whole minutes."""


def nothing_timed(header: RunHeader, cells: Sequence[CellResult]) -> str | None:
    """How the time budget was spent, as a clause, if it left no timed block; None otherwise, and
    for a run that was interrupted or failed: there the clock is not the cause."""
    budget_s = header.spec.time_budget_s
    timed = any(cell.batches or cell.groups for cell in cells)
    by_clock = header.status is RunStatus.COMPLETE and header.stopped is not None
    if not by_clock or timed or budget_s is None or header.measuring_s is None:
        return None
    gate_s = header.kv_gate.gate_seconds
    gate = "" if gate_s is None else f" (the gate {_seconds(gate_s)} of it)"
    dram = " and no DRAM bytes were counted" if header.spec.counters == Counters.DRAM else ""
    return (
        f"warm-up and gate took {_seconds(header.measuring_s)}{gate} of the time budget of "
        f"{budget_s:g} s, so no block was timed{dram}"
    )


def sufficient_budget(run: RunData, cells: Sequence[CellResult]) -> str:
    """A `--time-budget` with room for `ENOUGH_BLOCKS` timed blocks, for a run that timed none.

    SHARES x (warm-up and gate + blocks x a block), rounded up. Blocks that count DRAM bytes must
    fit in too (as `RunSpec.counted_blocks` plans them); a block is a batch of every cell at the
    median of those that ran (the run itself expects as much).
    """
    batch_s = median(batch.latency_ms for batch in run.batches) / 1e3 if run.batches else 0.0
    counted = int((run.header.scenario or {}).get("batches", ENOUGH_BLOCKS))
    blocks = ENOUGH_BLOCKS + (counted if run.header.spec.counters == Counters.DRAM else 0)
    wanted = SHARES * ((run.header.measuring_s or 0.0) + blocks * len(cells) * batch_s)
    return f"{10 * ceil(wanted / 10)}s" if wanted <= FINE_S else f"{ceil(wanted / 60)}m"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _time_budget(evidence: Evidence) -> Cases:
    clause = nothing_timed(evidence.run.header, evidence.cells)
    if clause is not None:
        budget = sufficient_budget(evidence.run, evidence.cells)
        yield Case({"what": f"{clause[0].upper()}{clause[1:]}", "budget": budget})


def _aa_differs(evidence: Evidence) -> Cases:
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
            values = {"verdict": arm.verdict, "ratio": _interval(arm.ratio), "switching": ""}
            if arm.interleaved == WINDOWS and sham_windows(evidence.run)[SWITCHED]:
                switching = " It switches as stage does, so switching itself may bias every ratio."
                values["switching"] = switching
            yield Case(values, arm.label)


def _few_groups(evidence: Evidence) -> Cases:
    few = [c for c in evidence.cells if c.groups is not None and c.groups < MIN_GROUPS]
    if few:
        decide = " Whole batches decide." if any(c.half_width is not None for c in few) else ""
        listed = ", ".join(f"{cell.label} {cell.groups}" for cell in few)
        yield Case({"least": MIN_GROUPS, "groups": listed, "decide": decide})


def _ambiguous(evidence: Evidence) -> Cases:
    for cell in evidence.cells:
        if cell.verdict == Verdict.AMBIGUOUS and cell.ratio is not None and cell.arm != AA:
            effect = cell.smallest_effect
            least = "" if effect is None else f" Smallest visible effect: {100 * effect:.1f} %."
            remedy = None
            if evidence.run.header.spec.draft_counts is not None and cell.nwor_mode == "off":
                remedy = OF_DRAFTS
            elif evidence.engine.device == "cpu":
                remedy = ON_CPU
            elif cell.groups is not None and cell.interleaved != WINDOWS:
                # Interleaved cells run whole batches in a few blocks, however many there are.
                remedy = f"Write --interleave batches, and --batches {ENOUGH_BLOCKS} or more."
            reason = cell.reason or "its interval is too wide"
            yield Case({"reason": reason, "least": least}, cell.label, remedy=remedy)


def _windows_disagree(evidence: Evidence) -> Cases:
    for cell, effect in evidence.interleaved:
        if effect.decisive is not None and cell.interleaved != WINDOWS:
            whole = "" if cell.whole is None else _interval(cell.whole)
            yield Case({"windows": _interval(effect.decisive.robust), "batches": whole}, cell.label)


def _carry_over(evidence: Evidence) -> Cases:
    for cell, effect in evidence.interleaved:
        if effect.carry_over is not None and carries_over(effect, evidence.compared_cells):
            yield Case({"ratio": _interval(effect.carry_over)}, cell.label)


def _long_windows(evidence: Evidence) -> Cases:
    for cell, effect in evidence.interleaved:
        both = effect.decisive
        if both is not None and mean_disagrees(effect, evidence.compared_cells):
            yield Case({"mean": _interval(both.mean), "robust": _interval(both.robust)}, cell.label)


def _interval(ratio: Interval) -> str:
    return f"{ratio.value:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]"


ROWS = (
    Row(FindingKind.TIME_BUDGET, _time_budget, "{what}.", "Write --time-budget {budget}.",
        "The gate left no time to measure"),
    Row(FindingKind.AA_DIFFERS, _aa_differs,
        "off x off against itself is {verdict} ({ratio}): one in twenty runs is by chance, more if "
        "something drifts.{switching}",
        "Measure again. If it repeats, use a quieter machine.", "off x off differs from itself"),
    Row(FindingKind.FEW_GROUPS, _few_groups,
        "An interval needs {least} groups of windows that count. There are: {groups}.{decide}",
        "Measure longer, in longer batches. Write a longer --time-budget or more --batches, and "
        "more --max-new-tokens: a group counts if it ends within its batch.",
        "Too few groups of windows"),
    Row(FindingKind.AMBIGUOUS, _ambiguous, "{name} is AMBIGUOUS: {reason}.{least}",
        "Add blocks (--batches 20). Four times as many halve the interval.", "Too uncertain"),
    Row(FindingKind.WINDOWS_DISAGREE, _windows_disagree,
        "{name}: neighbouring windows give {windows}, whole batches {batches}. The intervals do "
        "not overlap, so whole batches decide.",
        "Use --interleave batches. Report the disagreement.", "Other ratios by windows"),
    Row(FindingKind.CARRY_OVER, _carry_over,
        "{name}: its ratio depends on the length of runs of windows. In runs of two it is {ratio} "
        "times that in long ones.",
        "Use --interleave batches. A mode affects the window after it.",
        "Carry-over between windows"),
    Row(FindingKind.LONG_WINDOWS, _long_windows,
        "{name}: a few long windows carry a difference. The mean ratio is {mean}, without their "
        "weight it is {robust}.",
        "The verdict leaves them out. Find the cause in windows.csv.", "A few long windows"),
)  # fmt: skip
