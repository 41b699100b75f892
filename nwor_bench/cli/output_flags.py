"""The flags of commands that print one result: all of it, its core, or one JSON document."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from nwor_bench.errors import ConfigError
from nwor_bench.records.files import result_document

AsJson = Annotated[
    bool, typer.Option("--json", help="Print only the result, as JSON (docs/json.md).")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the answer.")]


PRINTED = Path("-")
"""A file's path that means stdout."""

_CHOOSING = {
    "as_json": "--json",
    "json": "--json",
    "markdown": "--markdown",
    "quiet": "--quiet",
    "verbose": "--verbose",
}
"""Flags that choose what is printed, by parameter; a flag that takes a file chooses with `-`."""


def check_one_choice(values: Mapping[str, Any]) -> None:
    """Raise ConfigError if two of a command's parameters choose what is printed.

    --quiet may stand beside --json, which prints nothing else anyway.
    """
    given = {
        flag: values[name]
        for name, flag in _CHOOSING.items()
        if values.get(name) in (True, PRINTED, str(PRINTED))
    }
    if len(given) > 1 and given.keys() != {"--json", "--quiet"}:
        (first, value), (second, _) = list(given.items())[:2]
        remedy = f"{second} chooses what is printed too; give one of the two"
        raise ConfigError.for_field(first, True if value is True else str(PRINTED), remedy)


def tell_json(content: Mapping[str, Any]) -> None:
    """Print one JSON document, headed by its version and ours."""
    typer.echo(result_document(content), nl=False)
