"""The figure of ratios as groups of windows came in, with the SM clock below."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nwor_bench.analysis.interleaved.effects import PairEffect
from nwor_bench.analysis.interleaved.robust import as_ratio, robust_location
from nwor_bench.analysis.statistics import RatioInterval
from nwor_bench.records.store import RunData
from nwor_bench.records.types import AA, NworMode, Phase
from nwor_bench.report.document import Figure
from nwor_bench.report.plots import axis, colour, layout

_POINTS = 40
"""Most points of a line."""

_TINTS = ("faster", "slower", "ineffective", "same", "invalid")


@dataclass(frozen=True)
class _Running:
    """One pair's estimate after some of its batches."""

    effect: PairEffect
    places: list[int]
    """Interleaved batches that it rests on."""

    ratios: list[RatioInterval]


def running_figure(effects: Sequence[PairEffect], run: RunData) -> Figure | None:
    """Running ratios to off x off of stage, control and A/A; None where none has an interval."""
    batches = [b for b in run.batches if b.phase == Phase.INTERLEAVED]
    order = {batch.batch: place for place, batch in enumerate(batches, 1)}
    shown = [
        found
        for effect in effects
        if effect.pair.reference.is_baseline and _is_shown(effect)
        if (found := _running(effect, order)).ratios
    ]
    if not shown:
        return None
    data: list[dict[str, Any]] = []
    for place, own in enumerate(shown):
        data += _traces(own, place)
    clocks = {
        order[b.batch]: clock
        for b in batches
        if (clock := b.conditions.get("gpu_sm_clock_mhz")) is not None
    }
    axes: dict[str, Any] = {}
    heights = [3.0]
    if clocks:
        heights.append(1.0)
        axes = {"xaxis2": axis(_X), "yaxis2": axis("MHz", nticks=4)}
        data.append(_clock_line(clocks))
    return Figure(
        name="windows-in-turn",
        caption=(
            "Each cell's ratio to off x off after so many batches of windows in turn, shaded its "
            "95 % interval: below 1 is faster. A line that keeps drifting has not settled."
            + (" Below: the SM clock at the end of each batch (MHz)." if clocks else "")
        ),
        alternative=f"Running ratios to off x off. {_in_words(shown)}",
        data=tuple(data),
        layout=layout(
            axis("" if clocks else _X),
            axis("ratio to off x off", line_at=1),
            heights=heights,
            showlegend=True,
            **axes,
        ),
        height=round(260 + 75 * sum(heights[1:])),
    )


_X = "interleaved batches so far"


def _is_shown(effect: PairEffect) -> bool:
    cell = effect.pair.treated
    return cell.nwor_mode is not NworMode.OFF or cell.arm == AA


def _running(effect: PairEffect, order: dict[int, int]) -> _Running:
    """The estimate after each batch, of at most _POINTS batches."""
    after = [order[group.batch] for group in effect.groups]
    ends = [n for n in range(len(after)) if n + 1 == len(after) or after[n] != after[n + 1]]
    step = -(-len(ends) // _POINTS) or 1
    kept = [end for place, end in enumerate(reversed(ends)) if place % step == 0][::-1]
    places, ratios = [], []
    for end in kept:
        located = robust_location(effect.effects[: end + 1])
        if located is not None:
            places.append(after[end])
            ratios.append(as_ratio(located))
    return _Running(effect, places, ratios)


def _traces(own: _Running, place: int) -> list[dict[str, Any]]:
    cell = own.effect.pair.treated
    tint = colour("ambiguous" if cell.arm == AA else _TINTS[place % len(_TINTS)])
    lows, highs = [r.low for r in own.ratios], [r.high for r in own.ratios]
    return [
        {"type": "band", "x": own.places, "low": lows, "high": highs, "line": {"color": tint}},
        {"type": "line", "name": cell.label, "x": own.places,
         "y": [r.ratio for r in own.ratios], "line": {"color": tint}, "symbol": ".",
         "dash": ":" if cell.arm == AA else "-"},
    ]  # fmt: skip


def _clock_line(clocks: dict[int, float]) -> dict[str, Any]:
    return {
        "type": "line", "name": "SM clock, MHz", "xaxis": "x2", "x": list(clocks),
        "y": list(clocks.values()), "line": {"color": colour("soft")}, "symbol": ".",
    }  # fmt: skip


def _in_words(shown: Sequence[_Running]) -> str:
    return "; ".join(
        f"{own.effect.pair.treated.label} {own.ratios[0].ratio:.4f} at first, "
        f"{own.ratios[-1].ratio:.4f} [{own.ratios[-1].low:.4f}, {own.ratios[-1].high:.4f}] at last"
        for own in shown
    )
