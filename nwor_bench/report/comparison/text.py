"""What a comparison of two runs says in words and in rows of text."""

from nwor_bench.analysis.comparing.change_estimates import Change
from nwor_bench.analysis.comparing.compare import CellChange, ChangeVerdict, Comparison, DecideBy
from nwor_bench.records.types import CellResult
from nwor_bench.report.text import NOT_MEASURED, decimal, joined, plural

CHANGE_HEADERS = ("Cell", "Change", "Ratio to off, NEW / BASE", "Time, NEW / BASE")
VALUE_HEADERS = ("Cell", "Window ms", "Tokens/s", "Accepted", "Parity")
ARROW = " → "
"""Between BASE's value and NEW's."""

_PHRASES = {
    ChangeVerdict.REGRESSION: "got worse",
    ChangeVerdict.IMPROVEMENT: "got better",
    ChangeVerdict.SAME: "the same",
    ChangeVerdict.AMBIGUOUS: "too uncertain to call",
    ChangeVerdict.NOT_COMPARED: "not compared",
    ChangeVerdict.ONLY_IN_BASE: "only in BASE",
    ChangeVerdict.ONLY_IN_NEW: "only in NEW",
}


def name_of(cell: CellChange, comparison: Comparison) -> str:
    """The cell's label, with its pair where there is more than one."""
    pairs = {each.cell.pair for each in comparison.cells}
    return cell.label if len(pairs) == 1 else f"{cell.cell.pair}: {cell.label}"


def headline(comparison: Comparison) -> str:
    """Is NEW worse than BASE? One or two sentences."""
    groups = {
        outcome: [name_of(cell, comparison) for cell in comparison.having(outcome)]
        for outcome in ChangeVerdict
    }
    rest = [f"{joined(names)} {_PHRASES[o]}" for o, names in groups.items() if names]
    return f"{_start(comparison)}: {'; '.join(rest)}."


def _start(comparison: Comparison) -> str:
    worse = comparison.having(ChangeVerdict.REGRESSION)
    if worse:
        return plural(len(worse), "regression")
    if comparison.having(ChangeVerdict.AMBIGUOUS, ChangeVerdict.ONLY_IN_BASE):
        return "No regression was shown, and none can be ruled out"
    if comparison.having(ChangeVerdict.SAME, ChangeVerdict.IMPROVEMENT):
        return "No regression"
    return "Nothing was compared"


def change_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Under CHANGE_HEADERS: each cell's outcome and both changes."""
    return [
        (
            name_of(cell, comparison),
            str(cell.outcome),
            change_text(cell.ratio),
            change_text(cell.time),
        )
        for cell in comparison.cells
    ]


def value_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Under VALUE_HEADERS: BASE's value and NEW's."""
    rows: list[tuple[str, ...]] = []
    for cell in comparison.cells:
        sides = (cell.base, cell.new)
        rows.append(
            (
                name_of(cell, comparison),
                ARROW.join(decimal(side.window_ms_mean if side else None, 2) for side in sides),
                ARROW.join(map(_rate, sides)),
                ARROW.join(_percent(side) for side in sides),
                _parity(cell),
            )
        )
    return rows


def change_text(change: Change | None) -> str:
    """`1.012 [1.004, 1.020]`, without the bracket where there is no interval."""
    if change is None:
        return NOT_MEASURED
    if change.interval is None:
        return f"{change.ratio:.3f}"
    return f"{change.ratio:.3f} [{change.interval.low:.3f}, {change.interval.high:.3f}]"


def reasons(comparison: Comparison) -> list[str]:
    """Why cells have their outcomes, where a word is needed; cells of one reason together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for cell in comparison.cells:
        if cell.reason:
            place = (str(cell.outcome), cell.reason.rstrip("."))
            groups.setdefault(place, []).append(name_of(cell, comparison))
    return [f"{outcome}: {joined(names)}: {reason}." for (outcome, reason), names in groups.items()]


def how_decided(comparison: Comparison) -> str:
    """Which number decides, by which bar, and what the other one is for."""
    if comparison.decide_by is DecideBy.TIME:
        what = (
            "The time itself decides (--decide-by time), so that whatever shifted the machine "
            "between the two runs counts as a change"
        )
    else:
        what = (
            "The change of a cell's ratio to off x off decides: each run measured off x off in the "
            "same process and blocks, so that what shifted the machine between the two runs "
            "cancels. The time keeps such shifts; it is shown beside it and decides nothing"
        )
    return (
        f"{what}. {_bar(comparison)} Above 1 is slower; in brackets is the 95 % interval; "
        "REGRESSION and IMPROVEMENT hold after correction for the number of cells (Holm)."
    )


def _bar(comparison: Comparison) -> str:
    threshold, floor = comparison.threshold, comparison.noise_floor
    if floor is None or floor <= threshold:
        return f"A change counts above {_fraction(threshold)} (--threshold)."
    return (
        f"A change counts above {_fraction(floor)}: so far from 1 reaches the change of the A/A "
        f"arm, which is chance alone (--threshold is {_fraction(threshold)})."
    )


def _rate(cell: CellResult | None) -> str:
    rate = cell.tokens_per_s if cell is not None else None
    return decimal(rate, 0 if rate is not None and rate >= 1000 else 1)


def _percent(cell: CellResult | None) -> str:
    rate = cell.acceptance_rate if cell is not None else None
    return NOT_MEASURED if rate is None else f"{100 * rate:.1f}%"


def _parity(cell: CellChange) -> str:
    before, after = ((side.parity or "unchecked") if side else NOT_MEASURED
                     for side in (cell.base, cell.new))  # fmt: skip
    return before if before == after else f"{before}{ARROW}{after}"


def _fraction(value: float) -> str:
    return f"{100 * value:.3g} %"
