"""Tables of windows: in files, and on terminals of any width."""

from pathlib import Path

from refusals import refused

from nwor_bench.cli.commands.profile import means_table
from nwor_bench.instruments.nsight.tools import by_cell, write_table
from nwor_bench.report.text import NOT_MEASURED


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


def test_means_stand_in_larger_units_under_each_cell() -> None:
    rows = [
        {
            "cell": "off x off",
            "host_ms": 8.25,
            "gpu_ns": 159_692_928,
            "dram_bytes": 57_250_000,
        },
        {"cell": "off x off", "host_ms": 8.75, "gpu_ns": 159_692_928, "dram_bytes": None},
        {"cell": "stage x off", "host_ms": None, "gpu_ns": None, "dram_bytes": 11_686_310_000},
    ]
    shown = means_table("Windows", rows, ["off x off", "stage x off", "stage x graph"])
    assert shown.headers == ("", "off x off", "stage x off", "stage x graph")
    assert {name: values for name, *values in shown.rows} == {
        "windows": ["2", "1", "0"],
        "host ms": ["8.500", NOT_MEASURED, NOT_MEASURED],
        "gpu ms": ["159.693", NOT_MEASURED, NOT_MEASURED],
        "dram MB": ["57", "11,686", NOT_MEASURED],
    }
