"""`nwor_bench.load`, its frames, and docs/columns.csv, which says what each of their columns is.

`PYTHONPATH=tests python tests/report/test_load.py` writes that page again, from the docstrings of
the records' fields.
"""

import ast
import csv
import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pandas as pd
import pytest
from refusals import refused
from synthetic_run import make_run, save_run, write_reports

import nwor_bench
from nwor_bench.analysis.analyse import PERCENTILES
from nwor_bench.analysis.draft_rates import Rate
from nwor_bench.analysis.worth import WindowTime
from nwor_bench.records.types import BatchRecord, CellResult, WindowRecord, columns
from nwor_bench.run.microbench.report import KernelRow

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = CHECKOUT / "docs" / "columns.csv"
KEPT = CHECKOUT / "sweeps" / "results" / "kept"
GOLDEN = CHECKOUT / "tests" / "golden"
RECORDS = {"cells": CellResult, "batches": BatchRecord, "windows": WindowRecord}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all its report files."""
    folder = tmp_path_factory.mktemp("loaded") / "run"
    save_run(make_run(), folder)
    write_reports(folder)
    return folder


LIGHT = "import sys, nwor_bench"
HEAVY = {"torch", "vllm", "pandas", "numpy", "pydantic"}


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        (LIGHT, HEAVY),
        pytest.param(
            f"{LIGHT}\nnwor_bench.load({str(KEPT / 'smollm2-short')!r}).frame('windows')",
            {"torch", "vllm"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=("import", "load"),
)
def test_neither_importing_nor_loading_needs_an_engine(code: str, heavy: set[str]) -> None:
    shown = f"{code}\nprint(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", shown], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.slow  # a whole run
def test_records_and_frames_are_those_of_the_files(folder: Path) -> None:
    run = nwor_bench.load(str(folder))
    assert run.header.status == "complete"
    assert [type(rows[0]) for rows in (run.cells, run.batches, run.windows)] == [*RECORDS.values()]
    for table, records in zip(RECORDS, (run.cells, run.batches, run.windows), strict=True):
        frame = run.frame(table)
        stored = pd.read_csv(folder / f"{table}.csv", dtype=str, keep_default_na=False)
        assert list(frame.columns) == list(stored.columns)
        assert len(frame) == len(stored) == len(records) > 0
        for name in set(frame.columns) & set(vars(records[0])) - {"fallback_reason"}:
            for value, record in zip(frame[name], records, strict=True):
                own = getattr(record, name)
                if own is None:
                    assert pd.isna(value), name
                elif isinstance(own, int | float | str):
                    assert value == own, name
    frame = run.frame("cells")
    assert pd.api.types.is_integer_dtype(frame["nwor_total_staged"])
    assert pd.api.types.is_float_dtype(frame["ratio_to_off"])
    with refused("run folder", value=str(folder / "none")):
        nwor_bench.load(folder / "none")
    with refused("table", value="window"):
        run.frame("window")


def column(table: str, name: str) -> list[str]:
    """The values of a column of an HTML table."""
    place = re.findall(r"<th>(.*?)</th>", table).index(name)
    rows = re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)
    return [re.findall(r"<td>(.*?)</td>", row)[place] for row in rows]


@pytest.mark.slow  # a whole run
def test_a_run_fits_a_line_and_a_notebooks_cell(folder: Path) -> None:
    run = nwor_bench.load(folder)
    assert repr(run) == (
        "<nwor-bench: scenario short, models toy: "
        f"CPU RUN; {len(run.cells)} cells, {len(run.batches)} batches, {len(run.windows)} windows>"
    )
    shown = run._repr_html_()
    ratios = [f"{c.ratio_to_off:.4g}" if c.ratio_to_off else "" for c in run.cells]
    assert column(shown, "ratio_to_off") == ratios
    assert "CPU RUN" in shown
    assert "NA" not in shown
    assert "<th>requests</th>" not in shown  # the sum over batches looks like the batch size


@pytest.mark.slow  # a whole run
def test_the_folder_of_worth_has_its_rows_and_its_runs(
    tmp_path: Path, command_line: Callable[..., tuple[int, str, str]]
) -> None:
    own = tmp_path / "worth" / "01-tiny"
    shutil.copytree(GOLDEN / "worth-one", own, ignore=shutil.ignore_patterns("*.csv"))
    assert command_line("report", str(own.parent))[0] == 0
    loaded = nwor_bench.load(own.parent)
    rows = loaded.frame("worth")
    stored = pd.read_csv(own.parent / "worth.csv")
    assert rows["ratio"].dropna().tolist() == stored["ratio"].dropna().tolist() != []
    assert rows["drafts"].tolist() == [0, 1, 2]
    assert repr(loaded) == f"LoadedSweep(folder={own.parent!r})"
    assert [run.header.pair.name for run in loaded.runs] == ["tiny"]
    assert column(loaded._repr_html_(), "drafts") == ["0", "1", "2"]
    rows.assign(method=["eagle", "eagle", "ngram"]).to_csv(own.parent / "worth.csv", index=False)
    assert column(loaded._repr_html_(), "method") == ["eagle", "eagle", "ngram"]
    with refused("table", value="cells"):
        loaded.frame("cells")
    (own.parent / "worth.csv").unlink()
    assert "verdict" in loaded.frame("summary")
    (own.parent / "summary.csv").unlink()
    assert str(own.parent) in loaded._repr_html_()


@pytest.mark.slow  # reads a whole run
def test_the_documented_example_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (CHECKOUT / "docs" / "runs.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.+?)^```$", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(CHECKOUT)
    exec(example, {})
    said = capsys.readouterr().out
    for cell in nwor_bench.load(KEPT / "llama-3b-shape-ctx-1k").cells:
        assert f"{cell.label} {cell.verdict} {cell.ratio_to_off}" in said
    assert "wall_ms" in said


def meanings(record_type: type) -> dict[str, str]:
    """The docstring of each field of a record, in one line."""
    found = {}
    for cls in reversed(record_type.__mro__[:-1]):
        (defined,) = ast.parse(dedent(inspect.getsource(cls))).body
        assert isinstance(defined, ast.ClassDef)
        for field, text in zip(defined.body, defined.body[1:], strict=False):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(said))),
                ):
                    found[name] = " ".join(said.split()).replace('"', "'")
    for parts in getattr(record_type, "INTERVAL_COLUMNS", {}).values():
        found |= {column: meaning for column, (_, meaning) in parts.items()}
    return found


def worth_meanings() -> dict[str, str]:
    """The columns of worth.csv: fields of its records, and the ends of their intervals."""
    found = meanings(WindowTime) | meanings(Rate) | {"scenario": "Name of the scenario."}
    found["noise_ratio"] = "Time of k = 0 over itself (A/A) at this batch size."
    found["stage_ratio"] = found["staged"]
    found["stage_groups"] = "Groups of windows behind `stage_ratio`."
    for prefix in ("", "stage_", "noise_"):
        found[f"{prefix}low"] = f"Low end of the interval of `{prefix}ratio`."
        found[f"{prefix}high"] = f"High end of the interval of `{prefix}ratio`."
    return found


def documented() -> list[list[str]]:
    """The rows of docs/columns.csv as the code has them: file, column, meaning."""
    known = {table: meanings(record_type) for table, record_type in RECORDS.items()}
    known["batches"] |= {name: known["cells"][name] for name in PERCENTILES}
    known["windows"]["phase"] = known["batches"]["phase"]
    known["kernels"] = meanings(KernelRow)
    run = nwor_bench.load(KEPT / "smollm2-short")
    listed = {table: list(run.frame(table).columns) for table in RECORDS}
    listed["kernels"] = columns(KernelRow)
    known["worth"] = worth_meanings()
    listed["worth"] = [*pd.read_csv(GOLDEN / "printed/worth.csv", nrows=0)]
    return [
        [f"{table}.csv", column, known[table].get(column, "")]
        for table, names in listed.items()
        for column in names
    ]


@pytest.mark.slow  # reads a whole run
def test_every_column_is_documented() -> None:
    rows = documented()
    assert [row for row in rows if not row[2]] == []
    with PAGE.open(encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == [["file", "column", "meaning"], *rows], (
            "PYTHONPATH=tests python tests/report/test_load.py writes docs/columns.csv again"
        )


if __name__ == "__main__":
    listed = [["file", "column", "meaning"], *documented()]
    with PAGE.open("w", encoding="utf-8", newline="") as out:
        csv.writer(out, lineterminator="\n").writerows(listed)
