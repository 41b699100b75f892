"""Sweep files in TOML: axes that vary, and settings that all runs share. Pure."""

from pathlib import Path
from types import GenericAlias
from typing import Any, Self

from pydantic import Field, create_model, field_validator, model_validator

from nwor_bench.errors import ConfigError
from nwor_bench.workload.chosen_cells import added_cell
from nwor_bench.workload.options import Declared, declared
from nwor_bench.workload.resources import resource_dir
from nwor_bench.workload.run_spec import AXES, DEFAULT_PAIR, DEFAULT_SCENARIO, RunSpec
from nwor_bench.workload.scenario_values import ScenarioValues
from nwor_bench.workload.toml_file import NamedFile, StrictModel, read_toml


def _table(name: str) -> dict[str, Any]:
    """Fields of the options that stand in a sweep file's table as they are."""
    return {
        each.name: (each.written, each.written_default)
        for holder in (ScenarioValues, RunSpec)
        for each in declared(holder)
        if each.option.table == name
    }


def _kind(option: Declared) -> Any:
    """The type of an axis' values: a field's, or text too where text can stand for it."""
    return option.bare_kind if option.option.read is None else option.bare_kind | str


_varied: dict[str, Any] = {
    option.name: (GenericAlias(tuple, (_kind(option), ...)), ()) for option, _ in AXES
}
_AxesOfOptions: Any = create_model("Axes", __base__=StrictModel, **_varied, **_table("axes"))
_SettingsOfOptions: Any = create_model("Settings", __base__=StrictModel, **_table("settings"))


class Axes(_AxesOfOptions):
    """Axes of a sweep. Every combination is a run; the modes are the cells of each run.

    A missing axis has one value: the scenario's, the pair's, or the default.
    """

    pairs: tuple[str, ...] = Field(default=(DEFAULT_PAIR,), min_length=1)
    scenarios: tuple[str, ...] = Field(default=(DEFAULT_SCENARIO,), min_length=1)

    @field_validator("*")
    @classmethod
    def _each_once(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(set(values)) < len(values):
            raise ValueError("write each value once")
        return values


class Settings(_SettingsOfOptions):
    """Settings that all runs share, named like the flags of `nwor-bench sweep`."""

    @field_validator("cells", mode="before")
    @classmethod
    def _none_is_added(cls, cells: Any) -> Any:
        if not isinstance(cells, list):
            return cells
        if not cells:
            raise ValueError("write one cell or more, such as stage-graph, or leave it out")
        if remedy := next(filter(None, map(added_cell, cells)), None):
            raise ValueError(remedy)
        return tuple(cells)  # of JSON's list; pydantic takes no other from here

    @model_validator(mode="after")
    def _one_profiler(self) -> Self:
        if self.dram_counters and self.launch_counts:
            raise ValueError(
                "write dram_counters or launch_counts, not both: PyTorch's profiler, which counts "
                "launches, changes the clock of the counters in every later run of the process"
            )
        return self


class SweepFile(NamedFile):
    """One sweeps/NAME.toml."""

    axes: Axes = Axes()
    settings: Settings = Settings()

    @property
    def shared(self) -> dict[str, Any]:
        """The options that all runs share, by name."""
        modes = {name: getattr(self.axes, name) for name in _table("axes")}
        return {**dict(self.settings), **modes}


def load_sweep(path: Path) -> SweepFile:
    """Read a sweep file; a shipped one by its name alone too.

    Raises ConfigError with file, line and field of every fault.
    """
    if path == Path():
        raise ConfigError.for_field("--file", "", "name a sweep file, such as quick or my.toml")
    shipped = resource_dir("sweeps")
    if path.suffix != ".toml":
        names = sorted(file.stem for file in shipped.glob("*.toml"))
        if str(path) not in names:
            raise ConfigError.unknown("--file", str(path), names)
        path = shipped / f"{path}.toml"
    sweep = read_toml(path, SweepFile)
    return sweep.model_copy(update={"name": sweep.name or path.stem})
