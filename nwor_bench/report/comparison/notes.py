"""What a reader of a comparison must know to trust its numbers as far as they go, no further."""

from collections.abc import Sequence

from nwor_bench.analysis.comparing.change_estimates import Change
from nwor_bench.analysis.comparing.compare import CellChange, Comparison, DecideBy
from nwor_bench.analysis.comparing.preconditions import unknown_machine
from nwor_bench.analysis.comparing.stored_run import SUMMARIES, StoredRun
from nwor_bench.analysis.paired import LATENCY_MS
from nwor_bench.report.comparison.text import change_text, name_of
from nwor_bench.report.sections.verdicts import CPU_SENTENCE, on_cpu
from nwor_bench.report.text import joined, plural


def notes(comparison: Comparison) -> list[str]:
    """What a reader must know to trust the numbers as far as they go, and no further."""
    found = [*_forced(comparison), *_method(comparison), *_sources(comparison)]
    found += _machines(comparison)
    found += [*_pairing(comparison), *_drift(comparison), *_acceptance(comparison)]
    if comparison.others:
        listed = "; ".join(map(str, comparison.others))
        found.append(f"What else differs, and may explain a change: {listed}.")
    found.append(
        "Each side is one run, that is one start of one process: what differs between two starts "
        "of the same code is in no interval. Run a change that matters again."
    )
    if on_cpu(comparison.new.header):
        found.append(CPU_SENTENCE)
    return found


def _forced(comparison: Comparison) -> list[str]:
    if not comparison.forced:
        return []
    listed = "; ".join(map(str, comparison.forced))
    return [f"Compared by --force although the runs differ in what they did or ran on: {listed}."]


def _method(comparison: Comparison) -> list[str]:
    return [f"{n}: {w.rstrip('.')}." for n, run in _sides(comparison) for w in run.warnings]


def _sources(comparison: Comparison) -> list[str]:
    return [
        f"{name} kept only cell summaries: times have no interval, and the ratio's is made from "
        "the intervals that the summaries hold."
        for name, run in _sides(comparison)
        if run.source == SUMMARIES
    ]


def _machines(comparison: Comparison) -> list[str]:
    """Runs are refused on two machines; on one that nobody wrote down they cannot be."""
    return [
        f"{name} did not record its {joined(missing)}: whether both runs had the same is not known."
        for name, run in _sides(comparison)
        if (missing := unknown_machine(run.header))
    ]


def _pairing(comparison: Comparison) -> list[str]:
    """How the deciding intervals came about: paired blocks or independent runs; windows or not."""
    by_ratio = comparison.decide_by is DecideBy.RATIO
    changes = [cell.ratio if by_ratio else cell.time for cell in comparison.cells]
    made = [change for change in changes if change is not None and change.interval is not None]
    found = []
    paired = [change.new_blocks for change in made if change.paired and change.new_blocks]
    if paired:
        found.append(
            f"Both runs timed {_span(paired)} of the same prompts, seed and temperature: they are "
            "compared block by block."
        )
    if any(not change.paired for change in made):
        found.append(
            "The runs are not paired (their prompts, seeds or number of blocks differ, or only "
            "summaries were kept): the intervals are those of two independent samples (Welch)."
        )
    if any(change.measure == LATENCY_MS for change in made):
        found.append("Times are those of whole batches where a run has no times of windows.")
    return [*found, *_untimed(comparison)]


def _untimed(comparison: Comparison) -> list[str]:
    """How many windows no time rests on."""
    times = [cell.time for cell in comparison.cells if cell.time is not None]
    without = [
        sum(getattr(t, name) or 0 for t in times) for name in ("base_untimed", "new_untimed")
    ]
    if not any(without):
        return []
    every = [sum(getattr(t, name) or 0 for t in times) for name in ("base_windows", "new_windows")]
    return [
        "Windows without a time of their own are left out: "
        f"{without[0]:,} of {every[0]:,} in BASE, {without[1]:,} of {every[1]:,} in NEW (on a GPU "
        "the first ones behind a prefill have none)."
    ]


def _span(blocks: Sequence[int]) -> str:
    low, high = min(blocks), max(blocks)
    return plural(low, "block") if low == high else f"{low} to {high} blocks"


def _drift(comparison: Comparison) -> list[str]:
    """What off x off shows of the machine, in a comparison that the ratio decides."""
    if comparison.decide_by is DecideBy.TIME:
        return []
    return [
        f"The machine: {name_of(cell, comparison)} itself took {change_text(cell.time)} times as "
        f"long as in BASE{_beyond(cell.time)}."
        for cell in comparison.cells
        if cell.is_reference and cell.time is not None
    ]


def _beyond(change: Change) -> str:
    if change.interval is None:
        return ""
    if change.interval.low <= 1 <= change.interval.high:
        return ", which the blocks' noise explains"
    return (
        ", more than the blocks' noise explains: vLLM, its libraries or the machine changed, and "
        "neither NWOR nor SCV did that"
    )


def _acceptance(comparison: Comparison) -> list[str]:
    """Cells that accepted otherwise on the same prompts: no window's time shows that."""
    changed = [name_of(cell, comparison) for cell in comparison.cells if _accepted_otherwise(cell)]
    if not changed:
        return []
    return [
        f"On the same prompts another share of drafts was accepted: {joined(changed)}. A window's "
        "time does not show that, tokens per second do."
    ]


def _accepted_otherwise(cell: CellChange) -> bool:
    if cell.base is None or cell.new is None or cell.time is None or not cell.time.paired:
        return False
    # A summary covers all blocks of its run: it tells something only if all of them were paired.
    whole = (cell.base.batches, cell.new.batches) == (cell.time.base_blocks, cell.time.new_blocks)
    return whole and cell.base.acceptance_rate != cell.new.acceptance_rate


def _sides(comparison: Comparison) -> tuple[tuple[str, StoredRun], ...]:
    return (("BASE", comparison.base), ("NEW", comparison.new))
