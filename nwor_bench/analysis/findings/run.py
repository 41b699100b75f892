"""Findings: what in a run weakens its numbers, and what to do about it. Pure.

A finding is typed so that a report can group it, a CI job can act on it, and nobody has to read
sentences to know that the GPU throttled. Nothing is dropped because of a finding: outlying
blocks and noisy batches count, and are named here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from nwor_bench.analysis.cell_data import REFERENCE
from nwor_bench.analysis.findings.finding import Finding, FindingKind, Severity
from nwor_bench.analysis.findings.interleaved import (
    interleaved_findings,
    with_borne_warnings_as_notes,
)
from nwor_bench.analysis.findings.machine import machine_findings
from nwor_bench.analysis.findings.time_budget import FEW_BLOCKS, time_budget_findings
from nwor_bench.analysis.interleaved.agreement import WINDOWS
from nwor_bench.analysis.interleaved.effects import effects_over_off, pair_effects
from nwor_bench.analysis.interleaved.robust import MIN_GROUPS
from nwor_bench.analysis.paired import LATENCY_MS
from nwor_bench.analysis.significance import SIGNIFICANCE, least_signed_rank_p
from nwor_bench.records.engine_status import EngineStatus
from nwor_bench.records.finished_blocks import SUPERSEDED_EVENT, block_name
from nwor_bench.records.store import RunData
from nwor_bench.records.types import AA, CellResult, Verdict

ON_CPU = "Nothing to do, as times on a CPU say nothing of NWOR on a GPU."

_BLOCKS_HELP = (FindingKind.FEW_BLOCKS, FindingKind.AMBIGUOUS, FindingKind.NOISE_FLOOR)
"""What more blocks would mend, where times count."""

_UNMATCHED = 0.05
"""Share of windows that may go unmatched before it is said."""


def findings(run: RunData, cells: Sequence[CellResult]) -> list[Finding]:
    """All findings of a run, the severest first."""
    effects = effects_over_off(pair_effects(run))
    found = [
        *time_budget_findings(run, cells),
        *_noise(run, cells),
        *_each_cell(cells),
        *interleaved_findings(effects, cells),
        *machine_findings(run),
        *_records(run),
    ]
    found = with_borne_warnings_as_notes(found, effects, cells)
    if (run.header.engine or EngineStatus()).device == "cpu":
        found = [replace(f, remedy=ON_CPU) if f.kind in _BLOCKS_HELP else f for f in found]
    order = {severity: place for place, severity in enumerate(reversed(Severity))}
    return sorted(found, key=lambda finding: order[finding.severity])


def _noise(run: RunData, cells: Sequence[CellResult]) -> Iterator[Finding]:
    """The A/A arm, and what it says of the other cells."""
    arms = [cell for cell in cells if cell.arm == AA]
    compared = [cell for cell in cells if cell.arm != AA and cell.verdict != REFERENCE]
    if cells and not arms:
        yield _no_arm(run)
    for arm in arms:
        if arm.verdict == Verdict.INVALID:
            yield Finding(
                FindingKind.AA_DIFFERS,
                Severity.ERROR,
                f"off x off differs from itself: {arm.reason}. No cell's parity means anything.",
                "Look for what is not deterministic in the engine: other --engine-args, --dtype.",
                arm.label,
            )
        if arm.verdict in (Verdict.FASTER, Verdict.SLOWER):
            yield Finding(
                FindingKind.AA_DIFFERS,
                Severity.WARNING,
                f"off x off against itself came out {arm.verdict} ({_ratio(arm)}): one in twenty "
                "runs does so by chance, more if something drifts.",
                "Measure once more, on a quieter machine if it comes again.",
                arm.label,
            )
        floor = _floor(arm)
        drowned = [c for c in compared if _is_drowned(c, floor)]
        if floor is not None and drowned:
            yield Finding(
                FindingKind.NOISE_FLOOR,
                Severity.WARNING,
                f"The noise floor, {100 * floor:.2f} %, is above the effect of {_names(drowned)}.",
                "Add blocks (--batches, or --ci-width 0.5%): four times as many halve the floor.",
            )


def _no_arm(run: RunData) -> Finding:
    blocks = run.header.blocks or ()
    message = "The run has no A/A arm (off x off against itself), so its noise floor is not known."
    remedy = "Measure anew with this version: every sweep has one."
    if any(AA in label for block in blocks for label in block.order or ()):
        message = "The run ended before its A/A arm (off x off against itself) had its turn."
        remedy = "Go on with it: `nwor-bench sweep --resume` and its folder."
    return Finding(FindingKind.AA_MISSING, Severity.NOTE, message, remedy)


def _few_blocks(cells: Sequence[CellResult]) -> Finding:
    """Cells that take turns run whole batches in a few blocks, however many there are."""
    of = "Timed blocks"
    remedy = f"Write --batches {FEW_BLOCKS} or more, or --ci-width with the width that you need."
    if any(cell.groups is not None for cell in cells):
        of = "Timed blocks of whole batches"
        remedy = f"Write --interleave batches, and --batches {FEW_BLOCKS} or more."
    message = f"{of}: {min(cell.batches for cell in cells)}. So few leave intervals wide."
    return Finding(FindingKind.FEW_BLOCKS, Severity.NOTE, message, remedy)


def _few_groups(cells: Sequence[CellResult]) -> Iterator[Finding]:
    """Cells that took turns and have no interval by groups, perhaps one by whole batches."""
    few = [c for c in cells if c.groups is not None and c.groups < MIN_GROUPS]
    if few:
        listed = ", ".join(f"{cell.label} {cell.groups}" for cell in few)
        known = any(cell.ratio_ci_low is not None for cell in few)
        yield Finding(
            FindingKind.FEW_GROUPS,
            Severity.WARNING,
            f"An interval needs {MIN_GROUPS} groups of windows that count. There are: {listed}."
            + (" Whole batches decide." if known else ""),
            "Write a longer --time-budget or more --batches, and more --max-new-tokens: a group "
            "counts if it ends within its batch.",
        )


def _each_cell(cells: Sequence[CellResult]) -> Iterator[Finding]:
    by_blocks = [c for c in cells if c.ratio_to_off is not None and c.interleaved != WINDOWS]
    if by_blocks and min(cell.batches for cell in by_blocks) < FEW_BLOCKS:
        yield _few_blocks(by_blocks)
    yield from _few_groups(cells)
    idle: dict[str | None, list[CellResult]] = {}
    for cell in cells:
        if cell.verdict == Verdict.INEFFECTIVE:
            idle.setdefault(cell.reason, []).append(cell)
    for reason, own in idle.items():
        yield Finding(
            FindingKind.INEFFECTIVE,
            Severity.WARNING,
            f"{_names(own)} never fired: {reason}.",
            _remedy_of_idle(reason),
        )
    for cell in cells:
        yield from _one_cell(cell)


def _one_cell(cell: CellResult) -> Iterator[Finding]:
    if cell.verdict == Verdict.AMBIGUOUS and cell.ratio_to_off is not None and cell.arm != AA:
        least = cell.smallest_effect
        seen = "" if least is None else f" The smallest effect to be seen: {_percent(least)}."
        yield Finding(
            FindingKind.AMBIGUOUS,
            Severity.WARNING,
            f"{cell.label} is AMBIGUOUS: {cell.reason or 'its interval is too wide'}.{seen}",
            "Add blocks: four times as many halve the interval.",
            cell.label,
        )
    if cell.verdict in (Verdict.FASTER, Verdict.SLOWER) and _rank_test_disagrees(cell):
        yield Finding(
            FindingKind.RANK_TEST,
            Severity.WARNING,
            f"{cell.label} is {cell.verdict}, but Wilcoxon's signed rank test does not agree "
            f"(adjusted p = {cell.wilcoxon_p_holm:.3f}): a few blocks carry the difference.",
            "Look at the blocks one by one, and add blocks.",
            cell.label,
        )
    if cell.outlier_blocks:
        listed = ", ".join(map(str, cell.outlier_blocks))
        several = len(cell.outlier_blocks) > 1
        who, end = (f"blocks {listed}", "") if several else (f"block {listed}", "s")
        yield Finding(
            FindingKind.OUTLIERS,
            Severity.NOTE,
            f"{cell.label}: {who} stand{end} apart from the others, and count{end} all the same.",
            "If the conditions of its batches show why, mend that and measure anew.",
            cell.label,
        )
    yield from _matching(cell)
    yield from _fallbacks(cell)


def _matching(cell: CellResult) -> Iterator[Finding]:
    if cell.compared == LATENCY_MS:
        yield Finding(
            FindingKind.LATENCY,
            Severity.WARNING,
            f"{cell.label}: whole batches were compared, not windows, because windows have no "
            "time or none match.",
            "Read the ratio as that of batches: it holds the prefill, and unequal work if the "
            "cells accepted differently.",
            cell.label,
        )
    left_out, matched = cell.unmatched_windows or 0, cell.matched_windows or 0
    if left_out > _UNMATCHED * (2 * matched + left_out):
        yield Finding(
            FindingKind.UNMATCHED,
            Severity.NOTE,
            f"{cell.label}: {left_out} windows found none of equal batch size and context in "
            f"the other cell and are left out of its ratio ({matched} were matched).",
            "Use temperature 0, where both cells run the same windows.",
            cell.label,
        )


def _fallbacks(cell: CellResult) -> Iterator[Finding]:
    if cell.fallbacks and cell.verdict != Verdict.INEFFECTIVE:
        share = sum(cell.fallbacks.values()) / max(1, cell.windows)
        reasons = ", ".join(f"{reason} {count}" for reason, count in cell.fallbacks.items())
        yield Finding(
            FindingKind.FALLBACKS,
            Severity.WARNING if share > 0.1 else Severity.NOTE,
            f"{cell.label}: {_percent(share)} of its windows were written directly ({reasons}).",
            "Its ratio is that of the mixture; see 'Fallbacks by reason'.",
            cell.label,
        )


def _records(run: RunData) -> Iterator[Finding]:
    for event in run.events:
        if event.get("event") == "resumed":
            for text in event.get("warnings") or []:
                yield Finding(
                    FindingKind.TORN,
                    Severity.NOTE,
                    f"The run was resumed. {text}",
                    "Nothing to do: what was left out was measured again.",
                )
        if event.get("event") == SUPERSEDED_EVENT:
            count = len(event["batches"])
            yield Finding(
                FindingKind.SUPERSEDED,
                Severity.NOTE,
                f"{block_name((event['phase'], event['block']))} was cut and run again whole: "
                f"{count} {'batch' if count == 1 else 'batches'} of its first try "
                f"{'is' if count == 1 else 'are'} set aside.",
                "Nothing to do: the cells of a block come from one engine process.",
            )


def _remedy_of_idle(reason: str | None) -> str:
    if "no_cuda" in (reason or ""):
        return "Nothing to mend here: it needs CUDA. Measure it on a GPU."
    return "Look up the reason under 'Fallbacks by reason'; its time says nothing of its mode."


def _floor(arm: CellResult) -> float | None:
    low, high = arm.ratio_ci_low, arm.ratio_ci_high
    return None if low is None or high is None else max(abs(low - 1), abs(high - 1))


def _is_drowned(cell: CellResult, floor: float | None) -> bool:
    ratio = cell.ratio_to_off
    return (
        floor is not None
        and ratio is not None
        and cell.verdict == Verdict.AMBIGUOUS
        and abs(ratio - 1) <= floor
    )


def _rank_test_disagrees(cell: CellResult) -> bool:
    """Only where so many blocks could have reached the level at all."""
    p_value = cell.wilcoxon_p_holm
    if p_value is None or cell.wilcoxon_p is None or p_value < SIGNIFICANCE:
        return False
    factor = p_value / cell.wilcoxon_p if cell.wilcoxon_p else 1.0
    return least_signed_rank_p(cell.batches) * max(1.0, factor) < SIGNIFICANCE


def _names(cells: Sequence[CellResult]) -> str:
    return ", ".join(cell.label for cell in cells)


def _ratio(cell: CellResult) -> str:
    return f"{cell.ratio_to_off:.4f} [{cell.ratio_ci_low:.4f}, {cell.ratio_ci_high:.4f}]"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
