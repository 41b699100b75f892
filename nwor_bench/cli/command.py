"""Shared by all commands: help texts and output."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from nwor_bench.errors import ConfigError
from nwor_bench.records.files import result_document

AsJson = Annotated[
    bool, typer.Option("--json", help="Print only the result, as JSON (docs/json.md).")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the answer.")]

_CHOOSING = ("as_json", "json", "markdown", "quiet", "verbose")
"""Parameters that choose what is printed."""


def check_one_choice(values: Mapping[str, Any]) -> None:
    """Raise ConfigError if two flags choose what is printed, except --quiet beside --json."""
    given = [f"--{name.removeprefix('as_')}" for name in _CHOOSING if values.get(name)]
    if len(given) > 1 and given != ["--json", "--quiet"]:
        remedy = f"{given[1]} chooses what is printed too; give one of the two"
        raise ConfigError.for_field(given[0], True, remedy)


def tell_json(content: Mapping[str, Any]) -> None:
    """Print one JSON document, headed by its version and ours."""
    typer.echo(result_document(content), nl=False)


class Command(TyperCommand):
    """A command whose help fits a narrow terminal."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command, unless two of its flags choose what is printed (ConfigError)."""
        check_one_choice(ctx.params)
        return super().invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        _shorten(self.get_params(ctx))
        super().format_help(ctx, formatter)


class Group(TyperGroup):
    """A group of commands of the same kind."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        _shorten(self.get_params(ctx))
        super().format_help(ctx, formatter)


def _shorten(params: list[Any]) -> None:
    """Show no type of flags, and further names in the text: they would not fit the column."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
        more = [name for name in param.opts if name.startswith("--")][1:]
        if more:
            param.opts = [name for name in param.opts if name not in more]
            param.help = f"{param.help} Also {', '.join(more)}."


def examples(*lines: str) -> str:
    """The end of a command's help."""
    return "\n".join(["Examples:", *(f"  {line}" for line in lines)])


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int) -> None:
    """Print a table; columns from `numbers_from` on are numbers, which are never cut."""
    from rich.console import Console

    from nwor_bench.report.document import Document, table
    from nwor_bench.report.terminal import print_document

    print_document(Console(), Document("", (table(headers, rows, numbers_from),)))
