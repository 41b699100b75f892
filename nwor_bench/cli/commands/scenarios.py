"""`nwor-bench scenarios list`: the workloads of a run."""

from typing import TYPE_CHECKING

import typer

from nwor_bench.cli.command import (
    AsJson,
    Command,
    Group,
    Quiet,
    examples,
    print_table,
    tell_json,
)

if TYPE_CHECKING:
    from typing import Any

    from nwor_bench.workload.config import Scenario

app = typer.Typer(cls=Group, help="The scenarios (workloads).", no_args_is_help=True)


@app.command("list", cls=Command, epilog=examples("nwor-bench scenarios list"))
def list_scenarios(as_json: AsJson = False, quiet: Quiet = False) -> None:
    """List the shipped scenarios."""
    from nwor_bench.workload.config import load_scenario, scenario_names

    scenarios = [load_scenario(name) for name in scenario_names()]
    if as_json:
        tell_json({"scenarios": list(map(_facts, scenarios))})
    elif quiet:
        typer.echo("\n".join(scenario.name for scenario in scenarios))
    else:
        _print_list(scenarios)


def _print_list(scenarios: "list[Scenario]") -> None:
    headers = ["name", "requests", "batches", "drafts", "new tokens", "temp", "max len", "prompts"]
    rows = []
    for s in scenarios:
        numbers = (s.requests, s.batches, s.draft_tokens, s.max_new_tokens, s.temperature)
        rows.append((s.name, *map(str, (*numbers, s.max_model_len, _number_of_prompts(s)))))
    print_table(headers, rows, numbers_from=1)


def _facts(scenario: "Scenario") -> "dict[str, Any]":
    """A scenario's fields, and how many prompts it has."""
    fields = scenario.model_dump(mode="json")
    return {**fields, "number_of_prompts": _number_of_prompts(scenario)}


def _number_of_prompts(scenario: "Scenario") -> int:
    from nwor_bench.workload.prompts import load_prompts

    return len(load_prompts(scenario))
