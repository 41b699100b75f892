"""An option that is declared as one field is a flag, a setting, a stored value and a variable."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_origin

import pytest
import typer
from annotated_types import Interval
from refusals import refused
from typer.testing import CliRunner

from nwor_bench.cli.app import app
from nwor_bench.cli.flags import with_flags, written_on
from nwor_bench.plugin.settings import read_settings
from nwor_bench.records.header import RunHeader
from nwor_bench.run.resume import stored_spec
from nwor_bench.run.run_options import RunOptions
from nwor_bench.workload.config import Scenario, load_scenario, resolve
from nwor_bench.workload.options import Option, Panel, declared, names, read_as, to_plain
from nwor_bench.workload.run_spec import (
    AXES,
    PairChoice,
    RunSpec,
    ScenarioChoice,
    VllmEntries,
)
from nwor_bench.workload.scenario_values import ScenarioValues
from nwor_bench.workload.stopping import parse_fraction
from nwor_bench.workload.sweep_file import Axes, Settings

HOLDERS = (PairChoice, ScenarioValues, RunSpec, VllmEntries, RunOptions)


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Toy:
    """One option of each kind."""

    colour: Annotated[Colour, Option("A colour.", Panel.VLLM, aliases=("-c", "--hue"))] = Colour.RED
    colours: Annotated[tuple[Colour, ...], Option("Colours.")] = tuple(Colour)
    count: Annotated[int | None, Option("A number."), Interval(ge=2, le=5)] = None
    loud: Annotated[bool, Option("Say more.")] = False
    path: Annotated[Path | None, Option("A file.", flag_variable="TOY_PATH")] = None
    more: Annotated[dict[str, Any] | None, Option("JSON.", name="extra")] = None
    share: Annotated[float, Option("A share.", shown="1%", read=parse_fraction)] = 0.01
    plain: int = 3


def call(*arguments: str, **environ: str) -> tuple[Toy, Mapping[str, Any]]:
    """What a command with Toy's flags gets: its values, and those that were written."""
    got: list[tuple[Toy, Mapping[str, Any]]] = []
    toys = typer.Typer()

    @toys.command()
    @with_flags()
    def command(context: typer.Context, toy: Toy) -> None:
        got.append((toy, written_on(context)))

    result = CliRunner().invoke(toys, list(arguments), env=environ, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return got[0]


def test_a_field_is_a_flag_of_its_type() -> None:
    assert call() == (Toy(), {})
    toy, written = call("--colour", "blue", "--colours", "blue, red", "--count", "5", "--loud")
    assert toy == Toy(Colour.BLUE, (Colour.BLUE, Colour.RED), 5, True)
    assert set(written) == {"colour", "colours", "count", "loud"}
    assert call("--extra", '{"a": 1}')[0].more == {"a": 1}
    assert call(TOY_PATH="a/b") == (Toy(path=Path("a/b")), {})


@pytest.mark.parametrize("flag", ["--colour", "--hue", "-c"])
def test_an_alias_means_the_same(flag: str) -> None:
    assert call(flag, "blue") == (Toy(Colour.BLUE), {"colour": "blue"})


@pytest.mark.parametrize(
    ("arguments", "field", "wanted"),
    [
        (("--hue", "bleu"), "--colour", {"value": "bleu", "near": "blue"}),
        (("--colours", "red,red"), "--colours", {"value": "red,red"}),
        (("--count", "1"), "--count", {"value": 1, "naming": "2 or more"}),
        (("--count", "6"), "--count", {"value": 6, "naming": "5 or less"}),
        (("--extra", "{"), "--extra", {"value": "{", "cause": ValueError}),
    ],
)
def test_a_bad_value_is_refused_by_the_flags_own_name(
    arguments: tuple[str, ...], field: str, wanted: dict[str, Any]
) -> None:
    with refused(field, **wanted):
        call(*arguments)


@pytest.mark.parametrize(
    "value", [Toy(), Toy(Colour.BLUE, (Colour.BLUE,), 4, True, None, {"a": [1]})]
)
def test_json_gives_back_what_it_was_given(value: Toy) -> None:
    for each in declared(Toy):
        told = to_plain(getattr(value, each.field))
        assert read_as(each.kind, "toy", told) == getattr(value, each.field)


def test_a_default_is_what_its_text_is_read_as() -> None:
    """Flags of every command."""
    groups = [app, *(each.typer_instance for each in app.registered_groups)]
    holders = {
        kind
        for group in groups
        for command in group.registered_commands
        for kind in inspect.unwrap(command.callback).__annotations__.values()
        if is_dataclass(kind)
    }
    assert len(holders) > 10
    for option in (each for holder in holders for each in declared(holder)):
        if option.option.shown:
            assert option.read(option.option.shown) == option.default


def test_no_two_options_have_one_name() -> None:
    every = [name for holder in HOLDERS for name in names(declared(holder))]
    assert len(set(every)) == len(every)
    flags = [
        flag for holder in HOLDERS for each in declared(holder) for flag in each.option.aliases
    ]
    assert len(set(flags)) == len(flags)


def test_everything_that_a_run_measures_by_is_an_option() -> None:
    assert {each.field for each in declared(RunSpec)} | {"scenario"} == {
        field.name for field in fields(RunSpec)
    }
    assert {each.field for each in declared(ScenarioValues)} <= set(Scenario.model_fields)
    assert all(get_origin(kind) is Annotated for kind in ScenarioValues.__annotations__.values())


def test_axes_have_a_place_each() -> None:
    assert [axis.place for _, axis in AXES] == list(range(1, len(AXES) + 1))
    assert {option.name for option, _ in AXES} <= set(Axes.model_fields)


def test_sweep_files_have_every_option_that_says_so() -> None:
    wanted = {
        each.name
        for holder in (PairChoice, ScenarioChoice, ScenarioValues, RunSpec, VllmEntries)
        for each in declared(holder)
        if each.option.table == "settings"
    }
    assert wanted == set(Settings.model_fields)
    assert len(wanted) > 10


def test_a_settings_default_is_the_runs() -> None:
    """A sweep file that says nothing gives the run that a bare command line gives."""
    given = {name: value for name, value in Settings() if value is not None}
    assert resolve(load_scenario("short"), **given) == resolve(load_scenario("short"))


def test_the_plugin_reads_every_variable_that_a_run_tells_it() -> None:
    """The plugin imports nothing of the workload, so it names its variables itself."""
    spec = resolve(load_scenario("short"), stage_by="copy")
    settings = read_settings({"VLLM_NWOR_MODE": "off", **spec.worker_variables})
    assert settings is not None
    told = {each.field for each in declared(RunSpec) if each.option.worker_variable}
    assert told == {"stage_by", "attention"}
    assert {name: getattr(settings, name) for name in told} == {
        name: getattr(spec, name) for name in told
    }


def test_a_run_is_read_back_whole() -> None:
    spec = resolve(
        load_scenario("short"), nwor_modes="stage,off", stage_by="copy", ci_width="1%",
        dtype="float32", engine_args='{"a": 1}', time_budget="2m", kv_cache_gib=1.5,
    )  # fmt: skip
    assert stored_spec(RunHeader(spec=spec.to_dict())) == spec


def test_an_option_that_does_not_exist_is_a_mistake_of_ours() -> None:
    with pytest.raises(TypeError, match="no option is called 'stage_l3'"):
        resolve(load_scenario("short"), stage_l3="x")
