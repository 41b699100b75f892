"""`nwor-bench scenarios list|show`: the workloads of a run."""

from typing import TYPE_CHECKING, Annotated

import typer

from nwor_bench.cli import completion
from nwor_bench.cli.help import Command, Group, examples

if TYPE_CHECKING:
    from rich.table import Table

    from nwor_bench.workload.prompts import Prompt
    from nwor_bench.workload.scenario import Scenario

app = typer.Typer(cls=Group, help="List and show the scenarios (workloads).", no_args_is_help=True)

EXAMPLE_CHARS = 400

HUB_FIELDS = ("split", "limit")
"""Fields of a prompt source with defaults that only hub data sets use."""


@app.command("list", cls=Command, epilog=examples("nwor-bench scenarios list"))
def list_scenarios() -> None:
    """List the shipped scenarios."""
    from rich.console import Console
    from rich.table import Table

    from nwor_bench.workload.prompts import load_prompts
    from nwor_bench.workload.scenario import load_scenario, scenario_names

    table = Table()
    table.add_column("name")
    for column in (
        "requests",
        "batches",
        "drafts",
        "new tokens",
        "temp",
        "max len",
        "prompts",
    ):
        table.add_column(column, justify="right")
    for name in scenario_names():
        s = load_scenario(name)
        numbers = (s.requests, s.batches, s.draft_tokens, s.max_new_tokens, s.temperature)
        is_offline = s.prompts.source != "hub"
        count = len(load_prompts(s)) if is_offline else "hub"
        table.add_row(name, *map(str, (*numbers, s.max_model_len, count)))
    Console().print(table)


@app.command("show", cls=Command, epilog=examples("nwor-bench scenarios show short"))
def show_scenario(
    name: Annotated[
        str,
        typer.Argument(
            help="A scenario's name, or the path of a .toml file.",
            autocompletion=completion.scenarios,
        ),
    ],
) -> None:
    """Show a scenario's fields, the lengths of its prompts, and one prompt."""
    from rich.console import Console
    from rich.markup import escape

    from nwor_bench.workload.prompts import load_prompts
    from nwor_bench.workload.scenario import load_scenario

    scenario = load_scenario(name)
    prompts = load_prompts(scenario)
    console = Console()
    console.print(_fields(scenario))
    console.print(_lengths(prompts))
    example = prompts[0]
    text = example.text[:EXAMPLE_CHARS]
    cut = "" if len(text) == len(example.text) else f"... ({len(example.text)} characters)"
    console.print(f"Example, [bold]{escape(example.id)}[/bold] ({escape(example.category)}):")
    console.print(text + cut, markup=False, highlight=False)


def _fields(scenario: "Scenario") -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column("field")
    table.add_column("value", overflow="fold")
    values = scenario.model_dump(mode="json")
    source = values.pop("prompts")
    if source["source"] != "hub":
        source = {key: source[key] for key in source if key not in HUB_FIELDS}
    values |= {f"prompts.{key}": value for key, value in source.items()}
    for key, value in values.items():
        if value not in (None, "", [], {}):
            shown = ", ".join(value) if isinstance(value, list) else str(value)
            table.add_row(key, escape(shown))
    return table


def _lengths(prompts: "list[Prompt]") -> "Table":
    """A table of prompts by category: their number, and their lengths in characters."""
    from statistics import median

    from rich.markup import escape
    from rich.table import Table

    table = Table("category", title="Prompts, lengths in characters", title_justify="left")
    for column in ("prompts", "shortest", "median", "longest"):
        table.add_column(column, justify="right")
    for category in [*sorted({prompt.category for prompt in prompts}), "all"]:
        sizes = [len(p.text) for p in prompts if category in (p.category, "all")]
        numbers = (len(sizes), min(sizes), round(median(sizes)), max(sizes))
        table.add_row(escape(category), *map(str, numbers))
    return table
