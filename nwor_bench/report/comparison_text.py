"""The words of a comparison: headline, rows of text, reasons, and notes."""

from collections.abc import Mapping

from nwor_bench.analysis.comparing.change_estimates import Change
from nwor_bench.analysis.comparing.compare import CellChange, ChangeVerdict, Comparison
from nwor_bench.analysis.comparing.draft_changes import TIME_PER_TOKEN
from nwor_bench.analysis.comparing.preconditions import DecideBy
from nwor_bench.analysis.comparing.stored_run import StoredRun
from nwor_bench.analysis.effects import DEVICE_MS, WALL_MS
from nwor_bench.analysis.paired import LATENCY_MS
from nwor_bench.report.answer import CPU_SENTENCE, on_cpu
from nwor_bench.report.text import NOT_MEASURED, joined, plural, with_bounds

_PHRASES = {
    ChangeVerdict.REGRESSION: "got worse",
    ChangeVerdict.IMPROVEMENT: "got better",
    ChangeVerdict.SAME: "the same",
    ChangeVerdict.AMBIGUOUS: "undecided",
    ChangeVerdict.NOT_COMPARED: "not compared",
    ChangeVerdict.ONLY_IN_BASE: "only in BASE",
    ChangeVerdict.ONLY_IN_NEW: "only in NEW",
}


def name_of(cell: CellChange, comparison: Comparison) -> str:
    """The cell's label, with its pair if there are several pairs."""
    pairs = {each.cell.pair for each in comparison.cells}
    return cell.label if len(pairs) == 1 else f"{cell.cell.pair}: {cell.label}"


def headline(comparison: Comparison) -> str:
    """One or two sentences: whether NEW is worse than BASE, and in which cells."""
    groups = {
        outcome: [name_of(cell, comparison) for cell in comparison.having(outcome)]
        for outcome in ChangeVerdict
    }
    rest = [f"{joined(names)} {_PHRASES[o]}" for o, names in groups.items() if names]
    return f"{_start(comparison)}: {'; '.join(rest)}."


def headline_of_all(comparisons: Mapping[str, Comparison]) -> str:
    """Of two sweeps: the cells that got worse, run by run; the other runs by what is said of
    them."""
    groups: dict[str, list[str]] = {}
    for place, own in comparisons.items():
        worse = [name_of(cell, own) for cell in own.having(ChangeVerdict.REGRESSION)]
        text = f"{joined(worse)} {_PHRASES[ChangeVerdict.REGRESSION]}" if worse else _start(own)
        groups.setdefault(text, []).append(place)
    return " ".join(f"{joined(places)}: {text}." for text, places in groups.items())


def _start(comparison: Comparison) -> str:
    worse = comparison.having(ChangeVerdict.REGRESSION)
    if worse:
        return plural(len(worse), "regression")
    if comparison.too_noisy:
        floor, threshold = comparison.noise_floor or 0.0, comparison.threshold
        return (
            f"Inconclusive: by chance alone the A/A arm changed by {_fraction(floor)}, more than "
            f"--threshold ({_fraction(threshold)})"
        )
    if comparison.untimed:
        sides = ((name, run.cells.values()) for name, run in _sides(comparison))
        untimed = [name for name, own in sides if not any(c.batches or c.groups for c in own)]
        if untimed:
            return f"Not comparable, nothing was timed in {joined(untimed)}"
        return "Not comparable, no cell's change has an interval"
    if comparison.having(ChangeVerdict.AMBIGUOUS, ChangeVerdict.ONLY_IN_BASE):
        return "No regression was shown, and none can be ruled out"
    return "No regression"


def change_text(change: Change | None) -> str:
    """A change as `1.012 [1.004, 1.020]`, without brackets if there is no interval."""
    if change is None:
        return NOT_MEASURED
    if change.interval is None:
        return with_bounds(change.ratio, None, None)
    return with_bounds(change.ratio, change.interval.low, change.interval.high)


def reasons(comparison: Comparison) -> list[str]:
    """Reasons for the cells' verdicts; cells with the same reason share a line."""
    groups: dict[tuple[str, str], list[str]] = {}
    for cell in comparison.cells:
        if cell.reason:
            place = (str(cell.outcome), cell.reason.rstrip("."))
            groups.setdefault(place, []).append(name_of(cell, comparison))
    return [f"{outcome}: {joined(names)}: {reason}." for (outcome, reason), names in groups.items()]


def how_decided(comparison: Comparison) -> str:
    """Which change decides, above which size, and what the other change shows."""
    if comparison.decide_by is DecideBy.TIME:
        what = (
            "The time decides (--decide-by time), so a change of the machine between the two runs "
            "counts as a change too"
        )
    elif comparison.by_drafts:
        what = (
            "The change of a draft count's time per token over k = 0 decides, which is its "
            "tokens/s turned round; of a staged count over the same k in mode off. Tokens are "
            "compared on the prompts of both runs"
        )
    else:
        what = (
            "The change of a cell's ratio to off x off decides. Each run measured off x off in the "
            "same process and blocks, so a change of the machine between the two runs cancels. The "
            "time includes such changes and decides nothing"
        )
    return (
        f"{what}. {_least_change(comparison)} Above 1 is slower; brackets hold the 95 % interval. "
        "REGRESSION and IMPROVEMENT hold after correction for the number of cells (Holm)."
    )


def _least_change(comparison: Comparison) -> str:
    threshold, floor = _fraction(comparison.threshold), comparison.noise_floor
    if floor is None or not comparison.too_noisy:
        return f"A change counts above {threshold} (--threshold)."
    return (
        f"A change counts above {_fraction(floor)}, the noise floor: the change of the A/A arm, "
        f"which is chance. It exceeds --threshold ({threshold}), so no regression means exit code "
        "5: measure both runs longer, or write a larger --threshold."
    )


def _fraction(value: float) -> str:
    return f"{100 * value:.3g} %"


def notes(comparison: Comparison) -> list[str]:
    """Caveats of the comparison, and how it was made."""
    found = _forced(comparison)
    found += [f"{n}: {w.rstrip('.')}." for n, run in _sides(comparison) for w in run.warnings]
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


def _pairing(comparison: Comparison) -> list[str]:
    """How the deciding intervals were made: paired or unpaired, from windows or batches."""
    by_ratio = comparison.decide_by is DecideBy.RATIO
    changes = [cell.ratio if by_ratio else cell.time for cell in comparison.cells]
    made = [change for change in changes if change is not None and change.interval is not None]
    found = []
    paired = [change.new_blocks for change in made if change.paired and change.new_blocks]
    if paired:
        found.append(
            f"Both runs timed {plural(min(paired), 'block')} of the same prompts, seed and "
            "temperature, which are compared in pairs."
        )
    interleaved = [
        change for change in made if change.measure in (DEVICE_MS, WALL_MS, TIME_PER_TOKEN)
    ]
    if interleaved:
        engines = comparison.new.header.spec.engines
        what = "whole batches on an engine for each count" if engines else "interleaved windows"
        found.append(
            f"Ratios are those of {what}: each run's interval comes from its own "
            f"{'blocks' if engines else 'groups'}, and the two are independent samples (Welch)."
        )
    if any(not change.paired and change not in interleaved for change in made):
        found.append(
            "The runs are not paired, because prompts, seeds or number of blocks differ: intervals "
            "are for two independent samples (Welch)."
        )
    if any(change.measure == LATENCY_MS for change in made):
        found.append("Some times are those of whole batches, because a run has no window times.")
    return found


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
    """Cells whose acceptance changed on the same prompts, which window times do not show."""
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
