"""A sweep folder: sweep.json has the sweep's configuration and every run's status; summary.csv and
summary.md show all runs side by side."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from nwor_bench.errors import StoreError
from nwor_bench.records.disk import write_atomically
from nwor_bench.records.header import read_object
from nwor_bench.records.run_folder import RUN_FILE
from nwor_bench.records.store import read_run
from nwor_bench.records.types import CellResult
from nwor_bench.workload.run_spec import AXES
from nwor_bench.workload.sweep_file import SweepFile
from nwor_bench.workload.sweep_points import EngineGroup
from nwor_bench.workload.toml_file import dotted, remedy

if TYPE_CHECKING:
    from pandas import DataFrame

INDEX_FILE = "sweep.json"
SWEEP_FORMAT_VERSION = 1
PENDING, DONE, FAILED, INTERRUPTED = "pending", "done", "failed", "interrupted"

_SHOWN = (
    "nwor_mode", "scv_mode", "arm", "verdict", "ratio_to_off", "ratio_ci_low", "ratio_ci_high",
    "compared", "smallest_effect", "window_ms_mean", "latency_ms_p50", "tokens_per_s",
    "acceptance_rate", "batches", "parity",
)  # fmt: skip
_PLACE = ("number", "pair", "scenario", *(option.name for option, _ in AXES), "status")
"""Columns that identify a run."""


class SweepIndex:
    """Index of a sweep folder, rewritten after every run so that it is always up to date."""

    def __init__(self, folder: Path, content: dict[str, Any]):
        """Use `create` or `open` instead."""
        self.folder = folder
        self.content = content

    @classmethod
    def create(
        cls, folder: Path, sweep: SweepFile, groups: Sequence[EngineGroup], started_at: str
    ) -> "SweepIndex":
        """Begin a sweep folder, with every run pending."""
        runs = [
            {"number": point.number, "folder": point.folder, "engine": group.number, **point.axes,
             "status": PENDING, "exit_code": None, "error": None}
            for group in groups
            for point in group.points
        ]  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        index = cls(
            folder,
            {
                "format_version": SWEEP_FORMAT_VERSION,
                "name": sweep.name,
                "sweep": sweep.model_dump(mode="json"),
                "engines": len(groups),
                "started_at": started_at,
                "finished_at": None,
                "runs": sorted(runs, key=lambda run: run["number"]),
            },
        )
        index.write()
        return index

    @classmethod
    def open(cls, folder: Path) -> "SweepIndex":
        """Read a sweep folder. Raises StoreError if its index is damaged or of another version."""
        path = folder / INDEX_FILE
        try:
            content = read_object(path.read_bytes(), path)
        except OSError as error:
            raise StoreError(f"{path}: cannot be read ({error})") from error
        version = content.get("format_version")
        if version != SWEEP_FORMAT_VERSION:
            raise StoreError(
                f"{path}: format_version {version!r} is unknown; this nwor-bench reads "
                f"{SWEEP_FORMAT_VERSION}"
            )
        return cls(folder, content)

    def check_runs(self, groups: Sequence[EngineGroup]) -> None:
        """Raises StoreError for an index without a name, or whose runs are not its axes' own."""
        path, runs = self.folder / INDEX_FILE, self.content.get("runs")
        if not isinstance(self.content.get("name"), str):
            raise StoreError(f"{path}: name is not a text: restore the file")
        listed = runs if isinstance(runs, list) else []
        for group in groups:
            for point in group.points:
                wanted = {"number": point.number, "folder": point.folder, **point.axes}
                if not any(_has(run, wanted) for run in listed):
                    raise StoreError(
                        f"{path}: runs: run {point.number} ({point.label}) of its axes is not "
                        "listed as it was begun: the file was changed since nwor-bench wrote it; "
                        "restore it"
                    )

    @property
    def sweep(self) -> SweepFile:
        """The sweep file of the sweep's start. Raises StoreError if it is damaged."""
        try:
            return SweepFile.model_validate_json(json.dumps(self.content.get("sweep")))
        except ValidationError as error:
            fault = error.errors()[0]
            name = dotted(("sweep", *fault["loc"]))
            raise StoreError(
                f"{self.folder / INDEX_FILE}: {name}: {remedy(fault)}, or restore the file"
            ) from error

    def status(self, number: int) -> str:
        """Status of the run with that number."""
        return str(self._run(number)["status"])

    @property
    def is_done(self) -> bool:
        """True once every run is done."""
        return all(run["status"] == DONE for run in self.content["runs"])

    def done_codes(self) -> list[int]:
        """Exit codes of the runs that are done."""
        return [int(run["exit_code"]) for run in self.content["runs"] if run["status"] == DONE]

    def set_run(self, number: int, **changes: Any) -> None:
        """Store a run's status."""
        self._run(number).update(changes)
        self.write()

    def write(self) -> None:
        """Rewrite sweep.json atomically."""
        write_atomically(self.folder / INDEX_FILE, json.dumps(self.content, indent=2) + "\n")

    def _run(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = next(r for r in self.content["runs"] if r["number"] == number)
        return found


def _has(run: object, wanted: Mapping[str, Any]) -> bool:
    return (
        isinstance(run, Mapping)
        and run.get("status") in (PENDING, DONE, FAILED, INTERRUPTED)
        and (run["status"] != DONE or isinstance(run.get("exit_code"), int))
        and all(run.get(name) == value for name, value in wanted.items())
    )


def write_summary(index: SweepIndex) -> str:
    """summary.csv (one row a run and cell) and summary.md (one row a run), from the records.

    Returns the text of summary.md. Imports pandas and the analysis here, since the index is also
    read before heavy imports.
    """
    from pandas import DataFrame

    from nwor_bench.analysis.aggregate import summarise

    rows, lines = [], []
    for run in index.content["runs"]:
        place = {name: run.get(name) for name in _PLACE}
        folder = index.folder / run["folder"]
        cells = summarise(read_run(folder)) if (folder / RUN_FILE).is_file() else []
        for cell in cells:
            shown = {name: getattr(cell, name) for name in _SHOWN}
            rows.append({**place, **shown, "folder": run["folder"]})
        if not cells:
            rows.append({**place, "folder": run["folder"]})
        lines.append({**place, **{cell.label: _outcome(cell) for cell in cells},
                      "error": run["error"]})  # fmt: skip
    frame = DataFrame(rows, dtype=object)
    write_atomically(index.folder / "summary.csv", frame.to_csv(index=False, lineterminator="\n"))
    text = _summary_text(index.content["name"], DataFrame(lines, dtype=object))
    write_atomically(index.folder / "summary.md", text)
    return text


def _outcome(cell: CellResult) -> str:
    """Result such as `FASTER 0.972 [0.970, 0.974]`; for off x off its time."""
    from nwor_bench.analysis.parity.batches import REFERENCE
    from nwor_bench.report.text import ratio

    if cell.ratio_to_off is None and cell.verdict == REFERENCE and cell.window_ms_mean:
        return f"{cell.window_ms_mean:.2f} ms a window"
    return str(cell.verdict) if cell.ratio_to_off is None else f"{cell.verdict} {ratio(cell)}"


def _summary_text(name: str, table: "DataFrame") -> str:
    """One row per run; values that all runs share are listed above the table."""
    table = table.dropna(axis="columns", how="all")
    same = [axis for axis in _PLACE if axis in table and table[axis].nunique(dropna=False) == 1]
    if len(table) == 1:
        same = []
    alike = ", ".join(f"{axis} {table[axis].iloc[0]}" for axis in same)
    body = table.drop(columns=same).fillna("").astype(str)
    grid = body.to_markdown(index=False, tablefmt="pipe", disable_numparse=True)
    note = f"All runs: {alike}.\n\n" if alike else ""
    legend = (
        "Time per window over that of off x off, with each cell's own 95 % interval: below 1 is "
        "faster."
    )
    return f"# nwor-bench sweep: {name}\n\n{note}{grid}\n\n{legend}\n"
