"""Ratios and throughput in the order of measurement: drift and outliers at a glance."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from nwor_bench.analysis.analyse import Analysis
from nwor_bench.analysis.cell_data import CellData
from nwor_bench.analysis.effects import WINDOWS, effects_over_off
from nwor_bench.analysis.paired import pair_times, windows_work
from nwor_bench.records.types import CellResult, Verdict, WindowRecord
from nwor_bench.report.document import Figure, Section, Table, table
from nwor_bench.report.html import colour, tint_of
from nwor_bench.report.text import NOT_MEASURED, decimal
from nwor_bench.stats.robust import MIN_GROUPS, robust_location

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

MIN_DOTS = 5
"""Fewest dots of a panel."""

MAX_DOTS = 20
"""Dots of a panel into which more values than `_ONE_BY_ONE` are merged, neighbours together."""

_ONE_BY_ONE = 6 * MIN_GROUPS
_ROW, _REST = 100, 40
"""CSS pixels of a row of panels, and of everything else."""

_HALF = 0.005
"""Half of the least height of a panel of ratios."""

RATIOS = "Dots: ratios in order of measurement; shaded: the whole run. A slope is drift."
RATES = "Dots: tokens over the time of windows (no prefill), in order; line: off x off."


@dataclass(frozen=True)
class Dot:
    """A value at its place in the run (0 to 1), with its interval if it has one."""

    place: float
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Panel:
    """One cell's dots."""

    title: str
    tint: str
    dots: tuple[Dot, ...]
    band: tuple[float, float] | None = None
    line: tuple[Dot, ...] = ()


def over_time_section(analysis: Analysis) -> list[Section]:
    """A section with both figures and their numbers; none if the run is too short for either."""
    ratios, rates = _ratios(analysis), _rates(analysis)
    if not ratios and not rates:
        return []
    figures = (
        _figure("ratio-over-time", "Time over off x off", RATIOS, ratios, 3),
        _figure("throughput-over-time", "Tokens per second", RATES, rates, 0),
    )
    return [Section("Over the run", (*filter(None, figures), _table(ratios, rates)))]


def _ratios(analysis: Analysis) -> list[Panel]:
    panels = []
    for cell in analysis.cells:
        dots = merged(ratios_in_order(analysis, cell))
        if len(dots) >= MIN_DOTS:
            ratio = cell.ratio
            band = (ratio.low, ratio.high) if ratio is not None and ratio.is_bounded else None
            panels.append(Panel(cell.label, tint_of(cell.verdict), dots, band))
    return panels


def _rates(analysis: Analysis) -> list[Panel]:
    idle = {c.cell for c in analysis.cells if c.verdict in (Verdict.INVALID, Verdict.INEFFECTIVE)}
    dots_by_cell = {d.cell: _rates_of(d) for d in analysis.gathered if d.cell not in idle}
    line = next((dots for cell, dots in dots_by_cell.items() if cell.is_baseline), ())
    return [
        Panel(cell.label, "text", dots, line=() if cell.is_baseline else line)
        for cell, dots in dots_by_cell.items()
        if len(dots) >= MIN_DOTS
    ]


def _table(ratios: Sequence[Panel], rates: Sequence[Panel]) -> Table:
    """The figures in numbers, one row a cell."""
    shown = [{p.title: _thirds(p.dots, digits) for p in panels}
             for panels, digits in ((ratios, 3), (rates, 0))]  # fmt: skip
    missing = [NOT_MEASURED] * 3
    rows = [[title, *(value for thirds in shown for value in thirds.get(title, missing))]
            for title in dict.fromkeys(p.title for p in (*rates, *ratios))]  # fmt: skip
    heads = [f"{what}, {part}" for what in ("Ratio", "Tokens/s")
             for part in ("first third", "middle", "last third")]  # fmt: skip
    return table(["Cell", *heads], rows, caption="Medians over each third of the run")


def ratios_in_order(analysis: Analysis, cell: CellResult) -> list[float]:
    """Ratios of the groups or blocks that the cell's ratio comes from; empty without a ratio."""
    if cell.ratio is None:
        return []
    if cell.interleaved == WINDOWS:
        return [exp(effect) for effect in effects_over_off(analysis.effects)[cell.cell].effects]
    by_cell = {data.cell: data for data in analysis.gathered}
    baseline = next(d for d in by_cell.values() if d.is_baseline and d.cell.pair == cell.pair)
    times = pair_times(by_cell[cell.cell], baseline)
    return (
        [] if times is None else [a / b for a, b in zip(times.treated, times.baseline, strict=True)]
    )


def merged(values: Sequence[float]) -> tuple[Dot, ...]:
    """One dot a value; of many values one for each of at most MAX_DOTS parts, with its interval."""
    if len(values) < _ONE_BY_ONE:
        return tuple(Dot((at + 0.5) / len(values), value) for at, value in enumerate(values))
    parts = np.array_split(np.log(values), min(MAX_DOTS, len(values) // MIN_GROUPS))
    locations = [robust_location(list(part)) for part in parts]
    return tuple(
        Dot((at + 0.5) / len(parts), ratio.value, ratio.low, ratio.high)
        for at, ratio in enumerate(own and own.exp() for own in locations)
        if ratio is not None
    )


def _rates_of(data: CellData) -> tuple[Dot, ...]:
    """Tokens per second in the windows of each of its timed batches."""
    batches: dict[tuple[int, int], list[WindowRecord]] = {}
    for window in data.counted if data.measured else ():
        batches.setdefault((window.batch, window.block), []).append(window)
    works = [windows_work(windows) for _, windows in sorted(batches.items())]
    return merged([1000 * work.tokens / work.ms for work in works if work.ms and work.tokens])


def _figure(
    name: str, what: str, caption: str, panels: Sequence[Panel], digits: int
) -> Figure | None:
    """Panels in two columns; None without any."""
    if not panels:
        return None
    rows = (len(panels) + 1) // 2

    def draw(canvas: "Canvas") -> None:
        grid = canvas.subplots(rows, 2, sharex=True, sharey=not digits, squeeze=False)
        for axes, panel in zip(grid.flat, panels, strict=False):
            _draw(axes, panel, digits)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        canvas.supxlabel("share of the run, %", fontsize=13)

    thirds = "; ".join(f"{p.title} {', '.join(_thirds(p.dots, digits))}" for p in panels)
    words = f"{what} in the first, middle and last third of the run: {thirds}."
    return Figure(name, caption, words, draw, _ROW * rows + _REST)


def _draw(axes: "Axes", panel: Panel, digits: int) -> None:
    """One cell's dots over its band or line."""
    places = [dot.place for dot in panel.dots]
    values = [dot.value for dot in panel.dots]
    if panel.band:
        axes.axhspan(*panel.band, color=colour("band"), lw=0, zorder=0)
        axes.axhline(1, color=colour("text"), lw=1, zorder=1)
        middle = sum(panel.band) / 2  # differences below half a per cent shall look small
        axes.plot([0, 1], [middle - _HALF, middle + _HALF], ls="none")
    axes.plot(
        [d.place for d in panel.line], [d.value for d in panel.line], color=colour("soft"), lw=1
    )
    reach = [[dot.value - (dot.low or dot.value) for dot in panel.dots],
             [(dot.high or dot.value) - dot.value for dot in panel.dots]]  # fmt: skip
    axes.errorbar(places, values, yerr=reach, fmt="o", color=colour(panel.tint), ms=4, lw=1.5)
    axes.set_xlim(0, 1)
    axes.set_title(panel.title, loc="left", fontsize=13)
    axes.locator_params(axis="y", nbins=3)
    axes.yaxis.set_major_formatter(f"{{x:,.{digits}f}}")
    axes.xaxis.set_major_formatter(lambda x, _: f"{100 * x:.0f}")


def _thirds(dots: Sequence[Dot], digits: int) -> list[str]:
    """Medians of the first, middle and last third."""
    parts = np.array_split([dot.value for dot in dots], 3)
    return [decimal(median(part), digits) for part in parts]
