"""Calls of nwor-bench that an example holds, without running them."""

import typer

from nwor_bench.cli import app as cli


def parse(arguments: list[str]) -> str:
    """Have the real command line parse a call without running it; returns the command."""
    group = typer.main.get_command(cli.app)
    context = group.make_context("nwor-bench", list(arguments))
    rest = [*context._protected_args, *context.args]
    name, command, rest = group.resolve_command(context, rest)
    command.make_context(name, rest, parent=context)
    return name
