"""The notes of a comparison: what weakens its numbers, and how they were made."""

from collections.abc import Sequence

from nwor_bench.analysis.comparing.change_estimates import Change
from nwor_bench.analysis.comparing.compare import CellChange, Comparison
from nwor_bench.analysis.comparing.decide_by import DecideBy
from nwor_bench.analysis.comparing.preconditions import unknown_machine
from nwor_bench.analysis.comparing.stored_run import SUMMARIES, StoredRun
from nwor_bench.analysis.interleaved.effects import DEVICE_MS, WALL_MS
from nwor_bench.analysis.paired import LATENCY_MS
from nwor_bench.report.comparison.text import change_text, name_of
from nwor_bench.report.sections.verdicts import CPU_SENTENCE, on_cpu
from nwor_bench.report.text import joined, plural


def notes(comparison: Comparison) -> list[str]:
    """Caveats of the comparison, and how it was made."""
    found = [*_forced(comparison), *_warnings(comparison), *_sources(comparison)]
    found += _machines(comparison)
    found += [*_pairing(comparison), *_drift(comparison), *_acceptance(comparison)]
    if comparison.others:
        listed = "; ".join(map(str, comparison.others))
        found.append(f"Other differences, which may explain a change: {listed}.")
    found.append(
        "Each side is one run (one start of one process). No interval covers differences between "
        "two starts of the same code, so repeat both runs before acting on a change."
    )
    if on_cpu(comparison.new.header):
        found.append(CPU_SENTENCE)
    return found


def _forced(comparison: Comparison) -> list[str]:
    if not comparison.forced:
        return []
    listed = "; ".join(map(str, comparison.forced))
    return [f"Compared with --force, although the runs differ in work or machine: {listed}."]


def _warnings(comparison: Comparison) -> list[str]:
    return [f"{n}: {w.rstrip('.')}." for n, run in _sides(comparison) for w in run.warnings]


def _sources(comparison: Comparison) -> list[str]:
    return [
        f"{name} kept only cell summaries: times have no interval, and the ratio's interval comes "
        "from the summaries."
        for name, run in _sides(comparison)
        if run.source == SUMMARIES
    ]


def _machines(comparison: Comparison) -> list[str]:
    """Facts of the machine that a run did not record, so that they could not be compared."""
    return [
        f"{name} did not record its {joined(missing)}: the runs may differ in this."
        for name, run in _sides(comparison)
        if (missing := unknown_machine(run.header))
    ]


def _pairing(comparison: Comparison) -> list[str]:
    """How the deciding intervals were made: paired or unpaired, from windows or batches."""
    by_ratio = comparison.decide_by is DecideBy.RATIO
    changes = [cell.ratio if by_ratio else cell.time for cell in comparison.cells]
    made = [change for change in changes if change is not None and change.interval is not None]
    found = []
    paired = [change.new_blocks for change in made if change.paired and change.new_blocks]
    if paired:
        found.append(
            f"Both runs timed {_span(paired)} of the same prompts, seed and temperature, which are "
            "compared in pairs."
        )
    in_turn = [change for change in made if change.measure in (DEVICE_MS, WALL_MS)]
    if in_turn:
        found.append(
            "Ratios are those of windows in turn: each run's interval comes from its own groups, "
            "and the two are independent samples (Welch)."
        )
    if any(not change.paired and change not in in_turn for change in made):
        found.append(
            "The runs are not paired (prompts, seeds or number of blocks differ, or only summaries "
            "were kept): intervals are for two independent samples (Welch)."
        )
    if any(change.measure == LATENCY_MS for change in made):
        found.append("Some times are those of whole batches: a run has no window times there.")
    return [*found, *_untimed(comparison)]


def _untimed(comparison: Comparison) -> list[str]:
    """How many windows have no time and are left out."""
    times = [cell.time for cell in comparison.cells if cell.time is not None]
    without = [
        sum(getattr(t, name) or 0 for t in times) for name in ("base_untimed", "new_untimed")
    ]
    if not any(without):
        return []
    every = [sum(getattr(t, name) or 0 for t in times) for name in ("base_windows", "new_windows")]
    return [
        f"Windows without a time are left out: {without[0]:,} of {every[0]:,} in BASE, "
        f"{without[1]:,} of {every[1]:,} in NEW (on a GPU the first window after a prefill has "
        "none)."
    ]


def _span(blocks: Sequence[int]) -> str:
    low, high = min(blocks), max(blocks)
    return plural(low, "block") if low == high else f"{low} to {high} blocks"


def _drift(comparison: Comparison) -> list[str]:
    """The change of off x off's own time, if the ratio decides."""
    if comparison.decide_by is DecideBy.TIME:
        return []
    return [
        f"Machine: {name_of(cell, comparison)} took {change_text(cell.time)} times as long as in "
        f"BASE{_beyond(cell.time)}."
        for cell in comparison.cells
        if cell.is_reference and cell.time is not None
    ]


def _beyond(change: Change) -> str:
    if change.interval is None:
        return ""
    if change.interval.low <= 1 <= change.interval.high:
        return ", within the blocks' noise"
    return ", more than the blocks' noise: vLLM, its libraries or the machine changed, not NWOR"


def _acceptance(comparison: Comparison) -> list[str]:
    """Cells whose acceptance changed on the same prompts; a window's time does not show that."""
    changed = [name_of(cell, comparison) for cell in comparison.cells if _acceptance_changed(cell)]
    if not changed:
        return []
    return [
        f"Acceptance changed on the same prompts: {joined(changed)}. This shows in tokens per "
        "second, not in a window's time."
    ]


def _acceptance_changed(cell: CellChange) -> bool:
    if cell.base is None or cell.new is None or cell.time is None or not cell.time.paired:
        return False
    # A summary covers all blocks of its run, so it counts only if all of them were paired.
    whole = (cell.base.batches, cell.new.batches) == (cell.time.base_blocks, cell.time.new_blocks)
    return whole and cell.base.acceptance_rate != cell.new.acceptance_rate


def _sides(comparison: Comparison) -> tuple[tuple[str, StoredRun], ...]:
    return (("BASE", comparison.base), ("NEW", comparison.new))
