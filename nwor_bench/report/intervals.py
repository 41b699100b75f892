"""The cells' latency ratios with their intervals on one axis, as inline SVG.

Places along the axis are percentages, so that the figure is as wide as its page while its
text keeps the page's size. Colours come from the page's style sheet.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from nwor_bench.records import CellResult
from nwor_bench.report.text import label
from nwor_bench.report.text import ratio as ratio_text

_ROW = 46
_AXIS = 30
_EDGE = 6.0
"""Per cent of the width left free on each side of the axis, for its outermost labels."""


@dataclass(frozen=True)
class _Axis:
    """From ratios to places along the figure's width."""

    low: float
    high: float

    def width(self, ratios: float) -> float:
        """That much of the axis, in per cent of the figure."""
        return (100 - 2 * _EDGE) * ratios / (self.high - self.low)

    def place(self, value: float) -> str:
        return f"{_EDGE + self.width(value - self.low):.2f}%"

    def upright(self, kind: str, value: float, top: int, bottom: int) -> str:
        x = self.place(value)
        return f'<line class="{kind}" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>'


def interval_svg(cells: Sequence[CellResult], margin: float) -> str:
    """The figure as an `<svg>` element; cells without a ratio are left out."""
    shown = [cell for cell in cells if cell.ratio_to_off is not None]
    axis = _Axis(*_range(shown, margin))
    height = len(shown) * _ROW
    parts = [part for row, cell in enumerate(shown) for part in _row(cell, row, axis, margin)]
    for tick in _ticks(axis.low, axis.high):
        x = axis.place(tick)
        parts.append(axis.upright("tick", tick, height, height + 5))
        parts.append(f'<text class="scale" x="{x}" y="{height + 20}">{tick:g}</text>')
    name = f"Latency over off x off, {len(shown)} cells; the numbers are in the table."
    return (
        f'<svg class="intervals" role="img" aria-label="{escape(name)}" width="100%" '
        f'height="{height + _AXIS}">{"".join(parts)}</svg>'
    )


def _row(cell: CellResult, row: int, axis: _Axis, margin: float) -> list[str]:
    """One cell: its name and ratio above, its interval and the margin around 1 below."""
    low, ratio, high = cell.ratio_ci_low, cell.ratio_to_off, cell.ratio_ci_high
    assert ratio is not None
    top = row * _ROW
    y = top + 32
    kind = f"v-{escape(cell.verdict.lower())}"
    band, width = axis.place(1 - margin), axis.width(2 * margin)
    parts = [
        f'<text class="name" x="0" y="{top + 16}">{escape(label(cell))}</text>',
        f'<text class="value" x="100%" y="{top + 16}">{escape(ratio_text(cell))}</text>',
        f'<rect class="band" x="{band}" y="{y - 11}" width="{width:.2f}%" height="22"/>',
        axis.upright("one", 1, y - 11, y + 11),
    ]
    if low is not None and high is not None:
        ends = f'x1="{axis.place(low)}" x2="{axis.place(high)}" y1="{y}" y2="{y}"'
        parts.append(f'<line class="ci {kind}" {ends}/>')
        parts += [axis.upright(f"cap {kind}", end, y - 5, y + 5) for end in (low, high)]
    parts.append(f'<circle class="dot {kind}" cx="{axis.place(ratio)}" cy="{y}" r="5"/>')
    return parts


def _range(cells: Sequence[CellResult], margin: float) -> tuple[float, float]:
    """The axis holds every interval, the margin around 1, and a little room."""
    values = [1 - margin, 1 + margin]
    for cell in cells:
        ends = (cell.ratio_to_off, cell.ratio_ci_low, cell.ratio_ci_high)
        values += [value for value in ends if value is not None]
    room = 0.05 * (max(values) - min(values))
    return min(values) - room, max(values) + room


def _ticks(low: float, high: float) -> list[float]:
    """At most six round values between the ends of the axis."""
    least = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [round(number * step, 12) for number in range(first, last + 1)]
