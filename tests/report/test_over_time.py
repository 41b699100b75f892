"""Ratios and throughput in their order: every dot is a measurement, and drift can be seen."""

import re
from math import exp, log
from statistics import fmean
from typing import Any

import pytest
from interleaved_run import STAGE_GRAPH, Planted, interleaved_run
from report_runs import gpu_run, invalid
from synthetic_run import analysed, change_windows

from nwor_bench.records.store import RunData
from nwor_bench.report.document import Figure
from nwor_bench.report.html import canvas_of
from nwor_bench.report.over_time import MAX_DOTS, merged, over_time_section, ratios_in_order

pytestmark = pytest.mark.slow  # whole runs

RATIO, RATE = "ratio-over-time", "throughput-over-time"


def figures(run: RunData) -> dict[str, Figure]:
    """Both figures by name."""
    (section,) = over_time_section(analysed(run))
    return {block.name: block for block in section.blocks if isinstance(block, Figure)}


def panels(run: RunData, name: str) -> dict[str, Any]:
    """The drawn panels by their cell."""
    drawn = canvas_of(figures(run)[name]).axes
    return {axes.get_title(loc="left"): axes for axes in drawn if axes.get_visible()}


def dots(axes: Any) -> list[float]:
    """The values of a panel."""
    return list(axes.containers[0][0].get_ydata())


def test_ratios_of_blocks_are_those_that_the_cell_s_ratio_was_made_of() -> None:
    found = analysed(gpu_run({"graph": 0.95}))
    cells = [cell for cell in found.cells if cell.ratio_to_off is not None]
    assert len(cells) > 3
    for cell in cells:
        ratios = ratios_in_order(found, cell)
        assert len(ratios) == 12
        assert exp(fmean(map(log, ratios))) == pytest.approx(cell.ratio_to_off)


def test_each_panel_has_the_cell_s_dots_and_its_interval() -> None:
    run = gpu_run({"graph": 0.95})
    found = {cell.label: cell for cell in analysed(run).cells if cell.ratio_to_off is not None}
    drawn = panels(run, RATIO)
    assert set(drawn) == set(found)
    for label, axes in drawn.items():
        assert dots(axes) == pytest.approx(ratios_in_order(analysed(run), found[label]))
        (band,) = axes.patches
        ends = (band.get_y(), band.get_y() + band.get_height())
        assert ends == pytest.approx((found[label].ratio_ci_low, found[label].ratio_ci_high))
    alternative = figures(run)[RATIO].alternative
    assert re.search(r"stage x graph 0\.9[45]\d, 0\.9[45]\d, 0\.9[45]\d", alternative)
    assert all(label in alternative for label in found)


def test_drift_between_groups_is_seen() -> None:
    clocks = [1980.0] * 6 + [1880.0] * 6
    drifting = interleaved_run(Planted({"stage x graph": 0.97}, clocks=clocks, per_100_mhz=-0.03))
    values = dots(panels(drifting, RATIO)[STAGE_GRAPH.label])
    third = len(values) // 3
    assert max(values[:third]) == pytest.approx(0.97, abs=0.01)
    assert min(values[-third:]) == pytest.approx(1.0, abs=0.01)


def test_many_groups_become_dots_with_intervals() -> None:
    noise = [0.97, 0.98, 0.99] * 100
    found = merged(noise)
    assert len(found) == MAX_DOTS
    assert all(dot.low < dot.value < dot.high for dot in found)  # type: ignore[operator]
    assert [dot.value for dot in merged(noise[:9])] == noise[:9]
    assert {dot.low for dot in merged(noise[:9])} == {None}
    assert merged([]) == ()


def test_throughput_is_tokens_over_window_time() -> None:
    def timed(window: Any) -> bool:
        return True

    even = change_windows(
        gpu_run(), timed, wall_ms=10.0, num_reqs=2, draft_tokens=8, accepted_tokens=5,
        staged_tokens=0, committed_tokens=0, rejected_tokens=0,
    )  # fmt: skip
    assert {round(value, 6) for axes in panels(even, RATE).values() for value in dots(axes)} == {
        700
    }
    # One of the two requests had finished: its token and its 2 accepted drafts are no output.
    ended = change_windows(even, timed, uncounted_draft_tokens=4, uncounted_accepted_tokens=2)
    assert {round(value, 6) for axes in panels(ended, RATE).values() for value in dots(axes)} == {
        400
    }


def test_cells_without_times_have_no_panel() -> None:
    for name in (RATIO, RATE):
        drawn = panels(invalid(), name)
        assert "stage x off" in drawn
        assert "stage x graph" not in drawn


def test_a_short_run_has_no_such_section() -> None:
    assert over_time_section(analysed(gpu_run(blocks=4))) == []
    untimed = change_windows(gpu_run(), lambda w: True, wall_ms=None)
    assert set(figures(untimed)) == {RATIO}
