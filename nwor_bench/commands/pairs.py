"""nwor-bench pairs list | show | fetch."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from nwor_bench.pairs import ModelPair
    from nwor_bench.pairs.model import ShapeSource

app = typer.Typer(help="Model pairs: which there are, and making one ready.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="A pair's name, or the path of a pair's .toml file.")]


@app.command("list")
def list_pairs() -> None:
    """List the pairs that come with nwor-bench."""
    from rich.console import Console
    from rich.table import Table

    from nwor_bench.pairs import DEFAULT_PAIR, load_pair, pair_names

    table = Table("pair", "drafts by", "dtype", "ready", "what it is")
    for name in pair_names():
        pair = load_pair(name)
        label = f"{name} (default)" if name == DEFAULT_PAIR else name
        ready = "yes" if _is_ready(pair) else "no"
        weights = "; no weights" if pair.shape is not None else ""
        table.add_row(label, pair.method, pair.dtype, ready, f"{pair.description}{weights}")
    Console().print(table)


@app.command()
def show(name: Name) -> None:
    """Show where a pair comes from and how it drafts."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from nwor_bench.pairs import load_pair

    pair = load_pair(name)
    fields = pair.model_dump(exclude={pair.source, "speculative"}, exclude_none=True)
    table = Table(show_header=False)
    table.add_column("field", no_wrap=True)
    table.add_column("value", overflow="fold")  # a checksum or a path is never cut short
    for key, value in fields.items():
        table.add_row(key, escape(str(value)))
    source = getattr(pair, pair.source).model_dump(exclude_none=True)
    for group, values in (("speculative", pair.speculative), (pair.source, source)):
        for key, value in _rows(group, values):
            table.add_row(key, escape(str(value)))
    if pair.shape is not None:
        for key, value in _without_weights(pair.shape):
            table.add_row(key, value)
    if (folder := _cached_folder(pair)) is not None:
        table.add_row("ready", f"yes, in {folder}" if folder.is_dir() else f"no ({folder})")
    Console().print(table)


@app.command()
def fetch(name: Name = "smollm2") -> None:
    """Download or generate a pair, once; later calls find it in the cache."""
    from rich.console import Console

    from nwor_bench.pairs import fetch_pair, load_pair

    pair = load_pair(name)
    was_ready = _is_ready(pair)
    console = Console()
    if console.is_terminal:
        with console.status(f"{name}: starting") as status:
            resolved = fetch_pair(pair, progress=lambda step: status.update(f"{name}: {step}"))
    else:
        resolved = fetch_pair(pair, progress=lambda step: typer.echo(f"{name}: {step}"))
    # typer.echo, not rich: a path must stay in one line to be copied.
    typer.echo(f"{pair.name}: {'already there' if was_ready else 'ready'}")
    typer.echo(f"target: {resolved.target}")
    typer.echo(f"drafter: {resolved.draft or 'none (prompt lookup)'}")
    if resolved.load_format is not None:
        from nwor_bench.pairs.shape import WITHOUT_WEIGHTS

        typer.echo(f"weights: {WITHOUT_WEIGHTS}")


def _rows(group: str, values: "dict[str, Any]") -> "Iterator[tuple[str, Any]]":
    """One row a value, and one for each entry of a config.json that stands in the pair."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{group}.{key}.{entry}", inner) for entry, inner in value.items())
        else:
            yield f"{group}.{key}", value


def _without_weights(shape: "ShapeSource") -> "Iterator[tuple[str, str]]":
    from nwor_bench.pairs.shape import WITHOUT_WEIGHTS, shape_parameters

    yield "weights", WITHOUT_WEIGHTS
    for name, config in (("target", shape.target), ("draft", shape.draft)):
        if config is not None:
            millions = shape_parameters(config, f"shape.{name}") / 1e6
            yield f"{name} parameters", f"about {millions:,.0f} million"


def _cached_folder(pair: "ModelPair") -> "Path | None":
    """The pair's place in the cache; None for models that the user keeps elsewhere."""
    from nwor_bench.pairs import pair_folder

    return None if pair.source == "folder" else pair_folder(pair)


def _is_ready(pair: "ModelPair") -> bool:
    folder = _cached_folder(pair)
    return folder is None or folder.is_dir()
