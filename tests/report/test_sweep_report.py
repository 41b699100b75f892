"""`report SWEEP_FOLDER`: one page over all runs, from their records."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from report_runs import faster, gpu_run, ineffective, invalid, spent_by_gate
from swept_folder import save_sweep
from synthetic_run import make_run

from nwor_bench.errors import ExitCode
from nwor_bench.records.store import RunData
from nwor_bench.report.document import Bullets, Headline, Table
from nwor_bench.report.html import render_html
from nwor_bench.report.markdown import render_markdown
from nwor_bench.report.sweep import MIXED, NOTHING, SweptRun, sweep_answer, sweep_document
from nwor_bench.report.text import NOT_MEASURED
from nwor_bench.run.sweep_folder import SweepIndex
from nwor_bench.run.sweep_summary import swept_runs

pytestmark = pytest.mark.slow  # whole runs


Run = Callable[..., tuple[int, str, str]]


def place(requests: int, dtype: str = "bfloat16") -> dict[str, object]:
    return {"requests": requests, "dtype": dtype}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FASTER at 8 requests, SLOWER at 1, one run that failed."""
    quicker = gpu_run({"off": 0.981, "graph": 0.972, "adaptive": 0.975}, probed=False)
    slower = gpu_run({"off": 1.06, "graph": 1.05, "adaptive": 1.055}, probed=False)
    runs = [(place(1), slower), (place(8), quicker), (place(64), None)]
    return save_sweep(tmp_path_factory.mktemp("sweeps") / "grid", runs)


@pytest.fixture(scope="module")
def runs(folder: Path) -> tuple[SweptRun, ...]:
    return swept_runs(SweepIndex.open(folder))


def test_the_answer_counts_the_runs(runs: tuple[SweptRun, ...], tmp_path: Path) -> None:
    lead = sweep_document("grid", runs).lead[0]
    assert isinstance(lead, Headline)
    assert lead.badge == MIXED
    assert "SLOWER in 1, FASTER in 1 of 3 runs" in lead.text
    ratios = dict(sweep_answer(runs).facts)["ratios"]
    assert re.search(r"0\.97\d \(stage x graph, 8 requests\) to 1\.0\d\d \(.*1 request\)", ratios)
    cpu = save_sweep(tmp_path / "cpu", [(place(1), make_run(blocks=5, aa=True))])
    for own, badge in (
        (runs[1:2], "FASTER"), (runs[2:], NOTHING), (swept_runs(SweepIndex.open(cpu)), "CPU RUN"),
    ):  # fmt: skip
        lead = sweep_document("grid", own).lead[0]
        assert isinstance(lead, Headline)
        assert lead.badge == badge
    assert sweep_document("grid", runs[2:]).sections == ()


def test_a_run_whose_folder_was_deleted_is_to_be_run_again(tmp_path: Path) -> None:
    kept = [(place(1), make_run(blocks=5, aa=True)), (place(2), make_run(blocks=5, aa=True))]
    folder = save_sweep(tmp_path / "grid", kept)
    shutil.rmtree(folder / "01-toy")
    index = SweepIndex.open(folder)
    assert [index.status(number) for number in (1, 2)] == ["pending", "done"]
    assert "run 1 (pending)" in render_markdown(sweep_document("grid", swept_runs(index)))


def test_runs_that_only_checked_have_no_columns_of_times(tmp_path: Path) -> None:
    checked = make_run(blocks=0, aa=True)
    told = swept_runs(
        SweepIndex.open(save_sweep(tmp_path / "c", [(place(1), checked), (place(2), checked)]))
    )
    document = sweep_document("c", told)
    (answers,) = [block for block in document.lead if isinstance(block, Table)]
    assert answers.headers == ("Run", "Answer")
    assert document.sections == ()
    assert "rows were not measured" not in render_html(document)


def test_ratios_stand_in_a_table_that_leads_to_the_runs(runs: tuple[SweptRun, ...]) -> None:
    (cells,) = [s for s in sweep_document("grid", runs).sections if s.title == "All cells"]
    (ratios,) = [block for block in cells.blocks if isinstance(block, Table)]
    assert ratios.headers[:4] == ("Run", "stage x off", "stage x graph", "stage x adaptive")
    assert [row[0] for row in ratios.rows] == ["1: 1 request", "2: 8 requests", "3: 64 requests"]
    assert [row[2].split()[0] for row in ratios.rows] == ["SLOWER", "FASTER", NOT_MEASURED]
    assert re.fullmatch(r"FASTER 0\.97\d \[0\.9\d\d, 0\.9\d\d\]", ratios.rows[1][2])
    assert ratios.links == ("01-toy/report.html", "02-toy/report.html", "")


def test_report_writes_the_summaries_of_a_sweep_folder(command_line: Run, folder: Path) -> None:
    for name in ("summary.html", "summary.md", "summary.csv"):
        (folder / name).unlink(missing_ok=True)
    code, out, err = command_line("report", str(folder))
    assert (code, err) == (ExitCode.OK, "")
    assert out.startswith("MIXED: ")
    assert all(len(line) <= 80 for line in out.splitlines() if "Report: " not in line)
    page = (folder / "summary.html").read_text(encoding="utf-8")
    assert "vLLM did not start: no luck" in page
    assert re.search(r">FASTER 0\.97", page)
    assert len(page) < 1_500_000
    assert "**MIXED: " in (folder / "summary.md").read_text(encoding="utf-8")
    assert (folder / "summary.csv").is_file()
    before = (folder / "summary.html").read_bytes()
    told = json.loads(command_line("report", str(folder), "--json")[1])
    assert told["answer"]["badge"] == "MIXED"
    assert (folder / "summary.html").read_bytes() == before
    quiet = command_line("report", str(folder), "-q")[1]
    assert quiet.splitlines()[-1] == f"Report: {folder}/summary.html"
    assert "Cell" not in quiet


def test_report_puts_runs_of_their_own_side_by_side(command_line: Run, folder: Path) -> None:
    """A job array leaves run folders and no sweep.json."""
    loose = folder.parent / "array"
    shutil.copytree(folder, loose, ignore=shutil.ignore_patterns("sweep.json", "summary.*"))
    code, out, _ = command_line("report", str(loose), "--json")
    assert code == ExitCode.OK
    told = json.loads(out)
    assert (told["name"], told["answer"]["badge"]) == ("array", MIXED)
    named = [(run["folder"], run["pair"], run["requests"], run["status"]) for run in told["runs"]]
    assert named == [("01-toy", "toy", 1, "done"), ("02-toy", "toy", 8, "done")]
    rows = pd.read_csv(loose / "summary.csv")
    assert set(zip(rows["folder"], rows["requests"], strict=True)) == {("01-toy", 1), ("02-toy", 8)}
    assert "1: 01-toy, 1 request" in (loose / "summary.md").read_text()


def test_a_folder_without_any_run_is_refused(command_line: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, out, err = command_line("report", str(tmp_path))
    assert (code, out) == (ExitCode.BAD_USAGE, "")
    assert "name a folder that holds a run.json" in err


def test_a_sweep_names_its_runs_that_timed_nothing(tmp_path: Path) -> None:
    longer = spent_by_gate(measuring_s=300.0)
    sound = gpu_run(probed=False)
    runs = [(place(1), sound), (place(32), spent_by_gate()), (place(64), longer)]
    folder = save_sweep(tmp_path / "grid", runs)
    lead = sweep_document("grid", swept_runs(SweepIndex.open(folder))).lead
    lines = [line for block in lead if isinstance(block, Bullets) for line in block.items]
    (line,) = [line for line in lines if "--time-budget" in line]
    assert line.startswith("WARNING: ")
    assert line.endswith("(runs 2, 3)")


@pytest.mark.parametrize(
    ("first", "second", "expected", "said"),
    [
        (invalid, gpu_run, ExitCode.CORRECTNESS_BROKEN, "INVALID: "),
        (ineffective, faster, ExitCode.INCONCLUSIVE,
         "MIXED: NOTHING STAGED in 1, FASTER in 1 of 2 runs. run 1 NWOR never"),
    ],
)  # fmt: skip
def test_the_exit_code_is_that_of_the_worst_run(
    command_line: Run, tmp_path: Path, figures_left_out: None, first: Callable[[], RunData],
    second: Callable[[], RunData], expected: ExitCode, said: str,
) -> None:  # fmt: skip
    folder = save_sweep(tmp_path / "two", [(place(8), first()), (place(1), second())])
    code, out, _ = command_line("report", str(folder))
    assert code == expected
    assert " ".join(out.split()).startswith(said)
