"""`nwor-bench pairs list|fetch` and `nwor-bench scenarios list`: what ships."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from nwor_bench.cli.command import Command, CommandGroup, examples, print_table, tell_json
from nwor_bench.cli.flags import AsJson, Quiet, with_flags
from nwor_bench.workload.run_spec import DEFAULT_PAIR

if TYPE_CHECKING:
    from typing import Any

    from nwor_bench.models.pairs import ModelPair
    from nwor_bench.workload.config import Scenario

pairs = typer.Typer(cls=CommandGroup, help="Model pairs: list, fetch.", no_args_is_help=True)
scenarios = typer.Typer(cls=CommandGroup, help="The scenarios (workloads).", no_args_is_help=True)


@dataclass(frozen=True)
class Shown:
    """What is printed."""

    as_json: AsJson = False
    quiet: Quiet = False


Name = Annotated[str, typer.Argument(help="A pair's name, or the path of a pair's .toml file.")]


@pairs.command("list", cls=Command, epilog=examples("nwor-bench pairs list"))
@with_flags()
def list_pairs(options: Shown) -> None:
    """List the shipped pairs."""
    from nwor_bench.models.pairs import load_pair, pair_names

    by_name = {name: load_pair(name) for name in pair_names()}
    if options.as_json:
        tell_json({"pairs": [_pair_facts(name, pair) for name, pair in by_name.items()]})
    elif options.quiet:
        typer.echo("\n".join(by_name))
    else:
        _print_pairs(by_name)


def _print_pairs(by_name: "dict[str, ModelPair]") -> None:
    rows = []
    for name, pair in by_name.items():
        label = f"{name} (default)" if name == DEFAULT_PAIR else name
        ready = "yes" if _is_ready(pair) else "no"
        weights = "; no weights" if pair.shape is not None else ""
        rows.append((label, pair.method, pair.dtype, ready, f"{pair.description}{weights}"))
    print_table(("pair", "drafts by", "dtype", "ready", "description"), rows, numbers_from=5)


@pairs.command(cls=Command, epilog=examples("nwor-bench pairs fetch smollm2"))
@with_flags()
def fetch(options: Shown, name: Name = DEFAULT_PAIR) -> None:
    """Download or generate a pair, unless it is in the cache."""
    from nwor_bench.models.pairs import fetch_pair, load_pair

    pair, silent = load_pair(name), options.as_json or options.quiet
    was_ready = _is_ready(pair)
    resolved = fetch_pair(
        pair, progress=lambda step: None if silent else typer.echo(f"{name}: {step}")
    )
    if options.as_json:
        tell_json({"pair": pair.name, "was_ready": was_ready, "target": resolved.target,
                   "drafter": resolved.draft, "load_format": resolved.load_format})  # fmt: skip
        return
    # typer.echo, not rich: a path must stay in one line to be copied.
    if not options.quiet:
        typer.echo(f"{pair.name}: {'already there' if was_ready else 'ready'}")
    typer.echo(f"target: {resolved.target}")
    typer.echo(f"drafter: {resolved.draft or f'none (method {resolved.method})'}")
    if resolved.load_format is not None and not options.quiet:
        from nwor_bench.models.pairs.tiny import WITHOUT_WEIGHTS

        typer.echo(f"weights: {WITHOUT_WEIGHTS}")


def _pair_facts(name: str, pair: "ModelPair") -> "dict[str, Any]":
    """What the list says of a pair."""
    return {
        "name": name,
        "is_default": name == DEFAULT_PAIR,
        "method": pair.method,
        "dtype": pair.dtype,
        "is_ready": _is_ready(pair),
        "has_weights": pair.shape is None,
        "description": pair.description,
    }


def _is_ready(pair: "ModelPair") -> bool:
    from nwor_bench.models.pairs import pair_folder

    return pair_folder(pair).is_dir()


@scenarios.command("list", cls=Command, epilog=examples("nwor-bench scenarios list"))
@with_flags()
def list_scenarios(options: Shown) -> None:
    """List the shipped scenarios."""
    from nwor_bench.workload.config import load_scenario, scenario_names

    shipped = [load_scenario(name) for name in scenario_names()]
    if options.as_json:
        tell_json({"scenarios": list(map(_scenario_facts, shipped))})
    elif options.quiet:
        typer.echo("\n".join(scenario.name for scenario in shipped))
    else:
        _print_scenarios(shipped)


def _print_scenarios(shipped: "list[Scenario]") -> None:
    headers = ["name", "requests", "batches", "drafts", "new tokens", "temp", "max len", "prompts"]
    rows = []
    for s in shipped:
        numbers = (s.requests, s.batches, s.draft_tokens, s.max_new_tokens, s.temperature)
        rows.append((s.name, *map(str, (*numbers, s.max_model_len, _number_of_prompts(s)))))
    print_table(headers, rows, numbers_from=1)


def _scenario_facts(scenario: "Scenario") -> "dict[str, Any]":
    """A scenario's fields, and how many prompts it has."""
    fields = scenario.model_dump(mode="json")
    return {**fields, "number_of_prompts": _number_of_prompts(scenario)}


def _number_of_prompts(scenario: "Scenario") -> int:
    from nwor_bench.workload.prompts import load_prompts

    return len(load_prompts(scenario))
