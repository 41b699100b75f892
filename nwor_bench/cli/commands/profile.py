"""`nwor-bench profile`: a sweep under Nsight Compute or Nsight Systems."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nwor_bench.cli.command import AsJson, Command, Group, Quiet, examples, tell_json

if TYPE_CHECKING:
    from collections.abc import Sequence

app = typer.Typer(
    cls=Group,
    help="Run a sweep under one of NVIDIA's profilers: profile ncu -- sweep ...",
    no_args_is_help=True,
)

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the command line and stop.")]
Report = Annotated[Path, typer.Option(help="The report's path without its ending.")]


@app.command(
    "ncu",
    cls=Command,
    context_settings=PASSED_ON,
    epilog=examples("nwor-bench profile ncu --windows 10 -- sweep --pair smollm2"),
)
def ncu(
    context: typer.Context,
    windows: Annotated[int, typer.Option(help="Windows to measure.")] = 20,
    skip: Annotated[
        int, typer.Option(help="Windows before them: warm-up and gate (see windows.csv).")
    ] = 100,
    report: Report = Path("nwor-ncu"),
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """DRAM and L2 counters of chosen windows, by Nsight Compute: profile ncu -- sweep ...

    Each window is measured as one range; the sweep runs once per counter pass.
    """
    from nwor_bench.instruments.nsight.ncu import (
        REPORT,
        graph_warning,
        ncu_command,
        run_profile,
        values_command,
    )
    from nwor_bench.instruments.nsight.tools import check_version, find_tool, without_ending

    report = without_ending(report, REPORT)
    if dry_run:
        _print_command(ncu_command(Path("ncu"), context.args, report, windows, skip), as_json)
        _warn(graph_warning(context.args))
        return
    tool = find_tool("ncu")
    command = ncu_command(tool, context.args, report, windows, skip)
    check_version("ncu", tool)
    _warn(graph_warning(context.args))
    written = run_profile(command, report, stdout_free=as_json or quiet)
    _print_report(written, ("values", values_command(written)), as_json=as_json, quiet=quiet)


@app.command(
    "nsys",
    cls=Command,
    context_settings=PASSED_ON,
    epilog=examples("nwor-bench profile nsys --capture block -- sweep --pair smollm2"),
)
def nsys(
    context: typer.Context,
    capture: Annotated[
        str, typer.Option(help="Capture the first of these: sweep, block, cell or batch.")
    ] = "block",
    report: Report = Path("nwor-nsys"),
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """A timeline of part of a sweep with its windows as NVTX ranges, by Nsight Systems.

    A block runs every cell once, after warm-up and gate; a sweep's first cell and batch
    belong to warm-up. The exit code is the sweep's.
    """
    from nwor_bench.errors import ConfigError
    from nwor_bench.instruments.nsight.nsys import (
        REPORT,
        nsys_command,
        run_profile,
        stats_command,
    )
    from nwor_bench.instruments.nsight.tools import check_version, find_tool, without_ending
    from nwor_bench.instruments.nvtx_ranges import HARNESS_RANGES

    if capture not in HARNESS_RANGES:
        raise ConfigError.unknown("--capture", capture, HARNESS_RANGES)
    report = without_ending(report, REPORT)
    if dry_run:
        _print_command(nsys_command(Path("nsys"), context.args, report, capture), as_json)
        return
    tool = find_tool("nsys")
    command = nsys_command(tool, context.args, report, capture)
    check_version("nsys", tool)
    code, written = run_profile(command, report, capture, stdout_free=as_json or quiet)
    _print_report(written, ("stats", stats_command(written)), as_json=as_json, quiet=quiet)
    if code:
        raise typer.Exit(code)


def _print_command(command: "Sequence[str]", as_json: bool) -> None:
    """Print the command line of a dry run."""
    line = shlex.join(command)
    if as_json:
        tell_json({"command": line})
    else:
        typer.echo(line)


def _print_report(
    report: Path, reader: "tuple[str, Sequence[str]]", *, as_json: bool, quiet: bool
) -> None:
    """Print the report and the command line that reads it, `reader` with its key in JSON."""
    key, line = reader[0], shlex.join(reader[1])
    if as_json:
        tell_json({"report": str(report), key: line})
    else:
        typer.echo(str(report) if quiet else f"Report: {report} (to read it: {line})")


def _warn(sentence: str | None) -> None:
    if sentence is not None:
        typer.secho(f"nwor-bench: {sentence}", fg="yellow", err=True)
