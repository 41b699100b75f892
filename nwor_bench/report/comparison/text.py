"""The words of a comparison: headline, reasons, and rows of text."""

from nwor_bench.analysis.comparing.change_estimates import Change
from nwor_bench.analysis.comparing.compare import CellChange, ChangeVerdict, Comparison
from nwor_bench.analysis.comparing.decide_by import DecideBy
from nwor_bench.records.types import CellResult
from nwor_bench.report.text import NOT_MEASURED, decimal, joined, plural, with_bounds

CHANGE_HEADERS = ("Cell", "Change", "Ratio to off, NEW / BASE", "Time, NEW / BASE")
VALUE_HEADERS = ("Cell", "Window ms", "Tokens/s", "Accepted", "Parity")
ARROW = " → "
"""Between BASE's value and NEW's."""

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


def deciding(cell: CellChange, comparison: Comparison) -> Change | None:
    """The change that decides: of the cell's ratio, or of its time."""
    return cell.ratio if comparison.decide_by is DecideBy.RATIO else cell.time


def headline(comparison: Comparison) -> str:
    """One or two sentences: whether NEW is worse than BASE, and in which cells."""
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
    """Rows under CHANGE_HEADERS: each cell's verdict and both changes."""
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
    """Rows under VALUE_HEADERS: BASE's and NEW's values."""
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
    threshold, floor = comparison.threshold, comparison.noise_floor
    if floor is None or floor <= threshold:
        return f"A change counts above {_fraction(threshold)} (--threshold)."
    return (
        f"A change counts above {_fraction(floor)}, the noise floor: the change of the A/A arm, "
        f"which is chance alone (--threshold is {_fraction(threshold)})."
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
