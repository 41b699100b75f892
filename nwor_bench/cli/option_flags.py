"""Flags of a command, made from declared options."""

import inspect
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import typer

from nwor_bench.cli.command import complete_pairs, complete_runs, complete_sweeps
from nwor_bench.workload.options import Declared, Panel, bare, declared, names

_COMPLETIONS = {
    "pair": complete_pairs,
    "file": complete_sweeps,
    "resume": complete_runs,
}
"""What the shell offers for an option, by its name."""

Command = TypeVar("Command", bound=Callable[..., None])


def with_flags(*holders: type) -> Callable[[Command], Command]:
    """Give a command the flags of these classes' options; it takes their values as keywords."""
    every = [each for holder in holders for each in declared(holder) if each.option.has_flag]
    options = sorted(every, key=lambda each: list(Panel).index(each.option.panel))

    def add(command: Command) -> Command:
        own = inspect.signature(command)
        kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        flags = [_parameter(option) for option in options]
        command.__signature__ = own.replace(parameters=[*kept, *flags])  # type: ignore[attr-defined]
        return command

    return add


def _parameter(each: Declared) -> inspect.Parameter:
    """What typer reads a flag from."""
    option, default = each.option, _text(each.written_default)
    kind = bare(each.written)
    kind = kind if kind in (bool, int, float, str) else str
    flag = typer.Option(
        each.flag,
        *option.aliases,
        help=option.help,
        envvar=option.flag_variable,
        autocompletion=_COMPLETIONS.get(each.name),
        rich_help_panel=None if option.panel is Panel.GENERAL else option.panel.value,
    )
    return inspect.Parameter(
        each.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind if default is not None else kind | None, flag],
    )


def _text(default: Any) -> Any:
    """A default as the command line writes it; an empty object is left out."""
    if isinstance(default, tuple):
        return ",".join(default)
    if isinstance(default, StrEnum):
        return default.value
    return None if default == {} else default


def written_on(context: typer.Context) -> dict[str, Any]:
    """What was written on the command line, by option name."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {
        name: context.params[name]
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    }


def of_holders(flags: Mapping[str, Any], *holders: type) -> dict[str, Any]:
    """Those of a command's flags that these classes declare."""
    wanted = [name for holder in holders for name in names(declared(holder))]
    return {name: flags[name] for name in wanted if name in flags}
