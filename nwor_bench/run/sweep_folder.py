"""A sweep folder's index: sweep.json has the sweep's configuration and every run's status."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nwor_bench.errors import ConfigError, StoreError
from nwor_bench.records.files import DONE, LEFT_OUT, RUN_FILE, SWEEP_FILE, write_atomically
from nwor_bench.records.header import read_object
from nwor_bench.records.store import read_header
from nwor_bench.records.types import RunStatus
from nwor_bench.run.run_options import RunOptions
from nwor_bench.workload.options import remedy
from nwor_bench.workload.run_spec import AXES, Counters
from nwor_bench.workload.scenario_values import ScenarioValues
from nwor_bench.workload.sweep_file import EngineGroup, SweepFile, load_sweep
from nwor_bench.workload.toml_file import dotted

INDEX_FILE = SWEEP_FILE
SWEEP_FORMAT_VERSION = 1
PENDING, FAILED, INTERRUPTED = "pending", "failed", "interrupted"


_READ = frozenset(("number", "folder", "pair", "scenario", "status", "error"))
"""Keys of a run that its summary needs."""


class SweepIndex:
    """Index of a sweep folder, rewritten after every run so that it is always up to date."""

    def __init__(self, folder: Path, content: dict[str, Any]):
        """Use `create`, `open` or `of_runs` instead."""
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
        """Read a sweep folder, where a run without records is pending again.

        Raises StoreError if its index is damaged or of another version.
        """
        path = folder / INDEX_FILE
        try:
            content = read_object(path.read_bytes(), path)
        except OSError as error:
            raise StoreError.at(path, f"cannot be read ({error})") from error
        version = content.get("format_version")
        if version != SWEEP_FORMAT_VERSION:
            raise StoreError.at(
                f"{path}: format_version",
                f"{version!r} is unknown; this nwor-bench reads {SWEEP_FORMAT_VERSION}",
                version,
                joint=" ",
            )
        index = cls(folder, content)
        done = [run for run in index._listed if isinstance(run, dict) and run.get("status") == DONE]
        for run in done:  # its folder may have been deleted since
            if not (folder / str(run.get("folder")) / RUN_FILE).is_file():
                run["status"] = PENDING
        return index

    @classmethod
    def of_runs(cls, folder: Path) -> "SweepIndex":
        """An index of run folders that were measured one by one, such as a job array's.

        Raises StoreError if one of them is damaged.
        """
        folders = sorted(path.parent for path in folder.glob(f"*/{RUN_FILE}"))
        runs = [_entry(number, run) for number, run in enumerate(folders, start=1)]
        return cls(folder, {"name": folder.resolve().name, "runs": runs})

    def require_unfinished(self) -> None:
        """Raises ConfigError if every run is done."""
        done = [isinstance(run, Mapping) and run.get("status") == DONE for run in self._listed]
        if done and all(done):
            raise ConfigError.for_field("--resume", str(self.folder), "all of its runs are done")

    def check_readable(self) -> None:
        """Raises StoreError for an index whose runs cannot be shown."""
        known = all(isinstance(run, Mapping) and run.keys() >= _READ for run in self._listed)
        if not isinstance(self.content.get("name"), str) or not self._listed or not known:
            raise StoreError.at(
                self.folder / INDEX_FILE,
                "name or runs are not as nwor-bench wrote them: restore the file",
            )

    def check_runs(self, groups: Sequence[EngineGroup]) -> None:
        """Raises StoreError for an index without a name, or whose runs are not its axes' own."""
        path = self.folder / INDEX_FILE
        if not isinstance(self.content.get("name"), str):
            raise StoreError.at(f"{path}: name", "is not a text: restore the file", joint=" ")
        for group in groups:
            for point in group.points:
                wanted = {"number": point.number, "folder": point.folder, **point.axes}
                if not any(_has(run, wanted) for run in self._listed):
                    raise StoreError.at(
                        f"{path}: runs: run {point.number} ({point.label})",
                        "of its axes is not listed as it was begun: the file was changed since "
                        "nwor-bench wrote it; restore it",
                        joint=" ",
                    )

    @property
    def _listed(self) -> list[Any]:
        """The entries of its runs as they stand in the file, which may be damaged."""
        runs = self.content.get("runs")
        return runs if isinstance(runs, list) else []

    @property
    def sweep(self) -> SweepFile:
        """The sweep file of the sweep's start. Raises StoreError if it is damaged."""
        try:
            return SweepFile.model_validate_json(json.dumps(self.content.get("sweep")))
        except ValidationError as error:
            fault = error.errors()[0]
            name = dotted(("sweep", *fault["loc"]))
            raise StoreError.at(
                f"{self.folder / INDEX_FILE}: {name}",
                f"{remedy(fault)}, or restore the file",
                fault["input"],
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
        run: dict[str, Any] = next(r for r in self.content["runs"] if r["number"] == number)
        return run


def _entry(number: int, folder: Path) -> dict[str, Any]:
    """A run of its own as a sweep lists its runs; its folder is its label."""
    header = read_header(folder)
    scenario, parts = header.scenario or {}, vars(header.spec)
    axes = {
        axis.name: (scenario if axis.holder is ScenarioValues else parts).get(axis.field)
        if (entry := axis.option.entry) is None
        else (parts[entry[0]] or {}).get(entry[1])
        for axis, _ in AXES
    }
    ended = {RunStatus.COMPLETE: DONE, RunStatus.FAILED: FAILED}
    status = ended.get(header.status or RunStatus.PARTIAL, INTERRUPTED)
    return {
        **{"number": number, "folder": folder.name, "label": folder.name},
        **{"pair": header.pair.name or "", "scenario": scenario.get("name") or ""},
        **axes,
        **{"status": status, "exit_code": None, "error": None},
    }


def _has(run: object, wanted: Mapping[str, Any]) -> bool:
    return (
        isinstance(run, Mapping)
        and run.get("status") in (PENDING, DONE, FAILED, INTERRUPTED, LEFT_OUT)
        and (run["status"] != DONE or isinstance(run.get("exit_code"), int))
        and all(run.get(name) == value for name, value in wanted.items())
    )


def reads_dram(flag: str | None, options: RunOptions) -> bool:
    """True if the sweep that this command line starts or resumes reads DRAM counters.

    Args:
        flag: the value of --counters.
        options: have the folder to resume, or the sweep file.

    Raises:
        ConfigError: the folder holds no run, the file is missing or wrong.
        StoreError: the run or sweep in the folder is damaged or has another format.
    """
    if options.resume is not None and flag is None:
        flag = _begun_with(options.resume)
    elif options.file is not None and flag is None:
        flag = load_sweep(options.file).settings.counters
    return flag == Counters.DRAM


def _begun_with(folder: Path) -> str | None:
    if (folder / INDEX_FILE).is_file():
        return SweepIndex.open(folder).sweep.settings.counters
    return read_header(folder).spec.counters
