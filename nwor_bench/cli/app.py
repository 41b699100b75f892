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
    live,
    pairs,
    plan,
    profile,
    report,
    supports,
    sweep,
    worth,
)
from nwor_bench.errors import BenchError, ConfigError, DeviceDiedError, ExitCode


class _Commands(CommandGroup):
    """Prints a message when a command is interrupted by Ctrl-C."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.secho("nwor-bench: interrupted", fg="red", err=True)
            raise typer.Exit(ExitCode.INTERRUPTED) from None


app = typer.Typer(
    cls=_Commands,
    help="What happens to the KV cache in speculative decoding, measured on stock vLLM.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_EXAMPLES: dict[Callable[..., None], tuple[str, ...]] = {
    sweep.sweep: (
        "nwor-bench sweep",
        "nwor-bench sweep --model FOLDER --draft-model FOLDER --method eagle3",
        "nwor-bench sweep --prompts mine.jsonl --num-prompts 64 --ci-width 0.5%",
        "nwor-bench sweep --file quick",
    ),
    worth.worth: (
        "nwor-bench worth",
        "nwor-bench worth --model FOLDER --method mtp --requests 1,8,32,128 --max-draft-tokens 8",
    ),
    check.check: (
        "nwor-bench check",
        "nwor-bench check FOLDER --method mtp --requests 1,32 --prompts mine.jsonl",
        "nwor-bench check FOLDER --draft-model FOLDER --method eagle3 --dtype float32",
    ),
    report.report: ("nwor-bench report runs/first", "nwor-bench report runs/first --json"),
    compare.compare: ("nwor-bench compare runs/before runs/after --threshold 2%",),
    plan.plan: (
        "nwor-bench plan --config config.json",
        "nwor-bench plan --config config.json --num-prompts 64 --acceptance 60%",
    ),
    supports.supports: (
        "nwor-bench supports config.json",
        "nwor-bench supports openai/gpt-oss-20b --device blackwell",
    ),
    doctor.doctor: ("nwor-bench doctor", "nwor-bench doctor --no-engine --json"),
    kernels.kernels: ("nwor-bench kernels", "nwor-bench kernels --kernels commit --ci-width 2%"),
    live.live: (
        "nwor-bench live http://localhost:8000",
        "nwor-bench live http://localhost:8000 --num-reqs 5-8 --ci-width 0.3%",
    ),
}
for _command, _lines in _EXAMPLES.items():
    app.command(cls=Command, epilog=examples(*_lines))(_command)
app.add_typer(profile.app, name="profile")
app.add_typer(pairs.pairs, name="pairs")
app.add_typer(pairs.scenarios, name="scenarios")


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
    """What happens to the KV cache in speculative decoding, measured on stock vLLM."""


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
