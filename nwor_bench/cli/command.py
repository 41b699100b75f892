"""Shared by all commands: help texts, output, and the packages that nwor-bench needs."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from nwor_bench.errors import ConfigError
from nwor_bench.records.files import result_document

_CHOOSING = ("json", "markdown", "quiet", "verbose")
"""Parameters that choose what is printed."""


def check_one_choice(values: Mapping[str, Any]) -> None:
    """Raise ConfigError if two flags choose what is printed, except --quiet beside --json."""
    given = [f"--{name}" for name in _CHOOSING if values.get(name)]
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


class CommandGroup(TyperGroup):
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


def print_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int, caption: str
) -> None:
    """Print a table; columns from `numbers_from` on are numbers, which are never cut."""
    from rich.console import Console

    from nwor_bench.report.document import Document, table
    from nwor_bench.report.terminal import print_document

    print_document(Console(), Document("", (table(headers, rows, numbers_from, caption),)))


_MODULES = {"nvidia-ml-py": "pynvml"}
"""Modules of packages that have another name."""


def requirements() -> Iterator[tuple[str, str]]:
    """Each requirement as pip takes it, and the module that it brings; those of extras left out."""
    try:
        lines = requires("nwor-bench") or []
    except PackageNotFoundError:  # run from a checkout that is not installed
        return
    for line in lines:
        requirement, _, marker = line.partition(";")
        if "extra" not in marker:
            (name,) = re.findall(r"^[A-Za-z0-9._-]+", requirement)
            yield requirement.strip(), _MODULES.get(name, name.replace("-", "_"))


def missing_packages() -> dict[str, str]:
    """Requirements whose module cannot be imported, and why."""
    missing = {}
    for requirement, module in requirements():
        try:
            import_module(module)
        except ImportError as error:
            missing[requirement] = str(error)
    return missing


def install_command(missing: Iterable[str]) -> str:
    """The line that installs them."""
    return "pip install " + " ".join(f"'{requirement}'" for requirement in missing)


def missing_module(error: ModuleNotFoundError) -> ConfigError | None:
    """The refusal for a module of one of our requirements; None for any other module."""
    name = (error.name or "").partition(".")[0]
    for requirement, module in requirements():
        if module == name:
            remedy = f"write {install_command([requirement])}; nwor-bench doctor checks all"
            return ConfigError.at(f"package {name}", f"is not installed; {remedy}", joint=" ")
    return None
