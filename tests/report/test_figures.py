"""Figures show what was measured and nothing else, where the numbers say."""

import html
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from report_runs import RUNS, faster, gpu_run, invalid, with_counters
from synthetic_run import (
    change_batches,
    change_windows,
    document_of,
    make_run,
    summarised,
    with_header,
)

from nwor_bench.analysis.aggregate import noise_floor
from nwor_bench.analysis.dram.counters import cell_bytes
from nwor_bench.analysis.phases import PHASES, cell_phases
from nwor_bench.records.store import RunData
from nwor_bench.report.document import Figure, Paragraph
from nwor_bench.report.html.page import render_html
from nwor_bench.report.plots import axis
from nwor_bench.report.sections.intervals import interval_figure
from nwor_bench.report.svg import COLOURS, draw_svg

pytestmark = pytest.mark.slow  # whole runs


def figures(run: RunData) -> dict[str, Figure]:
    """The report's figures by name."""
    document = document_of(run)
    blocks = [*document.lead, *(b for section in document.sections for b in section.blocks)]
    return {block.name: block for block in blocks if isinstance(block, Figure)}


def words(run: RunData, title: str) -> str:
    """The paragraphs of one section."""
    document = document_of(run)
    (section,) = [section for section in document.sections if section.title == title]
    return " ".join(block.text for block in section.blocks if isinstance(block, Paragraph))


def shown_texts(svg: str) -> list[str]:
    """The texts of a drawn figure."""
    return [html.unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]


@pytest.fixture(scope="module")
def run() -> RunData:
    return with_counters(faster(), 50_000)


def test_every_scale_of_numbers_is_labelled(run: RunData):
    for name, figure in figures(run).items():
        texts = shown_texts(draw_svg(figure))
        numbers = [text for text in texts if re.fullmatch(r"[-\u2212]?[\d.]+", text)]
        assert len(numbers) >= 3, (name, texts)
    (intervals,) = [f for name, f in figures(run).items() if name == "intervals"]
    assert "1.000" in shown_texts(draw_svg(intervals))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n not in ("cpu", "faster"))) for n in RUNS]
)
def test_every_figure_is_drawn_with_its_texts_in_the_page_s_colours(name):
    for figure in figures(RUNS[name]()).values():
        svg = draw_svg(figure)
        texts = shown_texts(svg)
        labels = figure.layout["yaxis"].get("categoryarray", ())
        assert set(labels) <= set(texts)
        title = figure.layout["xaxis"]["title"]["text"]
        assert not title or title in texts
        assert svg.count("<title>") == 1
        assert 'role="img"' in svg
        assert set(re.findall(r"var\(--([a-z]+)\)", svg)) <= set(COLOURS)
        assert "#0f1e" not in svg
        assert not re.search(r"#000000|xmlns|<metadata|https?:", svg)
        assert svg == draw_svg(figure)


def test_all_figures_are_there_where_all_was_measured(run):
    names = {"intervals", "blocks", "window-times", "acceptance", "timeline", "dram-bytes"}
    assert set(figures(run)) == names
    for figure in figures(run).values():
        assert figure.caption.endswith(".")
        assert len(figure.alternative) > 40


def test_what_was_not_measured_is_a_sentence_and_no_figure():
    cpu = make_run(aa=True)
    assert set(figures(cpu)) == {"intervals", "blocks", "window-times", "acceptance"}
    assert "timed between events on a GPU" in words(cpu, "Where a window's time goes")
    assert "not measured in this run" in words(cpu, "Bytes: predicted beside measured")
    assert "no batch was probed" in words(gpu_run(probed=False), "Where a window's time goes")
    bare = replace(
        change_windows(cpu, lambda w: True, wall_ms=None, accepted_per_position=()),
        batches=tuple(replace(b, vllm_accepted_per_position=None) for b in cpu.batches),
    )
    one = replace(bare, batches=tuple(b for b in bare.batches if b.phase == "gate"))
    gate = {batch.batch for batch in one.batches}
    one = replace(one, windows=tuple(w for w in one.windows if w.batch in gate))
    assert set(figures(one)) == set()
    assert "No cell could be compared" in words(one, "Cells")
    assert "No window with a time" in words(one, "Window times")
    assert "was not counted, so it is not drawn" in words(one, "Acceptance")


def test_each_interval_lies_where_its_numbers_say(run):
    cells = {cell.label: cell for cell in summarised(run)}
    figure = figures(run)["intervals"]
    seen = {}
    for trace in figure.data:
        points = zip(trace["y"], trace["x"], trace["error_x"]["array"],
                     trace["error_x"]["arrayminus"], strict=True)  # fmt: skip
        for label, ratio, above, below in points:
            assert cells[label].verdict == trace["name"]
            seen[label] = (ratio - below, ratio, ratio + above)
    assert set(seen) == {label for label, cell in cells.items() if cell.ratio_to_off is not None}
    assert "off x off (A/A)" in seen
    for label, ends in seen.items():
        cell = cells[label]
        expected = (cell.ratio_ci_low, cell.ratio_to_off, cell.ratio_ci_high)
        assert ends == pytest.approx(expected, rel=1e-12)
    low, high = figure.layout["xaxis"]["range"]
    assert low < min(ends[0] for ends in seen.values())
    assert high > max(ends[2] for ends in seen.values())
    symbols = {trace["name"]: trace["marker"]["symbol"] for trace in figure.data}
    assert len(set(symbols.values())) == len(symbols)


def test_the_noise_band_and_the_line_at_one(run):
    cells = summarised(run)
    shapes = interval_figure(cells, 0.01).layout["shapes"]
    (band,) = [shape for shape in shapes if shape["type"] == "rect"]
    floor = noise_floor(cells)["floor"]
    assert (band["x0"], band["x1"]) == (1 - floor, 1 + floor)
    lines = sorted(shape["x0"] for shape in shapes if shape["type"] == "line")
    assert lines == [0.99, 1, 1.01]
    without = [cell for cell in cells if cell.arm is None]
    bare = interval_figure(without, 0.01)
    assert [shape["type"] for shape in bare.layout["shapes"]] == ["line"] * 3
    assert "There is no noise band" in bare.caption


def test_each_block_stands_with_its_ratio_and_the_clocks_of_that_block(run):
    warm = change_batches(
        change_batches(run, lambda b: b.phase == "timed", conditions={"gpu_sm_clock_mhz": 1980.0}),
        lambda b: b.phase == "timed" and b.block == 3 and b.nwor_mode == "stage",
        conditions={"gpu_sm_clock_mhz": 1500.0, "gpu_throttled_ms": 40.0},
    )
    figure = figures(warm)["blocks"]
    lines = {trace["name"]: trace for trace in figure.data}
    compared = {cell.label: cell for cell in summarised(warm) if cell.ratio_to_off is not None}
    assert set(lines) == {*compared, "SM clock, MHz", "throttled, ms"}
    for label, cell in compared.items():
        assert lines[label]["x"] == list(range(1, 13))
        assert np.exp(np.mean(np.log(lines[label]["y"]))) == pytest.approx(
            cell.ratio_to_off, rel=1e-3
        )
    clocks = dict(zip(lines["SM clock, MHz"]["x"], lines["SM clock, MHz"]["y"], strict=True))
    assert clocks == {block: 1500.0 if block == 3 else 1980.0 for block in range(1, 13)}
    assert lines["throttled, ms"]["y"] == [120.0]
    assert "SM clock 1500 to 1980 MHz" in figure.alternative
    assert {"MHz", "ms"} <= set(shown_texts(draw_svg(figure)))
    assert "clocks were not recorded" in figures(run)["blocks"].caption


def test_window_times_keep_their_distribution_and_their_outliers(run, figures_left_out):
    slow = change_windows(
        run,
        lambda w: (w.nwor_mode, w.scv_mode, w.block, w.window) == ("stage", "off", 3, 2),
        wall_ms=987.654,
    )
    timed = {b.batch for b in slow.batches if b.phase == "timed"}
    times = {
        name: {(w.block, w.window): w.wall_ms for w in slow.windows
               if (w.nwor_mode, w.scv_mode, w.arm) == name and w.batch in timed}
        for name in (("stage", "off", None), ("off", "off", None))
    }  # fmt: skip
    treated, baseline = times.values()
    own = [100 * (treated[place] / baseline[place] - 1) for place in treated]
    figure = figures(slow)["window-times"]
    (trace,) = [trace for trace in figure.data if trace["name"] == "stage x off"]
    assert np.median(trace["x"]) == pytest.approx(np.median(own), rel=1e-3)
    assert np.percentile(trace["x"], 25) == pytest.approx(np.percentile(own, 25), rel=3e-2)
    assert "off x off" not in {trace["name"] for trace in figure.data}
    (line,) = figure.layout["shapes"]
    assert line["x0"] == 0
    text = render_html(document_of(slow))
    assert ">987.65</td>" in text


def test_times_that_do_not_count_are_in_no_figure():
    wrong = invalid()
    for name in ("window-times", "timeline", "intervals", "blocks"):
        figure = figures(wrong)[name]
        assert "stage x off" in json.dumps(figure.data)
        assert "stage x graph" not in json.dumps(figure.data)
    assert "stage x graph" in words(wrong, "Window times")


def test_cells_that_accepted_alike_share_their_bars(run):
    (trace,) = figures(run)["acceptance"].data
    cell = summarised(run)[0]
    assert trace["y"] == [100 * rate for rate in cell.acceptance_per_position]
    assert trace["name"] == "all cells"
    other = change_batches(
        change_windows(run, lambda w: w.nwor_mode == "stage", accepted_per_position=(1, 0, 0, 0)),
        lambda b: b.nwor_mode == "stage",
        vllm_accepted_per_position=None,
    )
    names = [trace["name"] for trace in figures(other)["acceptance"].data]
    assert len(names) == 2
    assert names[1] == "stage x off, stage x graph and stage x adaptive"


def test_the_timeline_shows_each_measured_phase_and_no_other(run):
    rows = {row.cell.label: row for row in cell_phases(run) if row.cell.arm is None}
    figure = figures(run)["timeline"]
    bars = [trace for trace in figure.data if trace["type"] == "bar" and trace["xaxis"] == "x"]
    assert [bar["name"] for bar in bars] == [name.removesuffix("_ms") for name in PHASES]
    for bar, name in zip(bars, PHASES, strict=True):
        shown = dict(zip(bar["y"], bar["x"], strict=True))
        shown.pop("off x off (A/A)", None)
        wanted = {label: row.device_ms[name] for label, row in rows.items()}
        assert shown == {label: value for label, value in wanted.items() if value is not None}
    assert "off x off" not in bars[2]["y"]  # stock vLLM makes no mask
    fused = change_windows(run, lambda w: True, mask_ms=None)
    assert "mask" not in {trace["name"] for trace in figures(fused)["timeline"].data}
    assert "mask" not in figures(fused)["timeline"].alternative


def test_dram_bytes_stand_beside_their_prediction(run):
    found = {cell.cell.label: cell for cell in cell_bytes(run) if cell.cell.arm is None}
    measured, predicted = figures(run)["dram-bytes"].data
    place = measured["y"].index("stage x graph")
    cell = found["stage x graph"]
    assert measured["x"][place] == cell.differences["dram_write_bytes"].mean / 1e6
    assert measured["x"][place] == pytest.approx(-0.05, rel=0.1)
    assert predicted["x"][place] == cell.predicted["dram_write_bytes"] / 1e6
    assert predicted["x"][measured["y"].index("off x graph")] is None


def test_predicted_bytes_are_those_of_the_byte_model_by_hand(figures_left_out):
    run = gpu_run()
    baseline = summarised(run)[0]
    row = run.header.engine.bytes_per_token
    drafts = baseline.draft_tokens / baseline.windows
    kept = baseline.accepted_tokens / baseline.windows
    text = render_html(document_of(run))
    table = re.search(r"predicted by the byte model.*?</table>", text, re.DOTALL).group()
    rows = [re.findall(r">([^<>]+)</t[dh]>", line) for line in table.split("<tr>")[2:]]
    shown = {line[0]: line[1:] for line in rows}
    kb = lambda amount: f"{amount / 1000:,.1f} kB"  # noqa: E731
    assert shown["direct (stock vLLM)"][:2] == ["0 B", kb(drafts * row)]
    assert shown["by reference"] == [kb(kept * row)] * 2 + [kb((drafts - 2 * kept) * row)]
    assert shown["copy, spilled from L2"] == [
        kb(kept * row), kb((drafts + kept) * row), f"-{kb(2 * kept * row)}",
    ]  # fmt: skip
    assert shown["copy, kept in L2"] == ["0 B", kb(kept * row), kb((drafts - kept) * row)]


def test_an_fp8_cache_below_bf16_activations_is_read_at_twice_the_size(figures_left_out):
    run = gpu_run()
    tables = [
        re.search(
            r"by reference</th><td[^>]*>([\d.]+) kB",
            render_html(document_of(each)),
        )
        for each in (run, with_header(run, "engine", kv_cache_dtype="fp8"))
    ]
    plain, fp8 = (float(found.group(1)) for found in tables)
    assert fp8 == pytest.approx(2 * plain, abs=0.1)


def test_hostile_labels_make_no_markup():
    nasty = '</svg></script><a href="http://x">&amp; $x_2$'
    figure = interval_figure(summarised(faster()), 0.01)
    assert figure is not None
    drawn = draw_svg(
        replace(figure, alternative=nasty, layout={**figure.layout, "xaxis": axis(nasty)})
    )
    assert nasty in shown_texts(drawn)
    assert "<a " not in drawn
    assert drawn.count("</svg>") == 1
