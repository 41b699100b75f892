"""What a cell's records allow one to say. By the first rule that holds, a cell is

1. INVALID if its output differed from that of off x off in any batch, or its counts do not
   add up: it carries no time at all;
2. "reference" if it is off x off itself;
3. INEFFECTIVE if its mode never fired: NWOR `stage` that staged nothing, or, with NWOR off,
   an SCV mode that validated nothing as asked. It carries no ratio;
4. AMBIGUOUS if nothing can be compared: no valid off x off, too few blocks, output not checked;
5. what `stats.verdict` says of the paired latency ratio.

A `stage` cell whose SCV mode never fired keeps its NWOR verdict; its `scv_status` and reason
tell the rest.
"""

from collections import Counter
from dataclasses import dataclass

from nwor_bench.cell_data import REFERENCE, CellData
from nwor_bench.records import NworMode, Verdict
from nwor_bench.stats import MIN_BLOCKS, geometric_mean_ratio, paired_ratio, verdict


@dataclass(frozen=True)
class Judgement:
    """The fields of a CellResult that a comparison gives."""

    verdict: str
    reason: str | None = None
    ratio_to_off: float | None = None
    ratio_ci_low: float | None = None
    ratio_ci_high: float | None = None


def judge(
    cell: CellData, baseline: CellData | None, *, violation: str | None, seed: int
) -> Judgement:
    """Judge one cell.

    Args:
        cell: the cell.
        baseline: off x off on the same blocks, or None if there is none to trust.
        violation: the first count of the cell that does not add up, if any.
        seed: of the bootstrap.
    """
    if cell.parity == Verdict.INVALID:
        where = f" ({cell.first_mismatch})" if cell.first_mismatch else ""
        return Judgement(str(Verdict.INVALID), f"it changed the model's output{where}")
    if violation is not None:
        return Judgement(str(Verdict.INVALID), violation)
    if cell.is_baseline:
        return Judgement(REFERENCE)
    idle = _idle_reason(cell)
    if idle is not None:
        return Judgement(str(Verdict.INEFFECTIVE), idle)
    if baseline is None:
        return Judgement(str(Verdict.AMBIGUOUS), "there is no valid off x off to compare it with")
    return _compare(cell, baseline, seed)


def _compare(cell: CellData, baseline: CellData, seed: int) -> Judgement:
    treated, reference = _paired_latencies(cell, baseline)
    if not treated:
        return Judgement(str(Verdict.AMBIGUOUS), "no block was timed both in it and in off x off")
    ratio = geometric_mean_ratio(treated, reference)
    interval = paired_ratio(treated, reference, seed=seed)
    if interval is None:
        few = f"its timed blocks are {len(treated)}, and an interval needs {MIN_BLOCKS}"
        return Judgement(str(Verdict.AMBIGUOUS), few, ratio)
    ends = (interval.low, interval.high)
    if cell.parity is None:
        return Judgement(str(Verdict.AMBIGUOUS), "its output was not checked", ratio, *ends)
    idle_scv = _idle_scv(cell)
    reason = f"{idle_scv}; its NWOR result stands" if idle_scv else None
    return Judgement(str(verdict(interval)), reason, ratio, *ends)


def _idle_reason(cell: CellData) -> str | None:
    """Why the cell's mode never fired, or None if it did or nothing was timed yet."""
    if cell.key[1] != NworMode.STAGE:
        return _idle_scv(cell)
    if cell.staged or not cell.timed:
        return None
    if not any(batch.draft_tokens for batch in cell.timed):
        return "no draft token was proposed, so nothing was staged"
    return f"no draft token was staged{_most_common(cell.fallbacks)}"


def _idle_scv(cell: CellData) -> str | None:
    if cell.scv_status != Verdict.INEFFECTIVE:
        return None
    return f"SCV validated no window as asked{_most_common(cell.scv_fallbacks)}"


def _most_common(reasons: dict[str, int]) -> str:
    ranked = Counter(reasons).most_common(1)
    return f" (most often: {ranked[0][0]})" if ranked else ""


def _paired_latencies(cell: CellData, baseline: CellData) -> tuple[list[float], list[float]]:
    """Latencies in ms of the blocks that both cells ran, block by block."""
    treated, reference = _block_latencies(cell), _block_latencies(baseline)
    blocks = sorted(treated.keys() & reference.keys())
    return [treated[block] for block in blocks], [reference[block] for block in blocks]


def _block_latencies(cell: CellData) -> dict[int, float]:
    sums: dict[int, float] = {}
    for batch in cell.timed:
        sums[batch.block] = sums.get(batch.block, 0.0) + batch.latency_ms
    return sums
