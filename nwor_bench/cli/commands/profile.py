"""`nwor-bench profile`: a sweep under Nsight Compute or Nsight Systems."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nwor_bench.cli.command import AsJson, Command, Group, Quiet, examples, tell_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nwor_bench.instruments.nsight import Profiler

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

    Each window is measured as one range; the sweep runs once per counter pass,
    with an eager engine (enforce_eager).
    """
    from nwor_bench.instruments import nsight

    nsight.check_is_sweep(
        context.args, ("--output", "--resume", "--file"), "the sweep is run once a pass, each in "
        "a folder of its own under runs/; leave it out"
    )  # fmt: skip
    report = nsight.without_ending(nsight.NCU, report)
    options = nsight.ncu_options(report, windows, skip)
    command = nsight.in_eager_mode(context.args)
    _profile(nsight.NCU, [*options, *nsight.PROGRAM, *command], report,
             dry_run=dry_run, as_json=as_json, quiet=quiet)  # fmt: skip


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
    from nwor_bench.instruments import nsight
    from nwor_bench.instruments.nvtx_ranges import HARNESS_RANGES

    if capture not in HARNESS_RANGES:
        raise ConfigError.unknown("--capture", capture, HARNESS_RANGES)
    nsight.check_is_sweep(
        context.args, ("--resume", "--file"), "one range of one new run is captured; write that "
        "run's own flags"
    )  # fmt: skip
    report = nsight.without_ending(nsight.NSYS, report)
    options = nsight.nsys_options(report, capture)
    _profile(nsight.NSYS, [*options, *nsight.PROGRAM, *context.args], report,
             dry_run=dry_run, as_json=as_json, quiet=quiet)  # fmt: skip


def _profile(
    profiler: "Profiler", arguments: "Sequence[str]", report: Path,
    *, dry_run: bool, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Run the profiler, and print the report with the command line that reads it."""
    from nwor_bench.instruments.nsight import find_tool, run_profile

    if dry_run:
        line = shlex.join([profiler.name, *arguments])
        if as_json:
            tell_json({"command": line})
        else:
            typer.echo(line)
        return
    tool, _ = find_tool(profiler)
    command = [str(tool), *arguments]
    code, written = run_profile(profiler, command, report, stdout_free=as_json or quiet)
    line = shlex.join([*profiler.reads, str(written)])
    if as_json:
        tell_json({"report": str(written), profiler.read_key: line})
    else:
        typer.echo(str(written) if quiet else f"Report: {written} (to read it: {line})")
    if code:
        raise typer.Exit(code)
