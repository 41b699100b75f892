"""What all commands share: how help reads (flags without a type, aliases in the text, examples at
the end), and that one flag chooses what is printed."""

from typing import Any

from typer.core import TyperCommand, TyperGroup

from nwor_bench.cli.output_flags import check_one_choice


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
