"""Figures show exactly what was measured, at the values of the tables."""

import html
import re
from dataclasses import replace
from typing import Any

import pytest
from report_runs import RUNS, faster, gpu_run, invalid, with_counters
from synthetic_run import change_windows, document_of, kept, make_run, summarised

from nwor_bench.analysis.analyse import noise_floor
from nwor_bench.records.store import RunData
from nwor_bench.report.cells import VERDICT_MARKS, interval_figure
from nwor_bench.report.document import Figure, Paragraph, Table
from nwor_bench.report.html import COLOURS, canvas_of, colour, draw_svg

pytestmark = pytest.mark.slow  # whole runs


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


def words(run: RunData, title: str) -> str:
    """The paragraphs of one section."""
    document = document_of(run)
    (section,) = [section for section in document.sections if section.title == title]
    return " ".join(block.text for block in section.blocks if isinstance(block, Paragraph))


def rows_of_precision(run: RunData) -> set[str]:
    """The cells that the tables of precision have."""
    (section,) = [s for s in document_of(run).sections if s.title == "Measurement precision"]
    return {row[0] for block in section.blocks if isinstance(block, Table) for row in block.rows}


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


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n not in ("cpu", "faster"))) for n in RUNS]
)
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


def test_what_was_not_measured_is_a_sentence_and_no_figure():
    cpu = make_run(aa=True)
    assert "timed between events on a GPU" in words(cpu, "Where a window's time goes")
    assert "not measured in this run" in words(cpu, "Bytes: predicted and measured")
    assert "no interleaved window" in words(gpu_run(probed=False), "Where a window's time goes")
    bare = replace(
        change_windows(cpu, lambda w: True, wall_ms=None, accepted_per_position=()),
        batches=tuple(replace(b, vllm_accepted_per_position=None) for b in cpu.batches),
    )
    one = kept(bare, lambda record: record.block == 0)
    assert set(figures(one)) == set()


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
    assert "There is no noise band" in bare.caption


def test_times_that_do_not_count_are_in_no_figure():
    wrong = invalid()
    (axes,) = panels(wrong, "intervals")
    assert "stage x off" in rows(axes)
    assert "stage x graph" not in rows(axes)
    assert "stage x off" in rows_of_precision(wrong)
    assert "stage x graph" not in rows_of_precision(wrong)


def test_hostile_labels_make_no_markup():
    nasty = '</svg></script><a href="http://x">&amp; $x_2$'
    figure = interval_figure(summarised(faster()), 0.01)
    assert figure is not None
    draw = lambda canvas: canvas.subplots().set_xlabel(nasty, color=colour("text"))  # noqa: E731
    drawn = draw_svg(replace(figure, alternative=nasty, draw=draw))
    assert nasty in shown_texts(drawn)
    assert "<a " not in drawn
    assert drawn.count("</svg>") == 1
