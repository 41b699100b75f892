"""A run of a sweep file has a command of its own, which the command line reads back as that run."""

import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nwor_bench.cli.commands.sweep import of_holders
from nwor_bench.run.prepare import point_command
from nwor_bench.workload.config import load_scenario, resolve
from nwor_bench.workload.run_spec import RunSpec, ScenarioValues
from nwor_bench.workload.sweep_file import load_sweep, make_points

SWEEP = """
[axes]
pairs = ["tiny"]
scenarios = ["short"]
requests = [1, 8]
dtype = ["float32"]
cache_dtype = ["auto", "fp8"]
nwor_modes = ["off", "stage"]
[settings]
batches = 7
ci_width = "0.5%"
time_budget = "90s"
counters = "dram"
"""


def points(tmp_path: Path):
    path = tmp_path / "own.toml"
    path.write_text(SWEEP)
    return make_points(load_sweep(path))


@cache
def sweep_command() -> Any:
    import typer

    from nwor_bench.cli.app import app

    return typer.main.get_command(app).commands["sweep"]  # type: ignore[attr-defined]


def flags_of(command: str) -> dict[str, object]:
    words = shlex.split(command)
    return sweep_command().make_context("sweep", words[2:]).params


def test_the_command_gives_the_same_run(tmp_path):
    found = points(tmp_path)
    assert len(found) == 4
    for point in found:
        command = point_command(point)
        flags = flags_of(command)
        assert (flags["pair"], flags["scenario"]) == ("tiny", "short")
        spec = resolve(
            load_scenario(str(flags["scenario"])), **of_holders(flags, ScenarioValues, RunSpec)
        )
        assert spec == point.spec
        assert "--file" not in command


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quick", "full"])
def test_shipped_sweeps_too(name):
    for point in make_points(load_sweep(Path(name))):
        flags = flags_of(point_command(point))
        scenario = load_scenario(str(flags["scenario"]))
        assert resolve(scenario, **of_holders(flags, ScenarioValues, RunSpec)) == point.spec
