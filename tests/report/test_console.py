"""The terminal's tables fit and keep their digits; the command's exit code tells of INVALID."""

from dataclasses import replace

import pytest
import typer
from report_runs import faster, with_counters
from rich.console import Console
from synthetic_run import change_batches, make_run, save_run, summarised
from typer.testing import CliRunner

from nwor_bench.analysis.findings import findings, grouped
from nwor_bench.cli.commands.report import report
from nwor_bench.errors import ConfigError
from nwor_bench.report import cells_table, details_table, print_summary
from nwor_bench.report.sections.verdicts import answer
from nwor_bench.report.text import ratio


def shown(renderable, width: int) -> list[str]:
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get().splitlines()


def big_cells():
    """Cells with the largest numbers that a long sweep would give."""
    return [
        replace(
            cell,
            nwor_total_staged=12_345_678,
            nwor_total_committed=9_876_543,
            nwor_fallback_count=1_234_567,
            latency_ms_p50=123_456.7,
            tokens_per_s=98_765.4,
            ratio_to_off=11.111,
            ratio_ci_low=10.222,
            ratio_ci_high=12.333,
        )
        for cell in summarised(make_run())
    ]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("cells", [summarised(make_run()), big_cells()], ids=["usual", "big"])
def test_tables_fit_and_cut_no_number(cells, width):
    lines = shown(cells_table(cells), width)
    details = shown(details_table(cells), width)
    assert max(len(line.rstrip()) for line in lines) <= width
    assert max(len(line.rstrip()) for line in details) <= width
    text = "\n".join(details)
    assert "…" not in "\n".join(lines) + text
    for cell in cells:
        row = next(
            line for line in lines if line.startswith(f"{cell.nwor_mode} x {cell.scv_mode} ")
        )
        assert cell.verdict in row
        assert f"{cell.tokens_per_s:,.1f}" in row
        assert f"{cell.nwor_total_staged:,}" in text
        if cell.ratio_to_off is not None:
            assert ratio(cell) in row


def test_the_summary_ends_with_verdict_and_folder(tmp_path):
    run = replace(make_run(), warnings=("one line was torn",))
    folder = tmp_path / ("deep" * 30)
    console = Console(width=80, color_system=None, force_terminal=False)
    with console.capture() as capture:
        print_summary(console, run, summarised(run), folder)
    text = capture.get()
    assert text.splitlines()[-1] == f"Run folder: {folder}"
    assert "Warning: one line was torn" in text
    told = " ".join(text.split())
    assert told.startswith("CPU RUN: This run says nothing on whether NWOR pays: it ran on a CPU")
    with console.capture() as capture:
        print_summary(console, run, summarised(run), folder, verbose=True)
    assert "measure the harness" in " ".join(capture.get().split())


def summary(run, **how) -> str:
    console = Console(width=80, color_system=None, force_terminal=False)
    with console.capture() as capture:
        print_summary(console, run, summarised(run), "run", **how)
    return capture.get()


def test_findings_are_one_line_a_cause_and_whole_with_verbose():
    run = make_run()
    lines = summary(run).splitlines()
    groups = [line for line in lines if line.startswith(("note: ", "warning: ", "error: "))]
    assert groups == [f"{g.severity}: {g.line}" for g in grouped(findings(run, summarised(run)))]
    assert max(map(len, lines)) <= 80
    told = " ".join(summary(run, verbose=True).split())
    for finding in findings(run, summarised(run)):
        assert finding.message in told
        assert finding.remedy in told
    assert "committed" in told
    assert "committed" not in " ".join(lines)


def test_quiet_leaves_the_answer_and_the_folder():
    run = faster()
    found = answer(run.header, summarised(run))
    told = " ".join(summary(run, quiet=True).split())
    assert told == f"{found.badge}: {found.sentence} Run folder: run"


@pytest.mark.slow
def test_counted_bytes_and_what_counting_costs_are_told():
    for saved, verb in ((50_000, "fewer"), (-50_000, "more")):
        run = with_counters(faster(), saved)
        console = Console(width=80, color_system=None, force_terminal=False)
        with console.capture() as capture:
            print_summary(console, run, summarised(run), "run")
        text = " ".join(capture.get().split())
        assert f"DRAM bytes: stage x off wrote 0.05 MB a window {verb} than off x off" in text
        assert "of a timed one's time: that is what sampling and its events cost." in text
    with console.capture() as capture:
        print_summary(console, faster(), summarised(faster()), "run")
    assert "DRAM bytes" not in capture.get()


def test_square_brackets_in_a_reason_are_not_markup():
    run = make_run()
    bad = change_batches(
        run, lambda b: b.nwor_mode == "stage", parity="INVALID", first_mismatch="[red]token[/red]"
    )
    console = Console(width=200, color_system=None, force_terminal=False)
    with console.capture() as capture:
        print_summary(console, bad, summarised(bad), "run")
    assert "[red]token[/red]" in capture.get()


@pytest.fixture
def app():
    app = typer.Typer()
    app.command()(report)
    return app


@pytest.mark.slow
def test_the_command_rebuilds_the_reports(app, tmp_path, figures_left_out):
    save_run(make_run(), tmp_path / "run")
    result = CliRunner().invoke(app, [str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert "stage x off" in result.output
    names = {"run.json", "cells.csv", "batches.csv", "windows.csv", "report.md", "report.html"}
    assert names <= {path.name for path in (tmp_path / "run").iterdir()}


@pytest.mark.slow
def test_the_command_exits_with_3_if_a_cell_is_invalid(app, tmp_path, figures_left_out):
    run = change_batches(
        make_run(), lambda b: b.nwor_mode == "stage" and b.phase == "gate", parity="INVALID"
    )
    save_run(run, tmp_path / "run")
    result = CliRunner().invoke(app, [str(tmp_path / "run")])
    assert result.exit_code == 3
    assert "INVALID" in result.output


def test_the_command_refuses_a_folder_without_a_run(app, tmp_path):
    result = CliRunner().invoke(app, [str(tmp_path)])
    assert isinstance(result.exception, ConfigError)
