"""`nwor-bench list`: the pairs and scenarios that ship; fetches a pair too."""

from dataclasses import dataclass
from enum import StrEnum
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from nwor_bench.cli.command import print_table, tell_json
from nwor_bench.cli.flags import AsJson, Quiet, with_flags
from nwor_bench.workload.options import Option
from nwor_bench.workload.run_spec import DEFAULT_PAIR

if TYPE_CHECKING:
    from typing import Any

    from nwor_bench.models.pairs import ModelPair


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
    facts = {kind: _FACTS[kind]() for kind in kinds}
    if options.as_json:
        tell_json({kind.value: facts[kind] for kind in kinds})
        return
    for kind, shipped in facts.items():
        if options.quiet:
            typer.echo("\n".join(each["name"] for each in shipped))
        elif kind is Kind.PAIRS:
            _print_pairs(shipped, short=not what)
        else:
            columns = ("requests", "batches", "draft_tokens", "max_new_tokens", "temperature",
                       "max_model_len", "number_of_prompts")  # fmt: skip
            headers = ("scenario", "requests", "batches", "drafts", "new tokens", "temp",
                       "max len", "prompts")  # fmt: skip
            rows = [(each["name"], *(str(each[name]) for name in columns)) for each in shipped]
            print_table(headers, rows, 1, "Scenarios (--scenario)")
            typer.echo()


def _print_pairs(shipped: "list[dict[str, Any]]", *, short: bool) -> None:
    """Pairs with weights, then shapes; of these `short` prints only the names."""
    weights = [each for each in shipped if each["has_weights"]]
    shapes = [each for each in shipped if not each["has_weights"]]
    rows = [
        (f"{each['name']} (default)" if each["is_default"] else each["name"], each["method"],
         "yes" if each["is_ready"] else "",
         each["description"].split(";")[0] if short else each["description"])
        for each in (weights if short else [*weights, *shapes])
    ]  # fmt: skip
    print_table(("pair", "drafts by", "ready", "description"), rows, 4, "Pairs of models (--pair)")
    names = f" (nwor-bench list pairs): {', '.join(each['name'] for each in shapes)}"
    without = "without weights: vLLM fills in random ones, and a GPU is needed"
    typer.echo(fill(f"Shapes {without}{names if short else ''}.", 80, break_on_hyphens=False))


def _fetch(name: str, options: ListOptions) -> None:
    """Make a pair ready, unless it is in the cache."""
    from nwor_bench.models.pairs import fetch_pair, load_pair

    pair, silent = load_pair(name, "--fetch"), options.as_json or options.quiet
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
    from nwor_bench.models.pairs import load_pair, pair_names

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
        for name, pair in ((name, load_pair(name)) for name in pair_names())
    ]


def _is_ready(pair: "ModelPair") -> bool:
    from nwor_bench.models.pairs import pair_folder

    return pair_folder(pair).is_dir()


def _scenario_facts() -> "list[dict[str, Any]]":
    """Each scenario's fields, and how many prompts it has."""
    from nwor_bench.workload.config import load_scenario, scenario_names
    from nwor_bench.workload.prompts import load_prompts

    return [
        {**each.model_dump(mode="json"), "number_of_prompts": len(load_prompts(each))}
        for each in map(load_scenario, scenario_names())
    ]


_FACTS = {Kind.SCENARIOS: _scenario_facts, Kind.PAIRS: _pair_facts}
