"""`nwor-bench list`: the pairs and scenarios that ship; fetches a pair too."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from nwor_bench.cli.command import print_table, tell_json
from nwor_bench.cli.flags import AsJson, Quiet, with_flags
from nwor_bench.workload.options import Option
from nwor_bench.workload.run_spec import DEFAULT_PAIR

if TYPE_CHECKING:
    from typing import Any

    from nwor_bench.models.pairs import ModelPair
    from nwor_bench.workload.config import Scenario


class Kind(StrEnum):
    """What ships."""

    SCENARIOS = "scenarios"
    PAIRS = "pairs"


@dataclass(frozen=True)
class ListOptions:
    """A pair to fetch, and what is printed."""

    fetch: Annotated[
        str | None,
        Option("Download or generate this pair (a name or .toml file), and print its folders."),
    ] = None
    quiet: Quiet = False
    as_json: AsJson = False


@with_flags()
def list_shipped(
    options: ListOptions,
    what: Annotated[str, typer.Argument(help="scenarios or pairs (default: both).")] = "",
) -> None:
    """The pairs of models and the scenarios (workloads) that ship."""
    if options.fetch is not None:
        _fetch(options.fetch, options)
        return
    from nwor_bench.workload.options import read_as

    kinds = [read_as(Kind, "WHAT", what)] if what else list(Kind)
    if options.as_json:
        tell_json({kind.value: _FACTS[kind]() for kind in kinds})
        return
    for kind in kinds:
        if options.quiet:
            typer.echo("\n".join(each["name"] for each in _FACTS[kind]()))
        else:
            _PRINTED[kind]()


def _pairs() -> "dict[str, ModelPair]":
    from nwor_bench.models.pairs import load_pair, pair_names

    return {name: load_pair(name) for name in pair_names()}


def _print_pairs() -> None:
    """Pairs with weights before shapes."""
    rows = []
    for name, pair in sorted(_pairs().items(), key=lambda each: each[1].shape is not None):
        label = f"{name} (default)" if name == DEFAULT_PAIR else name
        ready = "yes" if _is_ready(pair) else ""
        rows.append((label, pair.method, ready, pair.description))
    print_table(("pair", "drafts by", "ready", "description"), rows, numbers_from=4)
    typer.echo("A shape has no weights: vLLM fills in random ones, and a GPU is needed.")


def _fetch(name: str, options: ListOptions) -> None:
    """Make a pair ready, unless it is in the cache."""
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


def _pair_facts() -> "list[dict[str, Any]]":
    """What the list says of each pair."""
    return [
        {
            "name": name,
            "is_default": name == DEFAULT_PAIR,
            "method": pair.method,
            "dtype": pair.dtype,
            "is_ready": _is_ready(pair),
            "has_weights": pair.shape is None,
            "description": pair.description,
        }
        for name, pair in _pairs().items()
    ]


def _is_ready(pair: "ModelPair") -> bool:
    from nwor_bench.models.pairs import pair_folder

    return pair_folder(pair).is_dir()


def _scenarios() -> "Sequence[Scenario]":
    from nwor_bench.workload.config import load_scenario, scenario_names

    return [load_scenario(name) for name in scenario_names()]


def _print_scenarios() -> None:
    headers = ["scenario", "requests", "batches", "drafts", "new tokens", "temp", "max len"]
    rows = []
    for s in _scenarios():
        numbers = (s.requests, s.batches, s.draft_tokens, s.max_new_tokens, s.temperature)
        rows.append((s.name, *map(str, (*numbers, s.max_model_len, _number_of_prompts(s)))))
    print_table((*headers, "prompts"), rows, numbers_from=1)


def _scenario_facts() -> "list[dict[str, Any]]":
    """Each scenario's fields, and how many prompts it has."""
    return [
        {**each.model_dump(mode="json"), "number_of_prompts": _number_of_prompts(each)}
        for each in _scenarios()
    ]


def _number_of_prompts(scenario: "Scenario") -> int:
    from nwor_bench.workload.prompts import load_prompts

    return len(load_prompts(scenario))


_FACTS = {Kind.SCENARIOS: _scenario_facts, Kind.PAIRS: _pair_facts}
_PRINTED = {Kind.SCENARIOS: _print_scenarios, Kind.PAIRS: _print_pairs}
