"""`nwor-bench pairs list|show|fetch`: model pairs."""

from typing import TYPE_CHECKING, Annotated

import typer

from nwor_bench.cli.command import (
    AsJson,
    Command,
    Group,
    Quiet,
    complete_pairs,
    examples,
    print_table,
    tell_json,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from rich.console import Console

    from nwor_bench.models.pairs import ModelPair, ResolvedPair
    from nwor_bench.models.pairs.pair import ShapeSource

app = typer.Typer(cls=Group, help="Model pairs: list, show, fetch.", no_args_is_help=True)

Name = Annotated[
    str,
    typer.Argument(
        help="A pair's name, or the path of a pair's .toml file.",
        autocompletion=complete_pairs,
    ),
]


@app.command("list", cls=Command, epilog=examples("nwor-bench pairs list"))
def list_pairs(as_json: AsJson = False, quiet: Quiet = False) -> None:
    """List the shipped pairs."""
    from nwor_bench.models.pairs import load_pair, pair_names

    pairs = {name: load_pair(name) for name in pair_names()}
    if as_json:
        tell_json({"pairs": [_facts(name, pair) for name, pair in pairs.items()]})
    elif quiet:
        typer.echo("\n".join(pairs))
    else:
        _print_list(pairs)


def _print_list(pairs: "dict[str, ModelPair]") -> None:
    from nwor_bench.models.pairs import DEFAULT_PAIR

    rows = []
    for name, pair in pairs.items():
        label = f"{name} (default)" if name == DEFAULT_PAIR else name
        ready = "yes" if _is_ready(pair) else "no"
        weights = "; no weights" if pair.shape is not None else ""
        rows.append((label, pair.method, pair.dtype, ready, f"{pair.description}{weights}"))
    print_table(("pair", "drafts by", "dtype", "ready", "description"), rows, numbers_from=5)


@app.command(cls=Command, epilog=examples("nwor-bench pairs show smollm2"))
def show(name: Name, as_json: AsJson = False, quiet: Quiet = False) -> None:
    """Show a pair's source and how it drafts."""
    from nwor_bench.models.pairs import load_pair

    pair = load_pair(name)
    if as_json:
        folder = _cached_folder(pair)
        content = {**pair.model_dump(mode="json", exclude_none=True), **_facts(name, pair)}
        tell_json({"pair": content, "folder": None if folder is None else str(folder)})
    elif quiet:
        typer.echo(f"{pair.name}: {pair.description}")
    else:
        _print_pair(pair)


def _print_pair(pair: "ModelPair") -> None:
    fields = pair.model_dump(exclude={pair.source, "speculative"}, exclude_none=True)
    rows = list(fields.items())
    source = getattr(pair, pair.source).model_dump(exclude_none=True)
    for group, values in (("speculative", pair.speculative), (pair.source, source)):
        rows += _rows(group, values)
    if pair.shape is not None:
        rows += _without_weights(pair.shape)
    if (folder := _cached_folder(pair)) is not None:
        rows.append(("ready", f"yes, in {folder}" if folder.is_dir() else f"no ({folder})"))
    print_table(("field", "value"), [(key, str(value)) for key, value in rows], numbers_from=2)


@app.command(cls=Command, epilog=examples("nwor-bench pairs fetch smollm2"))
def fetch(name: Name = "smollm2", as_json: AsJson = False, quiet: Quiet = False) -> None:
    """Download or generate a pair, unless it is in the cache."""
    from rich.console import Console

    from nwor_bench.models.pairs import load_pair

    pair = load_pair(name)
    was_ready = _is_ready(pair)
    resolved = _fetch(pair, name, Console(), silent=as_json or quiet)
    if as_json:
        tell_json({"pair": pair.name, "was_ready": was_ready, "target": resolved.target,
                   "drafter": resolved.draft, "load_format": resolved.load_format})  # fmt: skip
        return
    # typer.echo, not rich: a path must stay in one line to be copied.
    if not quiet:
        typer.echo(f"{pair.name}: {'already there' if was_ready else 'ready'}")
    typer.echo(f"target: {resolved.target}")
    typer.echo(f"drafter: {resolved.draft or 'none (prompt lookup)'}")
    if resolved.load_format is not None and not quiet:
        from nwor_bench.models.pairs.tiny import WITHOUT_WEIGHTS

        typer.echo(f"weights: {WITHOUT_WEIGHTS}")


def _fetch(pair: "ModelPair", name: str, console: "Console", *, silent: bool) -> "ResolvedPair":
    """The pair, with its steps on the terminal unless `silent`."""
    from nwor_bench.models.pairs import fetch_pair

    if silent:
        return fetch_pair(pair, progress=lambda step: None)
    if console.is_terminal:
        with console.status(f"{name}: starting") as status:
            return fetch_pair(pair, progress=lambda step: status.update(f"{name}: {step}"))
    return fetch_pair(pair, progress=lambda step: typer.echo(f"{name}: {step}"))


def _facts(name: str, pair: "ModelPair") -> "dict[str, Any]":
    """What the list says of a pair."""
    from nwor_bench.models.pairs import DEFAULT_PAIR

    return {
        "name": name,
        "is_default": name == DEFAULT_PAIR,
        "method": pair.method,
        "dtype": pair.dtype,
        "is_ready": _is_ready(pair),
        "has_weights": pair.shape is None,
        "description": pair.description,
    }


def _rows(group: str, values: "dict[str, Any]") -> "Iterator[tuple[str, Any]]":
    """One row per value, and one per entry of a config.json inside the pair."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{group}.{key}.{entry}", inner) for entry, inner in value.items())
        else:
            yield f"{group}.{key}", value


def _without_weights(shape: "ShapeSource") -> "Iterator[tuple[str, str]]":
    from nwor_bench.models.pairs.tiny import WITHOUT_WEIGHTS, shape_parameters

    yield "weights", WITHOUT_WEIGHTS
    for name, config in (("target", shape.target), ("draft", shape.draft)):
        if config is not None:
            millions = shape_parameters(config, f"shape.{name}") / 1e6
            yield f"{name} parameters", f"about {millions:,.0f} million"


def _cached_folder(pair: "ModelPair") -> "Path | None":
    """The pair's folder in the cache; None for a pair of the user's own folders."""
    from nwor_bench.models.pairs import pair_folder

    return None if pair.source == "folder" else pair_folder(pair)


def _is_ready(pair: "ModelPair") -> bool:
    folder = _cached_folder(pair)
    return folder is None or folder.is_dir()
