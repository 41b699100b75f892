"""The sections on each block: its ratio, and what the GPU's clocks did meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nwor_bench.analysis.cell_data import gather_cells
from nwor_bench.analysis.paired import pair_times
from nwor_bench.records.store import RunData
from nwor_bench.records.types import AA, Cell, CellResult, Phase
from nwor_bench.report.document import Figure, Paragraph, Section, table
from nwor_bench.report.plots import axis, colour, layout
from nwor_bench.report.text import NOT_MEASURED, compared_time, decimal

TITLE = "Block by block"

_TINTS = ("faster", "slower", "ineffective", "same", "invalid")
_SYMBOLS = ("o", "s", "^", "D", "v")
_LESS = {"nticks": 4}


@dataclass(frozen=True)
class _Blocks:
    """What is known of each timed block, by its number, in time order."""

    ratios: dict[Cell, dict[int, float]]
    clocks: dict[int, float]
    """Lowest SM clock in MHz."""
    throttled: dict[int, float]
    """Milliseconds in which power or temperature lowered the clocks."""


def block_section(run: RunData, cells: Sequence[CellResult]) -> Section:
    """The ratio of each block in time order, clocks and throttling below on the same axis."""
    found = _blocks(run, cells)
    if not found.ratios:
        return Section(TITLE, (Paragraph("No block was timed in off x off and another cell."),))
    return Section(TITLE, (_figure(found, compared_time(cells)),))


def block_table(run: RunData, cells: Sequence[CellResult]) -> Section:
    """The numbers of that figure."""
    found = _blocks(run, cells)
    numbers = sorted({block for own in found.ratios.values() for block in own})
    rows = [
        [str(block), *(decimal(own.get(block), 4) for own in found.ratios.values()),
         decimal(found.clocks.get(block), 0), decimal(found.throttled.get(block), 0)]
        for block in numbers
    ]  # fmt: skip
    heads = ["Block", *(cell.label for cell in found.ratios), "SM clock MHz", "Throttled ms"]
    caption = f"{compared_time(cells).capitalize()} over that of off x off, in time order"
    return Section(f"{TITLE}: numbers", (table(heads, rows, caption=caption),), folded=True)


def _blocks(run: RunData, cells: Sequence[CellResult]) -> _Blocks:
    compared = {cell.cell for cell in cells if cell.ratio_to_off is not None}
    gathered = gather_cells(run)
    baseline = next((own for own in gathered if own.is_baseline), None)
    ratios: dict[Cell, dict[int, float]] = {}
    for own in gathered:
        pairs = pair_times(own, baseline) if baseline and own.cell in compared else None
        if pairs is not None:
            times = zip(pairs.blocks, pairs.treated, pairs.baseline, strict=True)
            ratios[own.cell] = {block: above / below for block, above, below in times}
    timed = [batch for batch in run.batches if batch.phase == Phase.TIMED]
    clocks: dict[int, float] = {}
    throttled: dict[int, float] = {}
    for batch in timed:
        clock = batch.conditions.get("gpu_sm_clock_mhz")
        if clock is not None:
            clocks[batch.block] = min(clock, clocks.get(batch.block, clock))
        held = batch.conditions.get("gpu_throttled_ms")
        if held is not None:
            throttled[batch.block] = throttled.get(batch.block, 0.0) + held
    return _Blocks(ratios, dict(sorted(clocks.items())), dict(sorted(throttled.items())))


def _figure(found: _Blocks, time: str) -> Figure:
    data = [_ratio_line(cell, own, place) for place, (cell, own) in enumerate(found.ratios.items())]
    axes: dict[str, Any] = {}
    heights = [3.0]
    for values, name in ((found.clocks, "SM clock, MHz"), (found.throttled, "throttled, ms")):
        if values:
            end = len(heights) + 1
            heights.append(1.0)
            axes |= {f"xaxis{end}": axis(), f"yaxis{end}": axis(name.split(", ")[1], **_LESS)}
            data.append(_machine_line(values, f"x{end}", name))
    last = f"xaxis{len(heights)}" if len(heights) > 1 else "xaxis"
    axes = {"xaxis": axis(), **axes}
    axes[last] = axis("timed block, in time order")
    first = axes.pop("xaxis")
    return Figure(
        name="blocks",
        caption=(
            f"Each cell's {time} over that of off x off in the same block: below 1 is faster. A "
            f"drift or a few far blocks would show here. {_machine_words(found)}"
        ),
        alternative=f"Ratio to off x off in each block. {_in_words(found)}",
        data=tuple(data),
        layout=layout(
            first, axis("ratio to off x off", line_at=1), heights=heights, showlegend=True, **axes
        ),
        height=round(250 + 75 * sum(heights[1:])),
    )


def _ratio_line(cell: Cell, ratios: dict[int, float], place: int) -> dict[str, Any]:
    tint = "ambiguous" if cell.arm == AA else _TINTS[place % len(_TINTS)]
    return {
        "type": "line", "name": cell.label, "x": list(ratios), "y": list(ratios.values()),
        "line": {"color": colour(tint)}, "symbol": _SYMBOLS[place % len(_SYMBOLS)],
        "dash": ":" if cell.arm == AA else "-",
    }  # fmt: skip


def _machine_line(values: dict[int, float], xaxis: str, name: str) -> dict[str, Any]:
    return {
        "type": "line", "name": name, "xaxis": xaxis, "x": list(values),
        "y": list(values.values()), "line": {"color": colour("soft")}, "symbol": ".",
    }  # fmt: skip


def _machine_words(found: _Blocks) -> str:
    if not found.clocks and not found.throttled:
        return "The GPU's clocks were not recorded."
    return "Below: the block's lowest SM clock (MHz), and for how long the GPU was throttled (ms)."


def _in_words(found: _Blocks) -> str:
    parts = [
        f"{cell.label}: {min(own.values()):.4f} to {max(own.values()):.4f}"
        for cell, own in found.ratios.items()
    ]
    clocks = list(found.clocks.values())
    if clocks:
        parts.append(f"SM clock {min(clocks):.0f} to {max(clocks):.0f} MHz")
    if found.throttled:
        parts.append(f"throttled for {sum(found.throttled.values()):.0f} ms")
    return "; ".join(parts) or NOT_MEASURED
