"""How values read in reports: one form for each kind of number."""

import json
from collections.abc import Iterator, Sequence
from math import floor, log10
from typing import Any

from nwor_bench.analysis.paired import LATENCY_MS
from nwor_bench.records.types import CellResult
from nwor_bench.stats.interval import Interval

NOT_MEASURED = "–"  # noqa: RUF001 - an en dash is meant
"""Shown for a missing value (the glossary lists why one may be missing); CSV files have ""."""

_NOTHING = 1e-9
"""A percentage below this is a rounding error."""

_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def count(value: int | None) -> str:
    """A whole number with thousands set apart."""
    return NOT_MEASURED if value is None else f"{value:,}"


def decimal(value: float | None, digits: int = 1) -> str:
    """A number with that many decimals."""
    return NOT_MEASURED if value is None else f"{value:,.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """A fraction as a percentage with that many decimals."""
    return NOT_MEASURED if value is None else f"{100 * value:.{digits}f} %"


def two_digits(share: float) -> str:
    """A fraction as a percentage with two significant digits: 0.025 %, 12 %."""
    value = 100 * share
    if abs(value) < _NOTHING:
        return "0 %"
    return f"{value:.{max(0, 1 - floor(log10(abs(value))))}f} %"


def p_value(value: float | None) -> str:
    """A p value to three decimals, or `< 0.001`."""
    if value is None:
        return NOT_MEASURED
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def size(value: int | None) -> str:
    """Bytes in decimal units (1 MB = 1,000,000 bytes)."""
    if value is None:
        return NOT_MEASURED
    for unit, name in _UNITS:
        if value >= unit:
            return f"{value / unit:,.1f} {name}"
    return f"{value:,} B"


NARROW = 0.004
"""Narrower intervals are written with four digits."""


def interval(ratio: Interval | None, digits: int | None = None) -> str:
    """A ratio with its interval as `with_bounds` writes it; no brackets if it is unbounded."""
    if ratio is None:
        return NOT_MEASURED
    low, high = (ratio.low, ratio.high) if ratio.is_bounded else (None, None)
    return with_bounds(ratio.value, low, high, digits)


def with_bounds(
    value: float, low: float | None, high: float | None, digits: int | None = None
) -> str:
    """`1.059 [1.054, 1.063]`, no brackets without bounds.

    `digits` is None for three, or four if the interval is narrow.
    """
    if low is None or high is None:
        return f"{value:.{digits or 3}f}"
    digits = digits or (4 if high - low < NARROW else 3)
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def sure_ratio(cell: CellResult) -> Interval | None:
    """The interval that is valid for the best of several cells; None without one.

    It is the simultaneous one, or the cell's own for A/A and runs that did not store it.
    """
    return _first_bounded(cell.sure, cell.ratio)


def work_change(cell: CellResult) -> str:
    """Change of the GPU's work in per cent, with half its interval: `-1.52 +- 0.10`."""
    if cell.work is None:
        return NOT_MEASURED
    return f"{100 * (cell.work.value - 1):+.2f} +- {100 * cell.work.half_width:.2f}"


def sure_rate(cell: CellResult) -> Interval | None:
    """`sure_ratio` of tokens per second."""
    return _first_bounded(cell.sure_rate, cell.rate)


def _first_bounded(*intervals: Interval | None) -> Interval | None:
    return next((ratio for ratio in intervals if ratio is not None and ratio.is_bounded), None)


def joined(words: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def plural(number: int, noun: str) -> str:
    """`1 block`, `2 blocks`, `2 batches`."""
    ending = "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def settings(values: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as (dotted name, text), without those that are None or empty."""
    if isinstance(values, dict):
        for name, value in values.items():
            yield from settings(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(values, list) and any(isinstance(value, dict) for value in values):
        for number, value in enumerate(values):
            yield from settings(value, f"{prefix}.{number}")
    elif values is not None and values != []:
        yield prefix, _setting(prefix, values)


def _setting(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return size(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else json.dumps(value)


def compared_time(cells: Sequence[CellResult]) -> str:
    """The time that the ratios of these cells compare, in words."""
    compared = {cell.compared for cell in cells if cell.compared is not None}
    return "time per batch" if compared == {LATENCY_MS} else "time per window"


def signed(ratio: float, sure: Interval | None = None, unit: str = "") -> str:
    """A ratio as `+2.9 % tokens/s (95 %: 2.7 to 3.1)`; more decimals if it is narrow."""
    fine = abs(ratio - 1) < 0.01 or (sure is not None and sure.high - sure.low < NARROW)
    ends = () if sure is None else (sure.low, sure.high)
    point, *reach = (f"{100 * (bound - 1):.{2 if fine else 1}f}" for bound in (ratio, *ends))
    text = " ".join(filter(None, [f"{'' if ratio < 1 else '+'}{point} %", unit]))
    return f"{text} (95 %: {' to '.join(reach)})" if reach else text


def change(ratio: float) -> str:
    """A time ratio as `2.1 % less` or `0.43 % more`."""
    return f"{_off_by(ratio)} {_side(ratio)}"


def _side(ratio: float) -> str:
    return "less" if ratio < 1 else "more"


def _off_by(ratio: float) -> str:
    away = 100 * abs(ratio - 1)
    return f"{away:.{2 if away < 1 else 1}f} %"


def clock(seconds: float) -> str:
    """Minutes and seconds: 2:00."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"
