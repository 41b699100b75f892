"""Sweep files in TOML: axes that vary, settings that all runs share, and their runs. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import GenericAlias
from typing import Any

from pydantic import Field, create_model, field_validator

from nwor_bench.errors import ConfigError
from nwor_bench.workload.config import load_scenario, resolve
from nwor_bench.workload.options import declared, names
from nwor_bench.workload.prompts import with_own_prompts
from nwor_bench.workload.run_spec import (
    AXES,
    DEFAULT_PAIR,
    DEFAULT_SCENARIO,
    PairChoice,
    RunSpec,
    ScenarioChoice,
    VllmEntries,
)
from nwor_bench.workload.scenario_values import ScenarioValues
from nwor_bench.workload.toml_file import NamedFile, StrictModel, read_toml, resource_dir


def _table(name: str) -> dict[str, Any]:
    """Fields of the options that stand in a sweep file's table as they are."""
    return {
        entry.name: (entry.written, entry.written_default)
        for holder in (PairChoice, ScenarioChoice, ScenarioValues, RunSpec, VllmEntries)
        for entry in declared(holder)
        if entry.option.table == name
    }


_varied: dict[str, Any] = {
    option.name: (GenericAlias(tuple, (option.bare_kind, ...)), ()) for option, _ in AXES
}
_AxesOfOptions: Any = create_model("Axes", __base__=StrictModel, **_varied, **_table("axes"))
_SettingsOfOptions: Any = create_model("Settings", __base__=StrictModel, **_table("settings"))


_MODELS = [entry for entry in declared(PairChoice) if entry.option.table == "settings"]
"""Options that name models of the user's own."""


class Axes(_AxesOfOptions):
    """Axes of a sweep. Every combination is a run; the modes are the cells of each run.

    A missing axis has one value: the scenario's, the pair's, or the default.
    """

    pairs: tuple[str, ...] = Field(default=(DEFAULT_PAIR,), min_length=1)
    scenarios: tuple[str, ...] = Field(default=(DEFAULT_SCENARIO,), min_length=1)

    @field_validator("*")
    @classmethod
    def _each_once(cls, values: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        if values is not None and len(set(values)) < len(values):
            raise ValueError("write each value once")
        return values


class Settings(_SettingsOfOptions):
    """Settings that all runs share, named like the flags of `nwor-bench sweep`."""


class SweepFile(NamedFile):
    """One sweeps/NAME.toml."""

    axes: Axes = Axes()
    settings: Settings = Settings()

    @property
    def shared(self) -> dict[str, Any]:
        """The options that all runs share, by name, but for the models and the prompts."""
        modes = {name: getattr(self.axes, name) for name in _table("axes")}
        apart = (*names(_MODELS), "prompts")
        values = {k: v for k, v in dict(self.settings).items() if k not in apart}
        return {**values, **modes}

    def choice(self, pair: str) -> PairChoice:
        """The models of the runs with this pair; `target_model` replaces it."""
        given = {entry.name: getattr(self.settings, entry.name) for entry in _MODELS}
        return PairChoice(pair=None if given["target_model"] else pair, **given)


def load_sweep(path: Path) -> SweepFile:
    """Read a sweep file; a shipped one also by its name.

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


def short_name(pair: str) -> str:
    """A pair's name, or that of its file; a name may have a dot."""
    return Path(pair).name.removesuffix(".toml")


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its number from 1, its place on the axes, its configuration."""

    number: int
    pair: str
    scenario: str
    spec: RunSpec
    choice: PairChoice

    @property
    def axes(self) -> dict[str, str | int | float | None]:
        """The point's place on the axes, by name."""
        place = {option.name: self.spec.value_of(option) for option, _ in AXES}
        return {"pair": self.pair, "scenario": self.scenario, **place}

    @property
    def words(self) -> dict[str, str]:
        """The label's words for each axis that has a value, by the axis' name."""
        return {
            option.name: axis.words(value)
            for option, axis in AXES
            if (value := self.spec.value_of(option)) is not None
        }

    @property
    def label(self) -> str:
        """For people: `tiny short, 4 drafts, 8 requests, temperature 0, float32`."""
        name = f"{short_name(self.pair)} {self.spec.scenario.name}"
        return ", ".join([name, *self.words.values()])

    @property
    def folder(self) -> str:
        """The point's run folder within the sweep's: `03-tiny-short-k4-r8`."""
        values = [(axis, self.spec.value_of(option)) for option, axis in AXES]
        parts = [axis.folder.format(value) for axis, value in values if value is not None]
        name = [f"{self.number:02d}", short_name(self.pair), self.spec.scenario.name]
        return "-".join(part for part in (*name, *parts) if part)


@dataclass(frozen=True)
class EngineGroup:
    """Runs that one engine serves, and the configuration that it is started with.

    `spec` is that of the largest run: room for the most requests and the longest of them. Draft
    counts need room for as many requests: vLLM names and captures a count for each batch size.
    """

    number: int
    spec: RunSpec
    points: tuple[Point, ...]


def make_points(sweep: SweepFile) -> tuple[Point, ...]:
    """Every combination of the axes, in the file's order, the last axis fastest.

    Raises ConfigError as `resolve` does, with the run that it concerns.
    """
    points = []
    for number, place in enumerate(_combinations(sweep), start=1):
        pair, scenario = place.pop("pair"), place.pop("scenario")
        try:
            prompts = with_own_prompts(load_scenario(scenario), sweep.settings.prompts)
            spec = resolve(prompts, **sweep.shared, **place)
        except ConfigError as error:
            raise error.of_run(number, f"{pair}, {scenario}") from None
        if spec.experiment.compares_drafts and spec.time_budget_s is not None:
            requests = spec.scenario.requests
            share = size_weight(requests) / sum(map(size_weight, {requests, *sweep.axes.requests}))
            share /= len(sweep.axes.scenarios)
            at_once = [replace(spec, engines_at_once=n) for n in sweep.axes.engines_at_once]
            cells = [len(each.experiment.cells(pair)) for each in (spec, *(at_once or [spec]))]
            share *= cells[0] / sum(cells[1:])
            spec = replace(spec, time_budget_s=round(spec.time_budget_s * share, 1))
        choice = sweep.choice(pair)
        points.append(Point(number, choice.name, scenario, spec, choice))
    return tuple(points)


def size_weight(requests: int) -> float:
    """A batch size's part of the time for draft counts of a scenario, which all sizes answer
    together: larger batches take longer."""
    return float(1 + requests**0.5)


def _combinations(sweep: SweepFile) -> list[dict[str, Any]]:
    """A value of every axis, by name; None for an axis that the file leaves out."""
    axes = sweep.axes
    varied: dict[str, tuple[Any, ...]] = {"pair": axes.pairs, "scenario": axes.scenarios}
    for option, _ in sorted(AXES, key=lambda entry: not entry[1].is_slow):
        varied[option.name] = getattr(axes, option.name) or (None,)
    return [dict(zip(varied, values, strict=True)) for values in product(*varied.values())]


def group_by_engine(points: Sequence[Point]) -> tuple[EngineGroup, ...]:
    """Group runs by engine: runs whose engines differ only in capacity share one.

    Each axis defines whether it needs an engine of its own. Groups and their runs keep the order of
    the points.
    """
    groups: dict[tuple[object, ...], list[Point]] = {}
    for point in points:
        place = [point.axes[option.name] for option, axis in AXES if not axis.shares_engine]
        groups.setdefault((point.pair, *place), []).append(point)
    return tuple(
        EngineGroup(number, _roomiest(members), tuple(members))
        for number, members in enumerate(groups.values(), start=1)
    )


def _roomiest(points: Sequence[Point]) -> RunSpec:
    spec = points[0].spec
    named = len(spec.experiment.counts)
    room = {
        "requests": max(named, *(point.spec.scenario.requests for point in points)),
        "max_model_len": max(point.spec.scenario.max_model_len for point in points),
    }
    return replace(spec, scenario=spec.scenario.model_copy(update=room))
