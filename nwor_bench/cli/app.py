"""The command line: parse, call, print errors. Heavy imports happen inside the commands."""

import errno
import os
import sys
from collections.abc import Callable
from typing import Any

import typer

from nwor_bench import __version__
from nwor_bench.cli.command import Command, CommandGroup, examples, missing_module
from nwor_bench.cli.commands import (
    check,
    compare,
    doctor,
    kernels,
    listing,
    live,
    plan,
    profile,
    report,
    sweep,
    worth,
)
from nwor_bench.errors import BenchError, ConfigError, DeviceDiedError, ExitCode

_MOVED = {
    "supports": "`nwor-bench plan MODEL`",
    "pairs": "`nwor-bench list pairs` or `nwor-bench list --fetch PAIR`",
    "scenarios": "`nwor-bench list scenarios`",
}
"""Names that commands had once, and what to type instead."""


class _Commands(CommandGroup):
    """Prints a message when a command is interrupted by Ctrl-C, and says where one went."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in _MOVED:
            raise ConfigError.at(args[0], f"write {_MOVED[args[0]]}", args[0])
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.secho("nwor-bench: interrupted", fg="red", err=True)
            raise typer.Exit(ExitCode.INTERRUPTED) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_EXAMPLES: dict[Callable[..., None], tuple[str, ...]] = {
    check.check: (
        "nwor-bench check",
        "nwor-bench check FOLDER --method mtp --requests 1,32 --prompts mine.jsonl",
        "nwor-bench check FOLDER --draft-model FOLDER --method eagle3 --dtype float32",
    ),
    worth.worth: (
        "nwor-bench worth",
        "nwor-bench worth --model FOLDER --method mtp --requests 1,8,32,128 --max-draft-tokens 8",
        "nwor-bench worth --model FOLDER --arm eagle3=DRAFTER --arm ngram --requests 1,8,32",
    ),
    sweep.sweep: (
        "nwor-bench sweep",
        "nwor-bench sweep --model FOLDER --draft-model FOLDER --method eagle3",
        "nwor-bench sweep --prompts mine.jsonl --num-prompts 64 --ci-width 0.5%",
        "nwor-bench sweep --file quick",
    ),
    plan.plan: (
        "nwor-bench plan openai/gpt-oss-20b",
        "nwor-bench plan llama-3b-shape --device l4 --requests 64 --acceptance 60%",
    ),
    report.report: ("nwor-bench report runs/first", "nwor-bench report runs/first --json"),
    compare.compare: ("nwor-bench compare runs/before runs/after --threshold 2%",),
    listing.list_shipped: ("nwor-bench list", "nwor-bench list --fetch smollm2"),
    doctor.doctor: ("nwor-bench doctor", "nwor-bench doctor --no-engine --json"),
    kernels.kernels: (
        "nwor-bench kernels --kernels commit --ci-width 2%",
        "nwor-bench kernels --kernels attention --model llama-8b-shape",
    ),
    live.live: (
        "nwor-bench live localhost:8000",
        "nwor-bench live localhost:8000 --num-reqs 5-8 --ci-width 0.3%",
    ),
}
_QUESTIONS = (check.check, worth.worth, sweep.sweep)
"""The first commands of --help."""
for _command, _lines in _EXAMPLES.items():
    app.command(
        "list" if _command is listing.list_shipped else None,
        cls=Command,
        epilog=examples(*_lines),
        rich_help_panel="Three questions" if _command in _QUESTIONS else "More commands",
    )(_command)
app.add_typer(profile.app, name="profile", rich_help_panel="More commands")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nwor-bench {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: bool = typer.Option(
        False,
        "--version",
        "-V",
        help="Show the version and exit.",
        callback=_print_version,
        is_eager=True,
    ),
) -> None:
    """Checks and times speculative decoding in your vLLM."""


def main() -> None:
    """Entry point of `nwor-bench`: prints a BenchError and ends with its exit code."""
    try:
        app(prog_name="nwor-bench")  # also as `python -m nwor_bench`
    except BenchError as error:
        _fail(error)
    except ModuleNotFoundError as error:
        refusal = missing_module(error)
        if refusal is None:
            raise
        _fail(refusal)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        _fail(ConfigError.for_field("path", error.filename, "a name is too long; write another"))


def _fail(error: BenchError) -> None:
    typer.secho(f"nwor-bench: {error}", fg="red", err=True)
    if isinstance(error, DeviceDiedError):  # what PyTorch frees at the end would abort the process
        sys.stdout.flush()
        os._exit(error.exit_code)
    sys.exit(error.exit_code)
