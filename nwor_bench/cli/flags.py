"""Flags of a command, made from the options that its classes declare (`workload.options`)."""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import is_dataclass
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from nwor_bench.workload.options import (
    Declared,
    Option,
    Panel,
    bare,
    declared,
    names,
    read_all,
)

Quiet = Annotated[bool, Option("Print only the answer.", aliases=("-q",))]
AsJson = Annotated[bool, Option("Print only the result, as JSON (docs/json.md).", name="json")]

CommandFunction = Callable[..., None]


def with_flags(
    *holders: type, only: Collection[str] | None = None
) -> Callable[[CommandFunction], CommandFunction]:
    """Give a command the flags of these classes' options; it takes their values as keywords.

    Parameters whose class is a dataclass give it flags too; it takes objects of these classes. With
    `only` it gets the flags of these names.
    """

    def add(command: CommandFunction) -> CommandFunction:
        signature = inspect.signature(command)
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        read: dict[str, Any] = {
            p.name: p.annotation for p in parameters if is_dataclass(p.annotation)
        }

        @wraps(command)
        def call(**given: Any) -> None:
            objects = {}
            for name, holder in read.items():
                flags = {flag: given.pop(flag) for flag in of_holders(given, holder)}
                objects[name] = holder(**read_all(holder, flags))
            command(**objects, **given)

        kept = [p for p in parameters if p.name not in read]
        every = _by_panel(*read.values(), *holders)
        kept += [_parameter(each) for each in every if only is None or each.name in only]
        call.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return call

    return add


def _by_panel(*holders: type) -> list[Declared]:
    options = [entry for holder in holders for entry in declared(holder) if entry.option.has_flag]
    return sorted(options, key=lambda entry: list(Panel).index(entry.option.panel))


def _parameter(entry: Declared) -> inspect.Parameter:
    """What typer reads a flag from."""
    option, default = entry.option, _text(entry.written_default)
    kind = bare(entry.written)
    kind = kind if kind in (bool, int, float, str, Path, list[str]) else str
    flag = typer.Option(
        entry.flag,
        *option.aliases,
        help=option.help,
        envvar=option.flag_variable,
        metavar="<str>" if kind == list[str] else None,
        rich_help_panel=None if option.panel is Panel.GENERAL else option.panel.value,
    )
    return inspect.Parameter(
        entry.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind if default is not None else kind | None, flag],
    )


def _text(default: Any) -> Any:
    """A default as the command line writes it; an empty object is left out."""
    if isinstance(default, tuple):
        return ",".join(map(str, default))
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
    """A command's flags that these classes declare."""
    wanted = [name for holder in holders for name in names(declared(holder))]
    return {name: flags[name] for name in wanted if name in flags}
