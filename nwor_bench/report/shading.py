"""The background of a ratio in a table: blue for less time, orange for more."""

from nwor_bench.records.types import CellResult, Verdict

STEPS = (0.01, 0.03)
"""Distances from 1 at which a shade grows stronger."""

SHADES_NOTE = (
    "Shaded: FASTER blue, SLOWER orange, stronger from 1 % and from 3 % on; SAME green; "
    "AMBIGUOUS not."
)


def shade(cell: CellResult | None) -> str:
    """The name of the shade of a cell's ratio, "" for none (see `Table.shades`)."""
    if cell is None or cell.verdict not in set(Verdict):
        return ""
    verdict = Verdict(cell.verdict)
    if verdict in (Verdict.FASTER, Verdict.SLOWER):
        return shade_of(verdict.lower(), cell.ratio_to_off)
    return "" if verdict is Verdict.AMBIGUOUS else verdict.lower()


def shade_of(side: str, ratio: float | None) -> str:
    """`faster-2` for side `faster` and a ratio that is 1 % to 3 % from 1."""
    away = abs((1.0 if ratio is None else ratio) - 1)
    return f"{side}-{1 + sum(away >= step for step in STEPS)}"
