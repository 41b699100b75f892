"""The command line that measures one run of a sweep file by itself."""

import json
import shlex
from typing import Any

from nwor_bench.workload.option_text import to_plain
from nwor_bench.workload.options import Declared, declared
from nwor_bench.workload.run_spec import RunSpec
from nwor_bench.workload.scenario import load_scenario
from nwor_bench.workload.scenario_values import ScenarioValues
from nwor_bench.workload.sweep_points import Point


def point_command(point: Point) -> str:
    """`nwor-bench sweep` with the run's scenario, pair, and the flags that differ from them."""
    scenario = load_scenario(point.scenario)
    parts = ["nwor-bench", "sweep", "--scenario", point.scenario, "--pair", point.pair]
    for each in declared(ScenarioValues):
        value = getattr(point.spec.scenario, each.field)
        if each.option.has_flag and value != getattr(scenario, each.field):
            parts += _written(each, value)
    for each in declared(RunSpec):
        value = getattr(point.spec, each.field)
        if each.option.has_flag and value != each.default:
            parts += _written(each, value)
    return shlex.join(parts)


def _written(each: Declared, value: Any) -> list[str]:
    """A flag and its value, as the command line takes it."""
    if isinstance(value, bool):
        return [each.flag if value else f"--no-{each.flag.removeprefix('--')}"]
    if isinstance(value, dict):
        return [each.flag, json.dumps(value)]
    if isinstance(value, tuple):
        return [each.flag, ",".join(to_plain(value))]
    if isinstance(value, float):  # flags take no exponents
        return [each.flag, f"{value:.12f}".rstrip("0").rstrip(".")]
    return [each.flag, str(to_plain(value))]
