"""`nwor-bench scenarios list|show`: the workloads of a run."""

from typing import TYPE_CHECKING, Annotated

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

app = typer.Typer(cls=Group, help="List and show the scenarios (workloads).", no_args_is_help=True)

EXAMPLE_CHARS = 400


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


@app.command("show", cls=Command, epilog=examples("nwor-bench scenarios show short"))
def show_scenario(
    name: Annotated[
        str,
        typer.Argument(help="A scenario's name, or the path of a .toml file."),
    ],
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show a scenario's fields and one of its prompts."""
    from nwor_bench.workload.config import load_scenario

    scenario = load_scenario(name)
    if as_json:
        tell_json({"scenario": _facts(scenario)})
    elif quiet:
        typer.echo(f"{scenario.name}: {scenario.description}")
    else:
        _print_scenario(scenario)


def _print_scenario(scenario: "Scenario") -> None:
    from rich.console import Console

    from nwor_bench.report.document import Code, Document, Paragraph, table
    from nwor_bench.report.terminal import print_document
    from nwor_bench.report.text import settings
    from nwor_bench.workload.prompts import load_prompts

    example = load_prompts(scenario)[0]
    text = example.text[:EXAMPLE_CHARS]
    cut = "" if len(text) == len(example.text) else f"... ({len(example.text)} characters)"
    blocks = (
        table(("field", "value"), list(settings(_facts(scenario))), numbers_from=2),
        Paragraph(f"Example, {example.id} ({example.category}):"),
        Code(text + cut),
    )
    print_document(Console(), Document(scenario.name, blocks))
