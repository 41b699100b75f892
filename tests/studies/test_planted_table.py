"""docs/planted-faults.md says what the recorded tests found, and nothing else."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SOUND = "none (sound run)"
PLANTS = Path(__file__).resolve().parents[1] / "live_engine"


@pytest.fixture
def table(study: Callable[[str, str], ModuleType]) -> ModuleType:
    """The script that makes the page."""
    return study("planted-faults", "planted_table")


@pytest.mark.parametrize(
    ("fault", "found", "says"),
    [
        ("a", {}, ""),
        ("a", {"a": ["tokens", "K/V"]}, "tokens, K/V"),
        ("a", {"a": ["writes"], "b": ["layers", "K/V"]}, "**Only** writes"),
        ("a", {"a": ["writes"], "b": ["K/V"]}, "writes"),  # before the local gate
        ("a", {"a": []}, "NOT CAUGHT"),
        (SOUND, {SOUND: []}, "passes"),
        (SOUND, {SOUND: ["K/V"]}, "FALSE ALARM: K/V"),
        (SOUND, {}, ""),
    ],
)
def test_a_cell_says_which_checks_saw_a_fault(
    table: ModuleType, fault: str, found: dict[str, list[str]], says: str
) -> None:
    assert table.cell(fault, found) == says


def test_every_recorded_fault_is_in_the_table_and_none_passed(table: ModuleType) -> None:
    names = {SOUND, *(fault["name"] for fault in table.read_faults(table.RESULTS))}
    outcomes = table.read_outcomes(table.RESULTS)
    assert "cpu" in outcomes
    for column, found in outcomes.items():
        assert set(found) <= names, column
        assert [f for f, seen in found.items() if bool(seen) is (f == SOUND)] == []


def test_a_check_is_needed_by_the_faults_that_only_it_sees(table: ModuleType) -> None:
    outcomes = {
        "one": {SOUND: [], "a": ["tokens", "layers"], "b": ["writes"]},
        "two": {"a": ["layers"], "b": ["writes", "layers"]},
        "old": {"a": ["K/V"]},
    }
    found = table.seen_by(outcomes).set_index("Check")
    assert found.loc["layers"].tolist() == [2, 1, "a"]
    assert found.loc["writes"].tolist() == [1, 1, "b"]
    assert found.loc["tokens"].tolist() == [1, 0, ""]


def test_the_page_holds_the_recorded_outcomes(table: ModuleType) -> None:
    outcomes = table.read_outcomes(table.RESULTS)
    assert table.PAGE.read_text() == table.render(outcomes)


@pytest.mark.slow  # vLLM is imported
def test_the_list_of_faults_is_the_tests_own(
    table: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    monkeypatch.syspath_prepend(str(PLANTS))
    from planted_faults import FAULTS, RANK_FAULTS, STATE_FAULTS
    from planted_gate import SOUND as RECORDED

    rows = table.read_faults(table.RESULTS)
    planted = [fault.name for fault in (*FAULTS, *RANK_FAULTS, *STATE_FAULTS)]
    assert [row["name"] for row in rows] == planted
    assert all(row["stands_for"] and row["why"] for row in rows)
    assert RECORDED == SOUND == table.SOUND
