"""Tables of windows: in files, and on terminals of any width."""

from pathlib import Path

from refusals import refused

from nwor_bench.cli.commands.profile import means_table
from nwor_bench.instruments.nsight.ncu import METRICS, NcuWindow, write_table
from nwor_bench.report.text import NOT_MEASURED


def window(cell: str, **values: float) -> NcuWindow:
    return NcuWindow(1, cell, 2, 3, {**dict.fromkeys(METRICS), **values})


def test_a_counter_that_was_not_measured_is_an_empty_field(tmp_path: Path) -> None:
    write_table(tmp_path / "t.csv", [window("a", gpu_ns=2.5), window("a", dram_read_bytes=7)])
    assert (tmp_path / "t.csv").read_text().splitlines() == [
        f"place,cell,batch,window,{','.join(METRICS)}",
        "1,a,2,3,,,,,2.5",
        "1,a,2,3,7,,,,",
    ]


def test_a_table_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "t.csv").mkdir()
    with refused(tmp_path / "t.csv", cause=IsADirectoryError):
        write_table(tmp_path / "t.csv", [window("a")])


def test_means_stand_in_larger_units_under_each_cell() -> None:
    windows = [
        window("off x off", gpu_ns=159_692_928, dram_read_bytes=57_250_000),
        window("off x off", gpu_ns=159_692_930),
        window("stage x off", dram_read_bytes=11_686_310_000),
    ]
    shown = means_table("Windows", windows)
    assert shown.headers == ("", "off x off", "stage x off")
    rows = {name: values for name, *values in shown.rows}
    assert rows["windows"] == ["2", "1"]
    assert rows["gpu ms"] == ["159.693", NOT_MEASURED]
    assert rows["dram read MB"] == ["57", "11,686"]
    assert rows["l2 read sectors"] == [NOT_MEASURED, NOT_MEASURED]
