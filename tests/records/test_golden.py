"""Kept runs stay readable, count what their writer counted, and give the same reports and answers.

golden_files.py makes the expected files, and makes them anew if a change is wanted.

tests/golden/run was written on the stand-in engine before cells had arms: nothing in it is a
measurement."""

import html
import json
import re
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
from synthetic_run import faults_of

from nwor_bench.analysis.analyse import analyse, noise_floor
from nwor_bench.records.files import KEPT_RECORDS_FILE, RUN_FILE
from nwor_bench.records.store import read_run
from nwor_bench.report.load import write_files
from nwor_bench.report.run_report import MAX_WORDS

GOLDEN = Path(__file__).parents[1] / "golden" / "run"

HEADLINE = r"(?m)^\*\*([A-Z ]{4,}: .*)\*\*$"


def test_a_run_without_arms_counts_what_its_own_version_summed():
    run = read_run(GOLDEN)
    assert (len(run.batches), len(run.windows), run.warnings) == (31, 93, ())
    assert {batch.arm for batch in run.batches} == {None}
    assert {len(batch.conditions) for batch in run.batches} == {0}
    cells = analyse(run).cells
    assert faults_of(run) == []
    assert {cell.parity for cell in cells} == {"reference", "exact"}
    assert noise_floor(cells) is None
    names = ("draft_tokens", "accepted_tokens", "nwor_total_staged", "nwor_total_committed",
             "nwor_stage_operations", "latency_ms_p50", "tokens_per_s")  # fmt: skip
    assert len(run.header.cells) == 6
    for then, now in zip(run.header.cells, cells, strict=True):
        assert [then[name] for name in names] == [getattr(now, name) for name in names]


@pytest.mark.slow  # a whole report
def test_its_reports_can_be_made_anew(tmp_path):
    for name in (RUN_FILE, KEPT_RECORDS_FILE):
        shutil.copy(GOLDEN / name, tmp_path / name)
    write_files(tmp_path, analyse(read_run(tmp_path)))
    assert (tmp_path / KEPT_RECORDS_FILE).read_bytes() == (GOLDEN / KEPT_RECORDS_FILE).read_bytes()
    assert "golden" not in (tmp_path / "report.md").read_text()


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


@pytest.mark.slow
def test_command_lines_are_refused_with_the_same_words() -> None:
    check(of_refusals(), "refusals")


KEPT = Path(__file__).parents[2] / "sweeps" / "results" / "kept"
RUNS = sorted(path.parent for path in KEPT.glob(f"*/{RUN_FILE}"))


@pytest.mark.slow  # two whole reports
@pytest.mark.parametrize("folder", RUNS, ids=lambda path: path.name)
def test_its_report_is_made_again_from_its_records(folder: Path, tmp_path: Path) -> None:
    for name in (RUN_FILE, KEPT_RECORDS_FILE):
        shutil.copy(folder / name, tmp_path / name)
    kept = json.loads((folder / RUN_FILE).read_text())["cells"]
    run = analyse(read_run(tmp_path))
    for cell, before in zip(run.cells, kept, strict=True):
        assert [cell.nwor_mode, cell.scv_mode] == [before["nwor_mode"], before["scv_mode"]]
        assert [cell.verdict, cell.windows] == [before["verdict"], before["windows"]]
        assert (str(cell.arm) if cell.arm else None) == before["arm"]
        assert cell.ratio_to_off == pytest.approx(before["ratio_to_off"])
    write_files(tmp_path, run)
    assert (tmp_path / "report.html").stat().st_size > 10_000
    for name in ("report.html", "report.md"):
        if (folder / name).is_file():
            assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    assert (folder / "report.html").is_file() == (folder == RUNS[0])
    assert len(RUNS) == 2


def test_a_headline_has_at_most_20_words():
    """The badge counts. Kept runs, and every made-up one."""
    lines = [line for text in stored("said").values() for line in re.findall(HEADLINE, text)]
    for name in CASES:
        said = json.loads(stored(name)["result.json"].partition("\n}\n")[0] + "}")["answer"]
        lines.append(f"{said['badge']}: {said['sentence']}")
    assert len(lines) > 60
    assert [line for line in lines if len(line.split()) > MAX_WORDS] == []


@pytest.mark.parametrize("name", CASES)
def test_the_end_of_a_run_fits_a_terminal_of_24_lines(name):
    text = stored(name)["terminal.txt"]
    first, *rest = text.removesuffix("exit code 3\n").splitlines()
    assert len(rest) < 23 or first in rest[-3:]  # a prompt stands below
    assert max(map(len, rest)) <= 80
    assert re.match(r"[A-Z ]{4,}: ", first)
    assert rest[-1] == f"Report: {name}/report.html"


@pytest.mark.parametrize("name", CASES)
def test_captions_have_one_line_and_pages_no_backticks(name):
    page = stored(name)["page.html"]
    captions = re.findall(r"<(?:caption><span|figcaption)>(.*?)</", page)
    assert captions
    assert [text for text in captions if len(html.unescape(text)) > 80] == []
    assert "`" not in page
