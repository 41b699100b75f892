"""Kept runs stay readable, count what their writer counted, and give the same reports and answers.

golden_files.py makes the expected files, and makes them anew if a change is wanted.

tests/golden/run was written on the stand-in engine before cells had arms: nothing in it is a
measurement."""

import json
import shutil
from pathlib import Path

import pytest
from golden_files import RUNS as CASES
from golden_files import (
    of_commands,
    of_help,
    of_made_up_runs,
    of_predictions,
    of_refusals,
    of_run,
    stored,
)
from synthetic_run import faults_of, report_paths

from nwor_bench.analysis.analyse import analyse, noise_floor
from nwor_bench.records.files import KEPT_RECORDS_FILE, RUN_FILE
from nwor_bench.records.store import read_run
from nwor_bench.report.load import write_files

GOLDEN = Path(__file__).parents[1] / "golden" / "run"


def test_it_reads_without_an_arm():
    run = read_run(GOLDEN)
    assert (len(run.batches), len(run.windows), run.warnings) == (31, 93, ())
    assert {batch.arm for batch in run.batches} == {None}
    assert {len(batch.conditions) for batch in run.batches} == {0}
    cells = analyse(run).cells
    assert len(cells) == 6
    assert faults_of(run) == []
    assert {cell.parity for cell in cells} == {"reference", "exact"}
    assert noise_floor(cells) is None


def test_its_counts_are_those_that_its_own_version_summed():
    run = read_run(GOLDEN)
    names = ("draft_tokens", "accepted_tokens", "nwor_total_staged", "nwor_total_committed",
             "nwor_stage_operations", "latency_ms_p50", "tokens_per_s")  # fmt: skip
    for then, now in zip(run.header.cells, analyse(run).cells, strict=True):
        assert [then[name] for name in names] == [getattr(now, name) for name in names]


@pytest.mark.slow  # a whole report
def test_its_reports_can_be_made_anew(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(GOLDEN, folder)
    before = (folder / KEPT_RECORDS_FILE).read_bytes()
    write_files(folder, analyse(read_run(folder)))
    assert (folder / KEPT_RECORDS_FILE).read_bytes() == before
    assert "golden" not in (folder / "report.md").read_text()


def check(made: dict[str, str], folder: str) -> None:
    """The golden files of this folder, none more and none less."""
    expected = stored(folder)
    assert set(made) == set(expected)
    for name, text in made.items():
        assert text == expected[name], name


@pytest.mark.parametrize("name", CASES)
def test_a_run_gives_the_same_files(name: str) -> None:
    check(of_run(name), name)


def test_commands_print_the_same() -> None:
    check(of_commands(), "printed")


def test_reports_say_the_same_of_made_up_runs() -> None:
    check(of_made_up_runs(), "said")


def test_every_help_is_the_same() -> None:
    check(of_help(), "help")


def test_predictions_are_the_same() -> None:
    check(of_predictions(), "predicted")


def test_command_lines_are_refused_with_the_same_words() -> None:
    check(of_refusals(), "refusals")


KEPT = Path(__file__).parents[2] / "sweeps" / "results" / "h200" / "kept"
RUNS = sorted(path.parent for path in KEPT.glob(f"*/{RUN_FILE}"))


def test_two_runs_are_kept_and_one_has_its_page() -> None:
    assert len(RUNS) == 2
    assert [run.name for run in RUNS if (run / "report.html").is_file()] == [RUNS[0].name]


@pytest.mark.slow  # two whole reports
@pytest.mark.parametrize("folder", RUNS, ids=lambda path: path.name)
def test_its_report_is_made_again_from_its_records(folder: Path, tmp_path: Path) -> None:
    for name in (RUN_FILE, KEPT_RECORDS_FILE):
        shutil.copy(folder / name, tmp_path / name)
    kept = json.loads((folder / RUN_FILE).read_text())["cells"]
    run = read_run(tmp_path)
    cells = analyse(run).cells
    assert [(c.label, c.verdict, c.windows) for c in cells] == [
        (
            f"{c['nwor_mode']} x {c['scv_mode']}" + (f" ({c['arm']})" if c["arm"] else ""),
            c["verdict"],
            c["windows"],
        )
        for c in kept
    ]
    for cell, before in zip(cells, kept, strict=True):
        assert cell.ratio_to_off == pytest.approx(before["ratio_to_off"])
    write_files(tmp_path, analyse(run))
    paths = report_paths(tmp_path)
    assert paths.html.stat().st_size > 10_000
    for path in (paths.html, paths.markdown):
        if (folder / path.name).is_file():
            assert path.read_bytes() == (folder / path.name).read_bytes()
    assert "How sure is that?" in paths.markdown.read_text()
