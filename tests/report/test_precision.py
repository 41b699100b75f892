"""Reports state precision: noise floor, smallest effect, findings with remedies."""

import csv
import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from synthetic_run import (
    change_batches,
    document_of,
    make_run,
    save_run,
    summarised,
    with_parts,
    write_reports,
)

from nwor_bench.analysis.findings import findings
from nwor_bench.records.store import RunData
from nwor_bench.report import print_summary
from nwor_bench.report.content import build_document
from nwor_bench.report.markdown import escape, render_markdown
from nwor_bench.report.sections.verdicts import verdict_sentence
from nwor_bench.report.text import p_value

pytestmark = pytest.mark.slow  # whole runs


@pytest.fixture
def run() -> RunData:
    """Ten blocks with the A/A arm, on a busy machine, stopped by its intervals' width."""
    made = make_run(blocks=10, aa=True)
    made = with_parts(
        made,
        warmup={"batches": 6, "lookback": 5, "not_steady": None},
        stopped="--ci-width 1%: every ratio is known to +- 0.20 %",
    )
    busy = {"cpu_other": 0.4, "cpu_steal": 0.0, "major_faults": 0.0, "swapped_in_bytes": 0.0}
    return change_batches(made, lambda b: b.phase == "timed", conditions=busy)


def test_markdown_tells_the_floor_the_smallest_effect_and_every_finding(run):
    cells = summarised(run)
    text = render_markdown(build_document(run, cells))
    precision = text.split("## Measurement precision")[1].split("\n## ")[0]
    told = text.split("## Findings")[1].split("\n## ")[0]
    for cell in cells:
        if cell.ratio_to_off is not None:
            assert f"| {escape(cell.label)} " in precision
            assert f"{100 * cell.smallest_effect:.2f} %" in precision
    assert "Warm-up took 6 batches; then times were steady" in precision
    assert "Blocks ended by --ci-width 1%" in precision
    found = findings(run, cells)
    assert any(finding.kind == "cpu_busy" for finding in found)
    for finding in found:
        assert escape(finding.message) in told
        assert escape(finding.remedy) in told


def test_a_run_without_findings_says_so():
    made = make_run(blocks=12, aa=True, device="cuda")
    made = change_batches(made, lambda b: True, fallbacks={})
    text = render_markdown(document_of(made))
    assert "Nothing was found that weakens the numbers." in text


def test_the_terminal_shows_findings_too(run, tmp_path):
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        print_summary(console, run, summarised(run), tmp_path, verbose=True)
    lines = capture.get()
    assert "Other processes used up to 40.0 % of the processors' time" in " ".join(lines.split())
    assert "off x off (A/A)" in lines
    assert max(map(len, lines.splitlines()[:-2])) <= 80


def test_run_json_holds_floor_and_findings(run, tmp_path):
    save_run(run, tmp_path / "run")
    paths = write_reports(tmp_path / "run")
    header = json.loads(paths.run_json.read_text())
    cells = summarised(run)
    arm = next(cell for cell in cells if cell.arm)
    assert header["noise_floor"]["half_width"] == arm.half_width
    assert header["noise_floor"]["cell"] == "off x off (A/A)"
    expected = [finding.to_dict() for finding in findings(run, cells)]
    assert header["findings"] == expected
    assert {"kind", "severity", "message", "remedy", "cell"} == set(expected[0])
    batches = list(csv.DictReader(io.StringIO(paths.batches_csv.read_text())))
    assert json.loads(batches[-1]["conditions"])["cpu_other"] == 0.4
    assert {row["arm"] for row in batches} == {"", "A/A"}


def test_the_verdict_names_the_noise_floor_and_not_the_arm_among_the_modes(run):
    cells = summarised(run)
    text = verdict_sentence(run.header, cells)
    arm = next(cell for cell in cells if cell.arm)
    low, high = 100 * (arm.ratio_ci_low - 1), 100 * (arm.ratio_ci_high - 1)
    assert f"off x off against itself came out at {low:+.2f} % to {high:+.2f} %" in text
    assert "A/A" not in text
    assert "Time per window against off x off" in text


def test_only_latencies_are_called_latencies(run):
    windows = tuple(replace(window, wall_ms=None) for window in run.windows)
    cells = summarised(replace(run, windows=windows))
    assert "Time per batch against off x off" in verdict_sentence(run.header, cells)


@pytest.mark.parametrize(
    ("value", "text"), [(0.5, "0.500"), (0.0004, "< 0.001"), (0.0, "< 0.001"), (1.0, "1.000")]
)
def test_p_values(value, text):
    assert p_value(value) == text
