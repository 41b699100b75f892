"""The flags of commands that print one result: all of it, its core, or one JSON document."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from nwor_bench.errors import ConfigError
from nwor_bench.records.json_text import result_document

AsJson = Annotated[
    bool, typer.Option("--json", help="Print only the result, as JSON (docs/json.md).")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the answer.")]


def check_json_alone(as_json: bool, others: Mapping[str, bool]) -> None:
    """Raise ConfigError if --json is given beside a flag that prints too; `others` by flag."""
    given = [flag for flag, is_given in others.items() if is_given]
    if as_json and given:
        raise ConfigError.for_field("--json", True, f"{given[0]} prints too; give one of the two")


def tell_json(content: Mapping[str, Any]) -> None:
    """Print one JSON document, headed by its version and ours."""
    typer.echo(result_document(content), nl=False)
