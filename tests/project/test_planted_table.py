"""docs/planted-faults.md says what the recorded tests found, and nothing else."""

import planted_table
import pytest
from planted_table import SOUND, cell, render


@pytest.mark.parametrize(
    ("fault", "found", "says"),
    [
        ("a", {}, ""),
        ("a", {"a": ["tokens", "K/V"]}, "tokens, K/V"),
        ("a", {"a": []}, "NOT CAUGHT"),
        (SOUND, {SOUND: []}, "passes"),
        (SOUND, {SOUND: ["K/V"]}, "FALSE ALARM: K/V"),
        (SOUND, {}, ""),
    ],
)
def test_a_cell_says_which_checks_saw_a_fault(
    fault: str, found: dict[str, list[str]], says: str
) -> None:
    assert cell(fault, {"faults": found}) == says


def test_a_fault_that_was_judged_anew_says_so() -> None:
    facts = {"faults": {"a": []}, "rejudged": {"a": {"checks": ["K/V"], "why": "another limit"}}}
    assert cell("a", facts) == "K/V (judged anew)"


def test_a_column_that_was_not_run_is_empty() -> None:
    lines = [line.split("|") for line in render({}).splitlines() if line.startswith("| ")]
    first = [part.strip() for part in next(line for line in lines if SOUND in line[1])[3:-1]]
    assert first == [""] * len(planted_table.COLUMNS)


def test_every_recorded_fault_is_in_the_table_and_none_passed() -> None:
    names = {SOUND, *(name for name, _ in planted_table._named("why"))}
    outcomes = planted_table.read_outcomes(planted_table.RESULTS)
    assert "cpu" in outcomes
    for column, facts in outcomes.items():
        assert set(facts["faults"]) <= names, column
        anew = {f: told["checks"] for f, told in facts.get("rejudged", {}).items()}
        found = {**facts["faults"], **anew}
        assert [f for f, seen in found.items() if bool(seen) is (f == SOUND)] == []


def test_the_page_holds_the_recorded_outcomes() -> None:
    outcomes = planted_table.read_outcomes(planted_table.RESULTS)
    assert planted_table.PAGE.read_text() == render(outcomes)
