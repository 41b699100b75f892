"""A comparison of two runs, or of two sweeps: as a document, and as JSON."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import chain
from textwrap import shorten
from typing import Any

from nwor_bench.analysis.changes import Change
from nwor_bench.analysis.compare import (
    WORST_FIRST,
    CellChange,
    ChangeVerdict,
    Comparison,
    DecideBy,
    worst_outcome,
)
from nwor_bench.analysis.paired import LATENCY_MS
from nwor_bench.analysis.stored_run import StoredRun
from nwor_bench.errors import worst_of
from nwor_bench.records.facts import GitState
from nwor_bench.records.files import document as json_document
from nwor_bench.records.types import to_dict
from nwor_bench.report.answer import CPU_SENTENCE, on_cpu
from nwor_bench.report.document import (
    Bullets,
    Definitions,
    Document,
    Headline,
    Paragraph,
    Section,
    Table,
    table,
)
from nwor_bench.report.text import NOT_MEASURED, decimal, interval, joined, percent, plural, signed
from nwor_bench.stats.interval import flat

COMPARISON_FORMAT_VERSION = 1

TITLE = "nwor-bench compare"

CHANGE_HEADERS = ("Cell", "Change", "Ratio to off, NEW / BASE", "Time, NEW / BASE")
VALUE_HEADERS = ("Cell", "Window ms", "Tokens/s", "Accepted", "Parity")
ONE = ""
"""The place of a comparison that is no sweep's."""
MAX_ROWS = 6
"""A terminal shows fewer cells than all."""
_OF_RUNS = "a change counts above --threshold, or above the A/A arm's own in its run"
ARROW = " → "
"""Between BASE's value and NEW's."""

_COLOURS = {
    ChangeVerdict.REGRESSION: "slower",
    ChangeVerdict.IMPROVEMENT: "faster",
    ChangeVerdict.SAME: "same",
}


def comparison_document(comparisons: Mapping[str, Comparison], *, brief: bool = False) -> Document:
    """Two sweeps by run, or ONE comparison: the verdict, the changes, the worst first, and why;
    then both runs' values, and notes. If `brief` only as much as fits a terminal of 24 lines."""
    first, several = next(iter(comparisons.values())), ONE not in comparisons
    compared = [
        (place, run, cell)
        for place, run in comparisons.items()
        for cell in run.cells
        if cell.outcome not in (None, ChangeVerdict.NOT_COMPARED)
    ]
    compared.sort(key=lambda row: WORST_FIRST.index(row[2].outcome or ChangeVerdict.NOT_COMPARED))
    by_work = not brief and any(cell.work for _, _, cell in compared)
    rows = [
        [f"{place}: {name_of(cell, run)}" if several else name_of(cell, run), str(cell.outcome),
         change_text(cell.ratio), change_text(cell.time),
         *([change_text(cell.work)] if by_work else [])]
        for place, run, cell in compared[: MAX_ROWS if brief else None]
    ]  # fmt: skip
    heads = [*CHANGE_HEADERS, *(["GPU's work to off, NEW / BASE"] if by_work else [])]
    heads[2] = "Time per token over k = 0, NEW / BASE" if first.by_drafts else heads[2]
    verdict = worst_outcome(run.outcome for run in comparisons.values())
    said = headline_of_all(comparisons) if several else headline(first)
    head = Headline(str(verdict), said, _COLOURS.get(verdict, "none"))
    facts = _brief_facts(comparisons, len(compared)) if brief else _facts(comparisons)
    changes = [table(heads, rows, numbers_from=2)] if rows else []
    sections = (
        Section(place or f"BASE{ARROW}NEW",
                (_origins(run), _values(run), Bullets(tuple(notes(run)))))
        for place, run in comparisons.items()
    )  # fmt: skip
    return Document(
        TITLE, (head, *changes, Definitions(tuple(facts))), () if brief else tuple(sections)
    )


def _facts(comparisons: Mapping[str, Comparison]) -> Iterator[tuple[str, str]]:
    yield from (("rule", how) for how in dict.fromkeys(map(how_decided, comparisons.values())))
    yield from (("why", text) for run in comparisons.values() for text in reasons(run))


def _brief_facts(comparisons: Mapping[str, Comparison], cells: int) -> Iterator[tuple[str, str]]:
    runs = comparisons.values()
    yield "rule", _least_change(*runs) if len(runs) == 1 else _OF_RUNS
    why, weak = ([*chain(*map(of, runs))] for of in (reasons, weaknesses))
    for term, texts in (("why", why), ("but", dict.fromkeys(weak))):
        yield from ((term, shorten(text, 150, placeholder=" ...")) for text in [*texts][:2])
    yield "all", f"{plural(cells, 'cell')}, values and notes: --markdown"


def _values(comparison: Comparison) -> Table:
    """BASE's and NEW's values of each cell."""
    rows = []
    for cell in comparison.cells:
        sides = (cell.base, cell.new)
        before, after = ((side.parity or "unchecked") if side else NOT_MEASURED for side in sides)
        rows.append([
            name_of(cell, comparison),
            ARROW.join(decimal(side.window_ms_mean if side else None, 2) for side in sides),
            ARROW.join(_rate(side.tokens_per_s if side else None) for side in sides),
            ARROW.join(percent(side.acceptance_rate if side else None) for side in sides),
            before if before == after else f"{before}{ARROW}{after}",
        ])  # fmt: skip
    return table(VALUE_HEADERS, rows)


def _rate(tokens_per_s: float | None) -> str:
    return decimal(tokens_per_s, 0 if (tokens_per_s or 0) >= 1000 else 1)


def _origins(comparison: Comparison) -> Paragraph:
    return Paragraph(f"BASE {_origin(comparison.base)}. NEW {_origin(comparison.new)}.")


def _origin(run: StoredRun) -> str:
    environment = run.header.environment
    values = {
        "is": run.folder.name,
        "begun": run.header.started_at,
        "nwor-bench": (environment.packages or {}).get("nwor-bench"),
        "git": ((environment.git or GitState()).revision or "")[:12],
    }
    return ", ".join(f"{name} {value}" for name, value in values.items() if value)


def name_of(cell: CellChange, comparison: Comparison) -> str:
    """The cell's label, with its pair if there are several pairs."""
    pairs = {change.cell.pair for change in comparison.cells}
    return cell.label if len(pairs) == 1 else f"{cell.cell.pair}: {cell.label}"


def headline(comparison: Comparison) -> str:
    """The worst change of NEW, or how many cells have which outcome."""
    worst = _worst(comparison)
    if worst is not None:
        return f"{name_of(worst[1], comparison)} {worst[0]}, the worst of {_start(comparison)}."
    numbers = Counter(str(cell.outcome) for cell in comparison.cells)
    told = ", ".join(f"{number} {outcome}" for outcome, number in numbers.items())
    return f"{_start(comparison)}: of {plural(len(comparison.cells), 'cell')} {told}."


def _worst(comparison: Comparison) -> tuple[str, CellChange] | None:
    """The largest regression that has a number: `+5.2 % time (95 %: 4.1 to 6.3)`."""
    changes = [
        (change.ratio, cell)
        for cell in comparison.having(ChangeVerdict.REGRESSION)
        if (change := cell.deciding(comparison.decide_by)) is not None
    ]
    if not changes:
        return None
    ratio, cell = max(changes, key=lambda each: each[0].value)
    return signed(ratio.value, ratio if ratio.is_bounded else None, "time"), cell


def headline_of_all(comparisons: Mapping[str, Comparison]) -> str:
    """Two sweeps: in how many runs which is said."""
    starts = Counter(
        "A regression" if c.having(ChangeVerdict.REGRESSION) else _start(c)
        for c in comparisons.values()
    )
    told = "; ".join(f"{s[0].lower()}{s[1:]} in {number}" for s, number in starts.items())
    return f"{told[0].upper()}{told[1:]} of {plural(len(comparisons), 'run')}."


def _start(comparison: Comparison) -> str:
    worse = comparison.having(ChangeVerdict.REGRESSION)
    if worse:
        return plural(len(worse), "regression")
    if comparison.too_noisy:
        return "Inconclusive, A/A changed by more than --threshold"
    if comparison.untimed:
        sides = ((name, run.cells.values()) for name, run in _sides(comparison))
        untimed = [name for name, cells in sides if not any(c.batches or c.groups for c in cells)]
        if untimed:
            return f"Not comparable, nothing was timed in {joined(untimed)}"
        return "Not comparable, no cell's change has an interval"
    if comparison.having(ChangeVerdict.AMBIGUOUS, ChangeVerdict.ONLY_IN_BASE):
        return "No regression was shown, and none can be ruled out"
    return "No regression"


def change_text(change: Change | None) -> str:
    """A change as `1.012 [1.004, 1.020]`, without brackets if there is no interval."""
    return interval(None if change is None else change.ratio)


def reasons(comparison: Comparison) -> list[str]:
    """Reasons for the verdicts of compared cells; cells with the same reason share a line."""
    groups: dict[tuple[str, str], list[str]] = {}
    for cell in comparison.cells:
        if cell.reason and cell.outcome != ChangeVerdict.NOT_COMPARED:
            place = (str(cell.outcome), cell.reason.rstrip("."))
            groups.setdefault(place, []).append(name_of(cell, comparison))
    return [f"{outcome}: {joined(names)}: {reason}." for (outcome, reason), names in groups.items()]


def how_decided(comparison: Comparison) -> str:
    """Which change decides, above which size, and what the other change shows."""
    what = "The ratio to off x off decides: changes of the machine cancel in it, not in the time"
    if comparison.decide_by is DecideBy.TIME:
        what = "The time decides (--decide-by time), changes of the machine included"
    elif comparison.by_drafts:
        what = (
            "The time per token over k = 0 decides; of a staged count over the same k, not staged"
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
        f"A change counts above {_fraction(floor)}, the noise floor: the A/A arm's own change. It "
        f"exceeds --threshold ({threshold}), so without a regression the exit code is 5."
    )


def _fraction(value: float) -> str:
    return f"{100 * value:.3g} %"


def notes(comparison: Comparison) -> list[str]:
    """Caveats of the comparison, and how it was made."""
    lines = [*weaknesses(comparison), *_pairing(comparison)]
    lines.append(
        "Each side is one run (one start of one process). No interval covers differences between "
        "two starts of the same code, so repeat both runs before acting on a change."
    )
    return lines


def weaknesses(comparison: Comparison) -> list[str]:
    """What weakens the answer, or may explain a change."""
    named = (
        ("Compared with --force, although the runs differ in work or machine", comparison.forced),
        ("Other differences, which may explain a change", comparison.others),
    )
    lines = [f"{words}: {'; '.join(map(str, of))}." for words, of in named if of]
    lines += [f"{n}: {w.rstrip('.')}." for n, run in _sides(comparison) for w in run.warnings]
    lines += _acceptance(comparison)
    if on_cpu(comparison.new.header):
        lines.append(CPU_SENTENCE)
    return lines


def _pairing(comparison: Comparison) -> Iterator[str]:
    """How the deciding intervals were made."""
    changes = [cell.deciding(comparison.decide_by) for cell in comparison.cells]
    made = [change for change in changes if change is not None and change.ratio.is_bounded]
    paired = [change.new_blocks for change in made if change.paired and change.new_blocks]
    if paired:
        yield f"Compared in pairs: {plural(min(paired), 'block')} of the same prompts and seed."
    if any(not change.paired for change in made):
        yield (
            "Ratios that are not paired (interleaved windows, other prompts or seeds) are two "
            "independent samples (Welch)."
        )
    if any(change.measure == LATENCY_MS for change in made):
        yield "Some times are those of whole batches, because a run has no window times."
    for cell in comparison.cells:
        if comparison.decide_by is DecideBy.RATIO and cell.cell.is_baseline and cell.time:
            name, time = name_of(cell, comparison), change_text(cell.time)
            yield f"Machine: {name} took {time} times as long as in BASE; NWOR has no part in it."


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


def comparison_json(comparison: Comparison, *, strict: bool) -> str:
    """Everything as JSON; values that were not measured are null."""
    plain = _plain(comparison, strict=strict)
    return json_document({"comparison_version": COMPARISON_FORMAT_VERSION, **plain})


def comparisons_json(comparisons: Mapping[str, Comparison], *, strict: bool) -> str:
    """The comparisons of two sweeps' runs as JSON, by place; of two runs ONE."""
    if ONE in comparisons:
        return comparison_json(comparisons[ONE], strict=strict)
    code = worst_of(comparison.exit_code(strict=strict) for comparison in comparisons.values())
    return json_document({
        "comparison_version": COMPARISON_FORMAT_VERSION,
        "exit_code": int(code),
        "runs": {place: _plain(c, strict=strict) for place, c in comparisons.items()},
    })  # fmt: skip


def _plain(comparison: Comparison, *, strict: bool) -> dict[str, Any]:
    return {
        "headline": headline(comparison),
        "exit_code": int(comparison.exit_code(strict=strict)),
        "decide_by": str(comparison.decide_by),
        "threshold": comparison.threshold,
        "noise_floor": comparison.noise_floor,
        "base": _run(comparison.base),
        "new": _run(comparison.new),
        "forced_differences": [asdict(difference) for difference in comparison.forced],
        "other_differences": [asdict(difference) for difference in comparison.others],
        "cells": [_cell(cell) for cell in comparison.cells],
        "notes": notes(comparison),
    }


def _run(run: StoredRun) -> dict[str, Any]:
    return {
        "folder": str(run.folder),
        "started_at": run.header.started_at,
        "status": run.header.status,
        "warnings": list(run.warnings),
    }


def _cell(cell: CellChange) -> dict[str, Any]:
    return {
        **cell.cell.names,
        "outcome": str(cell.outcome),
        "reason": cell.reason,
        "p_value_holm": cell.p_value_holm,
        "ratio_change": _change(cell.ratio),
        "time_change": _change(cell.time),
        "work_change": _change(cell.work),
        "base": None if cell.base is None else to_dict(cell.base),
        "new": None if cell.new is None else to_dict(cell.new),
    }


def _change(change: Change | None) -> dict[str, Any] | None:
    if change is None:
        return None
    return {
        "measure": change.measure,
        **flat(change.ratio),
        "p_value": change.ratio.p_value if change.ratio.is_bounded else None,
        "paired": change.paired,
        "base_blocks": change.base_blocks,
        "new_blocks": change.new_blocks,
        "why_no_interval": change.why_open,
    }
