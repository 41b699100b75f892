"""Read a report of Nsight Compute with NVIDIA's own module, units included, window by window.

`ncu_report` comes with the tool (see `ncu_module`) and reads reports of its own version, of older
ones and, as far as seen, of somewhat newer ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nwor_bench.errors import ConfigError
from nwor_bench.instruments.nsight.ncu_command import METRICS
from nwor_bench.instruments.nvtx_ranges import DOMAIN

BYTE_UNITS = {"byte": 1, "Kbyte": 10**3, "Mbyte": 10**6, "Gbyte": 10**9, "Tbyte": 10**12}
TIME_UNITS = {
    **{"ns": 1, "nsecond": 1, "us": 10**3, "usecond": 10**3, "ms": 10**6, "msecond": 10**6},
    **{"s": 10**9, "second": 10**9},
}
SECONDS = ("s", "second")
PLAIN_UNITS = {"": 1, "sector": 1}
UNITS = {
    "dram_read_bytes": BYTE_UNITS,
    "dram_write_bytes": BYTE_UNITS,
    "l2_read_sectors": PLAIN_UNITS,
    "l2_write_sectors": PLAIN_UNITS,
    "gpu_ns": TIME_UNITS,
}
"""What each column's unit can be called, and how much of the column's own unit that is."""

LONGEST_WINDOW_S = 1000
"""No window lasts as long. The module of 2024.1 calls the ns of a report of 2025.3 "second"."""


@dataclass(frozen=True)
class NcuWindow:
    """One measured window.

    Attributes:
        place: among the report's windows, from 1.
        cell: as `stage x graph`; None where the batch's cell is not known.
        batch, window: numbers as in batches.csv and windows.csv, from the NVTX ranges' payloads;
            None where the report does not hold them.
        values: what was counted; None for a counter that the report does not hold.
    """

    place: int
    cell: str | None
    batch: int | None
    window: int | None
    values: dict[str, float | None]

    def row(self) -> dict[str, Any]:
        """Flat, for a table."""
        which = {"place": self.place, "cell": self.cell, "batch": self.batch}
        return {**which, "window": self.window, **self.values}


def read_report(path: Path, module: Any, cells: Mapping[int, str]) -> list[NcuWindow]:
    """The windows of a report, in the order in which they ran.

    Args:
        path: the .ncu-rep file.
        module: NVIDIA's `ncu_report`.
        cells: each batch's cell, by its number (see `ncu_cells`); empty where no run is at hand.

    Raises ConfigError for a report that cannot be read, holds nothing, or has an unknown unit.
    """
    try:
        report = module.load_report(str(path))
    except Exception as error:  # the module's own error types
        raise ConfigError(
            f"profile ncu: {path} is no report that ncu_report can read ({error}); put the "
            "extras/python of the Nsight Compute that wrote it into PYTHONPATH"
        ) from error
    results = [action for number in range(len(report)) for action in report[number]]
    if not results:
        raise ConfigError(
            f"profile ncu: {path} holds no window; write a smaller --skip, or more --batches"
        )
    windows = []
    for place, action in enumerate(results, start=1):
        batch, window = _payload(action, "batch"), _payload(action, "window")
        cell = None if batch is None else cells.get(batch)
        values = {name: _value(path, action, name) for name in METRICS}
        windows.append(NcuWindow(place, cell, batch, window, values))
    return windows


def _value(path: Path, action: Any, name: str) -> float | None:
    """A metric in the column's unit; None if the report does not hold it."""
    metric = action.metric_by_name(METRICS[name])
    if metric is None or metric.value() is None:
        return None
    unit = str(metric.unit())
    if unit not in UNITS[name]:
        known = ", ".join(repr(one) for one in UNITS[name])
        raise ConfigError(
            f"profile ncu: {path}: {METRICS[name]} is in {unit!r}, and only {known} are known"
        )
    value, scale = float(metric.value()), UNITS[name][unit]
    if UNITS[name] is TIME_UNITS and unit in SECONDS and value >= LONGEST_WINDOW_S:
        scale = TIME_UNITS["ns"]
    return value * scale


def _payload(action: Any, name: str) -> int | None:
    """Payload of our domain's range of that name around a result; None if there is none."""
    state = action.nvtx_state()
    if state is None:
        return None
    for number in state:
        domain = state.domain_by_id(number)
        if domain is None or domain.name() != DOMAIN:
            continue
        for depth in range(len(domain.push_pop_ranges())):
            found = domain.push_pop_range(depth)
            if name in (found.name(), found.message()) and found.has_attributes():
                return int(found.payload_as_uint64())
    return None
