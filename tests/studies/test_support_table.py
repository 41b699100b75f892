"""The support table of docs/support.md says what the recorded tests said, and nothing else."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support_rows import ROWS

CHECKOUT = Path(__file__).resolve().parents[2]
CPU = {"device": "CPU", "vllm": "0.32.0", "torch": "2.13", "rows": ROWS}


@pytest.fixture
def table(study: Callable[[str, str], ModuleType]) -> ModuleType:
    """The script that writes the table."""
    return study("support", "support_table")


def ended(outcome: str, *reasons: str) -> dict[str, Any]:
    """One test as the plugin writes it."""
    return {"rows": ["LoRA"], "outcome": outcome, "written_directly": list(reasons), "notes": []}


@pytest.mark.parametrize(
    ("tests", "says"),
    [
        ([], ""),
        ([ended("passed")], "staged"),
        ([ended("passed", "layers_share_kv")], "written directly: `layers_share_kv`"),
        ([ended("passed"), ended("passed", "b"), ended("passed", "a")], "staged; `a`, `b`"),
        ([ended("passed"), ended("failed", "a")], "FAILED (1 of 2)"),
        ([ended("error")], "FAILED (1 of 1)"),
    ],
)
def test_a_cell_says_how_its_tests_ended(
    table: ModuleType, tests: list[dict[str, Any]], says: str
) -> None:
    assert table.cell(tests) == says


def test_every_row_is_in_the_table_and_a_missing_column_is_empty(table: ModuleType) -> None:
    tests = [ended("passed") | {"notes": ["only alone"]}]
    text = table.render({"cpu": {**CPU, "tests": tests}})
    lines = [[part.strip() for part in line.split("|")] for line in text.splitlines()]
    cells = {row: line[2:4] for line in lines if len(line) > 4 for row in line[1].split("; ")}
    assert set(ROWS) <= set(cells)
    assert cells["LoRA"] == ["staged", ""]
    assert cells["eagle"] == ["", ""]
    assert "LoRA: only alone" in text


def test_the_page_holds_the_table_of_the_recorded_outcomes(table: ModuleType) -> None:
    text = table.PAGE.read_text()
    outcomes = table.read_outcomes(table.RESULTS)
    assert outcomes
    assert all(tuple(facts["rows"]) == ROWS for facts in outcomes.values())
    assert table.with_tables(text, {"support": table.render(outcomes)}) == text


PROBE = """
import pytest

@pytest.mark.row("{row}")
def test_one(record_property):
    record_property("written_directly", "because")

@pytest.mark.row("LoRA")
def test_two():
    pytest.skip("not here")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "code"),
    [pytest.param("LoRA", 0, marks=pytest.mark.long), ("a row that is not there", 4)],
)
def test_the_plugin_records_rows_and_refuses_unknown_ones(
    tmp_path: Path, row: str, code: int
) -> None:
    (tmp_path / "test_probe.py").write_text(PROBE.format(row=row))
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["support_rows"]')
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--support-json", "out.json"],
        cwd=tmp_path, capture_output=True, text=True,
        env={"PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'tests'}", "PATH": ""},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    if code == 0:
        written = json.loads((tmp_path / "out.json").read_text())
        assert tuple(written["rows"]) == ROWS
        assert [test["written_directly"] for test in written["tests"]] == [["because"]]
