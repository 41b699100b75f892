"""Tables of windows: in files, and on terminals of any width."""

from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from nwor_bench.instruments.nsight.tables import by_cell, cells_across, print_table, write_table


def test_means_leave_out_what_was_not_measured(tmp_path: Path) -> None:
    rows = [{"cell": "a", "x": 2.0, "y": None}, {"cell": "a", "x": None, "y": None}]
    assert by_cell(rows) == [{"cell": "a", "windows": 2, "x": 2.0, "y": None}]
    assert by_cell([{**row, "batch": 1, "window": 2, "process": 3} for row in rows]) == by_cell(
        rows
    )
    write_table(tmp_path / "t.csv", rows)
    assert (tmp_path / "t.csv").read_text() == "cell,x,y\na,2.0,\na,,\n"


def test_a_table_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "t.csv").mkdir()
    with refused(tmp_path / "t.csv", cause=IsADirectoryError):
        write_table(tmp_path / "t.csv", [{"x": 1}])


CELLS = (
    *("off x off", "off x graph", "off x adaptive", "off x off (A/A)"),
    *("stage x off", "stage x graph", "stage x adaptive"),
)
BY_CELL = [
    {"cell": cell, "windows": 16, "host_ms": 8.242 + place, "busy_ms": None,
     "gpu_operations": 515.75, "DRAM Read Bandwidth [Throughput %]": 40.0 + place}
    for place, cell in enumerate(CELLS)
]  # fmt: skip
WINDOW = {
    **{"place": 1, "cell": "stage x adaptive", "batch": 12, "dram_read_bytes": 11_686_310_000.0},
    **{"dram_write_bytes": 57_250_000.0, "l2_read_sectors": 601_058_111.0},
    **{"l2_write_sectors": None, "gpu_ns": 159_692_928.0},
    **{f"kernel_launches_{number}": 102.0 + number for number in range(8)},
}
LAUNCHES = [f"{102 + number}.000" for number in range(8)]


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize(
    ("rows", "numbers"),
    [
        (cells_across(BY_CELL), [*(f"{8 + n}.242" for n in range(7)), "40.000", "46.000"]),
        ([WINDOW] * 2, ["11,686", "57.250", "601,058,111", "159.693", *LAUNCHES]),
    ],
)
def test_a_table_shows_every_number_and_word_in_full(
    rows: list[dict[str, Any]], numbers: list[str], width: int, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """What one table has no room for stands in another one beneath."""
    monkeypatch.setenv("COLUMNS", str(width))
    print_table("Windows", rows)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    assert set(numbers) <= set(shown.split())
    names = " ".join([*rows[0], *(row["cell"] for row in rows)])
    words = names.replace("_bytes", "_MB").replace("_ns", "_ms").replace("_", " ").split()
    assert set(words) <= set(shown.split())
    for line in (line for line in shown.splitlines() if LAUNCHES[0] in line):
        assert line.split()[:3] == ["1", "stage", "x"]


def test_numbers_are_whole_though_lines_are_longer_than_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    print_table("Windows", [WINDOW])
    assert {"11,686", "601,058,111", *LAUNCHES} <= set(capsys.readouterr().out.split())
