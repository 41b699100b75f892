"""What weakens the numbers of single cells."""

from collections.abc import Iterator, Sequence

from nwor_bench.analysis.effects import WINDOWS
from nwor_bench.analysis.findings.finding import Finding, FindingKind, Severity
from nwor_bench.analysis.findings.time_budget import FEW_BLOCKS
from nwor_bench.analysis.paired import LATENCY_MS
from nwor_bench.instruments.robust import MIN_GROUPS
from nwor_bench.records.types import AA, CellResult, Verdict

_UNMATCHED = 0.05
"""Share of windows that may go unmatched before it is said."""


def cell_findings(cells: Sequence[CellResult]) -> Iterator[Finding]:
    """What weakens single cells: too little of them, idle modes, outliers, direct writes."""
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
            f"{', '.join(cell.label for cell in own)} never fired: {reason}.",
            _remedy_of_idle(reason),
        )
    for cell in cells:
        yield from _one_cell(cell)


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
            "Its ratio is that of the mixture; see Evidence.",
            cell.label,
        )


def _remedy_of_idle(reason: str | None) -> str:
    if "no_cuda" in (reason or ""):
        return "Nothing to mend here: it needs CUDA. Measure it on a GPU."
    return "Evidence lists the reason; its time says nothing of its mode."


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
