"""Figures show exactly what was measured, at the values of the tables."""

import html
import re
from dataclasses import replace
from math import exp, log
from statistics import fmean
from typing import Any

import pytest
from interleaved_run import STAGE_GRAPH, Planted, interleaved_run
from report_runs import RUNS, faster, gpu_run, invalid, with_counters
from synthetic_run import analysed, change_windows, document_of, kept, make_run, summarised

from nwor_bench.analysis.analyse import noise_floor
from nwor_bench.records.cell import Arguments
from nwor_bench.records.store import RunData
from nwor_bench.records.types import Verdict
from nwor_bench.report.cells import VERDICT_MARKS, interval_figure
from nwor_bench.report.document import Figure
from nwor_bench.report.html import COLOURS, canvas_of, colour, draw_svg
from nwor_bench.report.over_time import MAX_DOTS, merged, over_time_section, ratios_in_order

pytestmark = pytest.mark.slow  # whole runs

RATIO, RATE = "ratio-over-time", "throughput-over-time"


def figures(run: RunData) -> dict[str, Figure]:
    """The report's figures by name."""
    document = document_of(run)
    blocks = [*document.lead, *(b for section in document.sections for b in section.blocks)]
    return {block.name: block for block in blocks if isinstance(block, Figure)}


def panels(run: RunData, name: str) -> Any:
    """The drawn panels of one figure."""
    return canvas_of(figures(run)[name]).axes


def rows(axes: Any) -> list[str]:
    """The labels of a vertical axis with one row a label."""
    return [label.get_text() for label in axes.get_yticklabels()]


def shown_texts(svg: str) -> list[str]:
    """The texts of a drawn figure."""
    return [html.unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]


def intervals(axes: Any) -> dict[str, tuple[str, float, float, float]]:
    """Marker, low end, value and high end of each row of a forest plot."""
    found, labels = {}, rows(axes)
    for container in axes.containers:
        line, _, (bars,) = container
        for x, y, (start, end) in zip(*line.get_data(), bars.get_segments(), strict=True):
            found[labels[int(y)]] = (line.get_marker(), start[0], x, end[0])
    return found


@pytest.fixture(scope="module")
def run() -> RunData:
    return with_counters(faster(), 50_000)


@pytest.mark.parametrize("name", ["cpu", "faster"])
def test_every_figure_is_drawn_with_its_texts_in_the_page_s_colours(name):
    for figure in figures(RUNS[name]()).values():
        svg = draw_svg(figure)
        texts = shown_texts(svg)
        numbers = [text for text in texts if re.fullmatch(r"[-\u2212]?[\d.]+", text)]
        assert len(numbers) >= 3, (figure.name, texts)
        assert svg.count("<title>") == 1
        assert 'role="img"' in svg
        assert set(re.findall(r"var\(--([a-z]+)\)", svg)) <= set(COLOURS)
        assert "#0f1e" not in svg
        assert not re.search(r"#000000|xmlns|<metadata|https?:", svg)
        assert svg == draw_svg(figure)


def test_what_was_not_measured_has_no_figure():
    bare = make_run(aa=True)
    bare = replace(
        change_windows(bare, lambda w: True, wall_ms=None, accepted_per_position=()),
        batches=tuple(replace(b, vllm_accepted_per_position=None) for b in bare.batches),
    )
    assert set(figures(kept(bare, lambda record: record.block == 0))) == set()
    for name in ("intervals", RATIO, RATE):  # an INVALID cell's times do not count
        drawn = panels(invalid(), name)
        shown = rows(drawn[0]) if name == "intervals" else [*titled(drawn)]
        assert "stage x off" in shown
        assert "stage x graph" not in shown


def test_each_interval_lies_where_its_numbers_say(run):
    cells = {cell.label: cell for cell in summarised(run) if cell.ratio_to_off is not None}
    (axes,) = panels(run, "intervals")
    seen = intervals(axes)
    assert set(seen) == set(cells)
    assert "off x off (A/A)" in seen
    low, high = axes.get_xlim()
    for label, (marker, *ends) in seen.items():
        cell = cells[label]
        assert marker == VERDICT_MARKS[cell.verdict]
        expected = (cell.ratio_ci_low, cell.ratio_to_off, cell.ratio_ci_high)
        assert ends == pytest.approx(expected, rel=1e-9)
        assert low < ends[0] < ends[2] < high
    assert len(set(VERDICT_MARKS.values())) == len(VERDICT_MARKS)
    assert "1.000" in shown_texts(draw_svg(figures(run)["intervals"]))


def test_the_noise_band_and_the_line_at_one(run):
    cells = summarised(run)
    figure = interval_figure(cells, 0.01)
    assert figure is not None
    (axes,) = canvas_of(figure).axes
    floor = noise_floor(cells)["floor"]
    (band,) = axes.patches
    assert (band.get_x(), band.get_width()) == pytest.approx((1 - floor, 2 * floor))
    upright = sorted(x[0] for line in axes.lines if len(set(x := line.get_xdata())) == 1
                     and line.get_marker() == "None")  # fmt: skip
    assert upright == [0.99, 1, 1.01]
    bare = interval_figure([cell for cell in cells if cell.arm is None], 0.01)
    assert bare is not None
    assert not canvas_of(bare).axes[0].patches
    assert "noise" not in bare.caption


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_long_label_leaves_room_for_the_bars():
    first, *others = summarised(faster())
    arm = Arguments.of({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}})
    figure = interval_figure([first, *(replace(cell, arm=str(arm)) for cell in others)], 0.01)
    assert figure is not None
    draw_svg(figure)  # matplotlib warns if no room is left
    (axes,) = canvas_of(figure).axes
    assert rows(axes)[-1].endswith(" ...")


def test_hostile_labels_make_no_markup():
    nasty = '</svg></script><a href="http://x">&amp; $x_2$'
    figure = interval_figure(summarised(faster()), 0.01)
    assert figure is not None
    draw = lambda canvas: canvas.subplots().set_xlabel(nasty, color=colour("text"))  # noqa: E731
    drawn = draw_svg(replace(figure, alternative=nasty, draw=draw))
    assert nasty in shown_texts(drawn)
    assert "<a " not in drawn
    assert drawn.count("</svg>") == 1


def titled(drawn: Any) -> dict[str, Any]:
    """Panels by their cell."""
    return {axes.get_title(loc="left"): axes for axes in drawn if axes.get_visible()}


def dots(axes: Any) -> list[float]:
    """The values of a panel."""
    return list(axes.containers[0][0].get_ydata())


def test_each_panel_has_the_cell_s_dots_and_its_interval() -> None:
    """The cell's ratio is the geometric mean of the blocks' ratios."""
    run = gpu_run({"graph": 0.95})
    found = {cell.label: cell for cell in analysed(run).cells if cell.ratio_to_off is not None}
    drawn = titled(panels(run, RATIO))
    assert set(drawn) == set(found)
    for label, axes in drawn.items():
        cell, ratios = found[label], ratios_in_order(analysed(run), found[label])
        assert len(ratios) == 12
        assert exp(fmean(map(log, ratios))) == pytest.approx(cell.ratio_to_off)
        assert dots(axes) == pytest.approx(ratios)
        (band,) = axes.patches
        ends = (band.get_y(), band.get_y() + band.get_height())
        assert ends == pytest.approx((cell.ratio_ci_low, cell.ratio_ci_high))
    alternative = figures(run)[RATIO].alternative
    assert re.search(r"stage x graph 0\.9[45]\d, 0\.9[45]\d, 0\.9[45]\d", alternative)
    assert all(label in alternative for label in found)


def test_drift_between_groups_is_seen() -> None:
    clocks = [1980.0] * 6 + [1880.0] * 6
    drifting = interleaved_run(Planted({"stage x graph": 0.97}, clocks=clocks, per_100_mhz=-0.03))
    values = dots(titled(panels(drifting, RATIO))[STAGE_GRAPH.label])
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
    def everything(window: Any) -> bool:
        return True

    even = change_windows(
        gpu_run(), everything, wall_ms=10.0, num_reqs=2, draft_tokens=8, accepted_tokens=5,
        staged_tokens=0, committed_tokens=0, rejected_tokens=0,
    )  # fmt: skip
    # One of the two requests had finished: its token and its 2 accepted drafts are no output.
    ended = change_windows(even, everything, uncounted_draft_tokens=4, uncounted_accepted_tokens=2)
    for run, rate in ((even, 700), (ended, 400)):
        shown = {round(value, 6) for axes in panels(run, RATE) for value in dots(axes)}
        assert shown == {rate}


def test_batches_of_a_long_run_share_dots() -> None:
    """A dot for each batch took two thirds of the page."""
    drawn = titled(panels(gpu_run(blocks=100), RATE))
    assert {len(dots(axes)) for axes in drawn.values()} == {10}


def test_a_short_run_has_no_such_section() -> None:
    assert over_time_section(analysed(gpu_run(blocks=4))) == []
    untimed = change_windows(gpu_run(), lambda w: True, wall_ms=None)
    assert RATIO in figures(untimed)
    assert RATE not in figures(untimed)


@pytest.mark.parametrize("verdict", [v for v in Verdict if v != Verdict.CHECKED])
def test_a_cell_of_any_verdict_can_be_drawn(run: RunData, verdict: Verdict) -> None:
    """A draft count may have a few groups, too few for a verdict."""
    cells = [replace(cell, verdict=str(verdict)) for cell in summarised(run)]
    (section,) = over_time_section(analysed(run, cells))
    assert all("<svg" in draw_svg(b) for b in section.blocks if isinstance(b, Figure))
