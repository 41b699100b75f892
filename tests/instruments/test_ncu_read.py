"""Reports of Nsight Compute: windows with their units, and what is no report."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import refused
from simulated_ncu_report import Action, report_of

from nwor_bench.instruments.nsight.ncu import read_report


def test_units_are_read_and_what_is_missing_is_none(tmp_path: Path) -> None:
    path = tmp_path / "x.ncu-rep"
    path.touch()
    module = report_of(
        Action(
            (("sweep", 9), ("batch", 4), ("window", 17)),
            dram_read_bytes=(8.92, "Gbyte"),
            dram_write_bytes=(214.5, "Mbyte"),
            gpu_ns=(3, "ms"),
        ),
        Action(dram_read_bytes=(512, "byte"), l2_read_sectors=(7, "sector")),
    )
    first, second = read_report(path, module, {4: "stage x graph"})
    assert (first.place, first.cell, first.batch, first.window) == (1, "stage x graph", 4, 17)
    assert (second.place, second.cell, second.batch, second.window) == (2, None, None, None)
    assert first.values["dram_read_bytes"] == pytest.approx(8_920_000_000)
    assert first.values["dram_write_bytes"] == pytest.approx(214_500_000)
    assert first.values["gpu_ns"] == pytest.approx(3_000_000)
    assert first.values["l2_read_sectors"] is None
    assert second.values["dram_read_bytes"] == 512
    assert second.values["dram_write_bytes"] is None


@pytest.mark.parametrize(
    ("module", "key", "value"),
    [
        (report_of(Action(dram_read_bytes=(1, "furlong"))), ": dram__bytes_read.sum", "furlong"),
        (report_of(), "", None),
    ],
)
def test_a_report_that_cannot_be_used_is_refused(
    module: Any, key: str, value: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "x.ncu-rep"
    path.touch()
    with refused(f"profile ncu: {path}{key}", value=value):
        read_report(path, module, {})


def test_a_report_that_the_module_refuses_is_one_message(tmp_path: Path) -> None:
    def load_report(path: str) -> Any:
        raise RuntimeError("not a report")

    with refused(tmp_path / "x.ncu-rep", cause=RuntimeError, naming="PYTHONPATH"):
        read_report(tmp_path / "x.ncu-rep", SimpleNamespace(load_report=load_report), {})


@pytest.mark.parametrize(
    ("value", "unit", "ns"),
    [
        (159692928.0, "second", 159692928.0),  # 2025.3.1's report by 2024.1.1's module: ns
        (0.25, "second", 250_000_000.0),
        (3.0, "s", 3_000_000_000.0),
        (159692928.0, "ns", 159692928.0),
        (2_500.0, "usecond", 2_500_000.0),
    ],
)
def test_a_windows_time_is_in_ns(value: float, unit: str, ns: float, tmp_path: Path) -> None:
    path = tmp_path / "x.ncu-rep"
    path.touch()
    (window,) = read_report(path, report_of(Action(gpu_ns=(value, unit))), {})
    assert window.values["gpu_ns"] == pytest.approx(ns)
