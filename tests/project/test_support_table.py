"""The README's support table says what the recorded tests said, and nothing else."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import support_table
from support_rows import ROWS

README = support_table.CHECKOUT / "README.md"


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
def test_a_cell_says_how_its_tests_ended(tests: list[dict[str, Any]], says: str) -> None:
    assert support_table.cell(tests) == says


def test_every_row_is_in_the_table_and_a_missing_column_is_empty() -> None:
    tests = [ended("passed") | {"notes": ["only alone"]}]
    facts = {"device": "CPU", "vllm": "0.32.0", "torch": "2.13", "tests": tests}
    text = support_table.render({"cpu": facts})
    lines = [[part.strip() for part in line.split("|")] for line in text.splitlines()]
    table = {line[1]: line[2:4] for line in lines if len(line) > 4}
    assert set(ROWS) <= set(table)
    assert table["LoRA"] == ["staged", ""]
    assert table["eagle"] == ["", ""]
    assert "LoRA: only alone" in text


def test_what_a_test_of_two_rows_notes_is_said_once() -> None:
    test = ended("passed") | {"rows": ["LoRA", "eagle"], "notes": ["only alone"]}
    facts = {"device": "CPU", "vllm": "0.32.0", "torch": "2.13", "tests": [test, test]}
    text = support_table.render({"cpu": facts})
    assert text.count("only alone") == 1
    assert "- LoRA, eagle: only alone" in text


def test_the_document_keeps_what_is_around_the_table() -> None:
    begin, end = support_table.BEGIN, support_table.END
    once = support_table.put(f"a\n{begin}\nold\n{end}\nb", "new")
    assert once == f"a\n{begin}\n\nnew\n\n{end}\nb"
    assert support_table.put(once, "new") == once
    for broken in ("", begin, end + begin, f"{begin}{begin}{end}", f"{begin}{end}{end}"):
        with pytest.raises(ValueError, match="once each"):
            support_table.put(broken, "new")


def test_the_readme_holds_the_table_of_the_recorded_outcomes() -> None:
    text = README.read_text()
    outcomes = support_table.read_outcomes(support_table.RESULTS)
    assert outcomes
    assert support_table.put(text, support_table.render(outcomes)) == text


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
@pytest.mark.parametrize(("row", "code"), [("LoRA", 0), ("a row that is not there", 4)])
def test_the_plugin_records_rows_and_refuses_unknown_ones(
    tmp_path: Path, row: str, code: int
) -> None:
    (tmp_path / "test_probe.py").write_text(PROBE.format(row=row))
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["support_rows"]')
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--support-json", "out.json"],
        cwd=tmp_path, capture_output=True, text=True,
        env={"PYTHONPATH": f"{README.parent}:{README.parent / 'tests'}", "PATH": ""},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    if code == 0:
        written = support_table.json.loads((tmp_path / "out.json").read_text())
        assert [test["written_directly"] for test in written["tests"]] == [["because"]]
