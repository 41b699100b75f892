"""docs/planted-faults.md says what the recorded tests found, and nothing else."""

import csv
import shutil
from pathlib import Path

import pytest
import tables

CHECKOUT = Path(__file__).resolve().parents[2]
RECORDED = CHECKOUT / "sweeps" / "studies" / "planted-faults"
SOUND = "none (sound run)"


def rows_of(name: str) -> list[dict[str, str]]:
    with (RECORDED / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


OUTCOMES = """engine,fault,checks,device,vllm,torch
cpu,none (sound run),K/V; layers,CPU,1,2
cpu,K and V swapped in one layer,tokens; layers,CPU,1,2
cpu,a layer skipped in the commit,tokens,CPU,1,2
cpu,a layer skipped in the commit,layers,CPU,1,2
cpu,counters doubled,,CPU,1,2
gpu-real-full,none (sound run),,GPU,1,2
gpu-real-full,K and V swapped in one layer,layers,GPU,1,2
gpu-real-full,"one head of one layer wrong, staged",layers,GPU,1,2
"""


def test_the_page_says_which_checks_saw_a_fault_and_which_alone(tmp_path: Path) -> None:
    """The newest result of an engine and fault counts; a fault has its row without any result."""
    folder = tmp_path / RECORDED.relative_to(CHECKOUT)
    shutil.copytree(RECORDED, folder)
    (folder / "outcomes.csv").write_text(OUTCOMES)
    (tmp_path / "docs").mkdir()
    for page in (CHECKOUT / "docs").glob("planted-faults.*"):
        shutil.copy(page, tmp_path / "docs")
    _, found = tables.evaluated(tmp_path / "docs" / "planted-faults.md")
    names, rows = found["faults"]
    assert names == ["Fault", "CPU, tiny pair", "GPU, real weights"]
    cells = {fault: (cpu or "", gpu or "") for fault, cpu, gpu in rows}
    assert list(cells) == [SOUND, *(row["name"] for row in rows_of("faults.csv"))]
    assert {fault: both for fault, both in cells.items() if any(both)} == {
        SOUND: ("FALSE ALARM: K/V, layers", "passes"),
        "K and V swapped in one layer": ("tokens, layers", "**Only** layers"),
        "a layer skipped in the commit": ("**Only** layers", ""),
        "counters doubled": ("NOT CAUGHT", ""),
        "one head of one layer wrong, staged": ("", "**Only** layers"),
    }
    only = "K and V swapped in one layer; a layer skipped in the commit; "
    only += "one head of one layer wrong, staged"
    assert found["checks"][1] == [
        ("layers", 4, 3, only),
        ("K/V", 1, 0, None),
        ("tokens", 1, 0, None),
    ]


def test_every_check_sees_a_fault_that_no_other_check_sees() -> None:
    """Otherwise nothing shows that it is needed."""
    _, found = tables.evaluated(CHECKOUT / "docs" / "planted-faults.md")
    assert [check for check, _, only_it, _ in found["checks"][1] if only_it == 0] == []


def test_every_recorded_fault_is_in_the_table_and_none_passed() -> None:
    names = {SOUND, *(row["name"] for row in rows_of("faults.csv"))}
    outcomes = rows_of("outcomes.csv")
    assert {row["fault"] for row in outcomes} <= names
    engines = {row["engine"] for row in outcomes}
    statements = (CHECKOUT / "docs" / "planted-faults.sql").read_text()
    assert [engine for engine in engines if f"'{engine}'" not in statements] == []
    assert [row for row in outcomes if bool(row["checks"]) is (row["fault"] == SOUND)] == []


@pytest.mark.slow  # vLLM is imported
def test_the_list_of_faults_is_the_tests_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.syspath_prepend(str(CHECKOUT / "tests" / "live_engine"))
    from planted_faults import FAULTS, RANK_FAULTS, STATE_FAULTS
    from planted_gate import SOUND as RECORDED_SOUND

    rows = rows_of("faults.csv")
    planted = [fault.name for fault in (*FAULTS, *RANK_FAULTS, *STATE_FAULTS)]
    assert [row["name"] for row in rows] == planted
    assert all(row["stands_for"] and row["why"] for row in rows)
    assert RECORDED_SOUND == SOUND
