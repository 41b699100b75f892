"""What of a staging cell's effect is the attention kernel's, and what is the writes'."""

from collections.abc import Sequence

from nwor_bench.analysis.interleaved.split import Split, splits_of
from nwor_bench.analysis.statistics import RatioInterval
from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult
from nwor_bench.report.document import Table, table
from nwor_bench.report.text import change, with_bounds

DIGITS = 4
"""Of ratios of windows in turn: most are known to a tenth of a per cent."""


def split_lines(run: RunData, cells: Sequence[CellResult]) -> list[str]:
    """One sentence for each staging cell whose effect is split."""
    return [split_sentence(part) for part in splits_of(run, cells)]


def split_sentence(part: Split) -> str:
    """`stage x graph, 2.8 % less: attention 1.5 % less +- 0.10, writes 1.3 % less +- 0.07.`"""
    return (
        f"{part.cell.label}, {change(part.total.ratio)}: attention {_part(part.attention)}, writes "
        f"{_part(part.writes)}."
    )


def split_table(parts: Sequence[Split]) -> Table:
    """The ratios behind the sentences."""
    rows = [
        [part.cell.label, name, over, bounds(ratio), change(ratio.ratio)]
        for part in parts
        for name, over, ratio in (
            ("total", f"{part.cell.label} / off x off", part.total),
            ("attention", f"{part.control.label} / off x off", part.attention),
            (
                "writes, validation and commit",
                f"{part.cell.label} / {part.control.label}",
                part.writes,
            ),
        )
    ]
    heads = ["Cell", "Part", "Compared", "Ratio", "Change"]
    caption = "The effect in parts: control x off has the attention of stage and the writes of off"
    return table(heads, rows, numbers_from=3, caption=caption)


def _part(ratio: RatioInterval) -> str:
    return f"{change(ratio.ratio)} +- {100 * ratio.half_width:.2f}"


def bounds(ratio: RatioInterval) -> str:
    """A ratio of windows in turn with its interval."""
    return with_bounds(ratio.ratio, ratio.low, ratio.high, DIGITS)
