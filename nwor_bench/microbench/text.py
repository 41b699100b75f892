"""How the lines and goals of a kernel run read: headings, cells and notes as plain text. Pure."""

from collections.abc import Sequence

from nwor_bench.microbench.cases import OURS
from nwor_bench.microbench.goals import GoalResult
from nwor_bench.microbench.rows import Row, Status
from nwor_bench.report.text import NOT_MEASURED, decimal, percent

NOTES = (
    "time: median over rounds of one call; a commit's call writes all layers, a stage's one.",
    "GB/s: bytes that the work must read and write, each once, over the time; of copy: the same "
    "over the GB/s of a device-to-device copy of as many bytes in the same case.",
    "time/nwor: this implementation's time over our kernel's, paired by round, geometric mean "
    "with its 95 % interval; 2 means that ours takes half the time.",
    "host: host time of an eager call, in microseconds; all layers' launches together.",
    "cold: nothing that a call reads or writes is in L2; warm: what the last call left is.",
    "Every result was compared with a torch reference before it was timed.",
)

_WORDS = {
    Status.INVALID: "INVALID",
    Status.NOT_INSTALLED: "absent",
    Status.REFUSED: "refused",
    Status.SKIPPED: "skipped",
}
"""In the place of a time."""


def microseconds(value: float | None) -> str:
    """Two decimals below 100 us, else none."""
    return decimal(value, 2 if value is None or value < 100 else 0)


def interval(row: Row) -> str:
    """`20.1 [19.9, 20.3]`: the time over ours; our own line is 1 by definition."""
    if row.implementation == OURS and row.status is Status.OK:
        return "1"
    numbers = (row.time_over_nwor, row.time_over_nwor_low, row.time_over_nwor_high)
    ratio, low, high = (significant(number) for number in numbers)
    return NOT_MEASURED if row.time_over_nwor is None else f"{ratio} [{low}, {high}]"


def significant(value: float | None) -> str:
    """Two decimals below 10, one below 100, else none."""
    if value is None:
        return NOT_MEASURED
    return decimal(value, 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0)


def case(row: Row) -> str:
    """`8x4, 0.5` or `8x4, 1024`: the window and what else the case is told by."""
    more = [] if row.acceptance is None else [f"{row.acceptance:g}"]
    more += [] if row.context is None else [str(row.context)]
    return ", ".join([f"{row.requests}x{row.drafts}", *more])


def case_heading(rows: Sequence[Row]) -> str:
    """What the second part of `case` is."""
    if any(row.context is not None for row in rows):
        return "window, context"
    return "window, accepted" if any(row.acceptance is not None for row in rows) else "window"


def numbers(row: Row) -> tuple[str, ...]:
    """Time, GB/s, share of the copy and ratio of a line, or why it has none."""
    if row.status is not Status.OK:
        return (_WORDS[row.status], *[NOT_MEASURED] * 3)
    return (
        microseconds(row.time_us),
        decimal(row.gb_per_s, 0),
        percent(row.share_of_copy, 0),
        interval(row),
    )


def reasons(rows: Sequence[Row]) -> list[str]:
    """`flashinfer (commit, fp8): REFUSED, ...`, each once, in the order of the lines."""
    told: dict[str, None] = {}
    for row in rows:
        if row.reason:
            where = f"{row.kernel}, {row.cache_dtype}"
            told[f"{row.implementation} ({where}): {row.status}: {row.reason}"] = None
    return list(told)


def goal_cells(result: GoalResult) -> tuple[str, str, str, str]:
    """Goal, verdict, cases that meet it, and the worst case with its ratio."""
    worst = result.worst
    if worst is None:
        return (result.goal.text, result.verdict, NOT_MEASURED, NOT_MEASURED)
    where = f"{case(worst)}, {worst.cache_dtype}, {worst.l2}"
    return (
        result.goal.text,
        result.verdict,
        f"{result.met} of {result.cases}",
        f"{interval(worst)} ({where})",
    )
