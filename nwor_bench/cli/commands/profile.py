"""`nwor-bench profile`: a sweep under Nsight Compute or Nsight Systems."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nwor_bench.cli.command import Command, CommandGroup, examples, tell_json
from nwor_bench.cli.flags import AsJson, Quiet, with_flags
from nwor_bench.instruments.nvtx_ranges import HarnessRange
from nwor_bench.workload.options import Option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nwor_bench.instruments.nsight import Profiler

app = typer.Typer(
    cls=CommandGroup,
    help="Run a sweep under one of NVIDIA's profilers: profile ncu -- sweep ...",
    no_args_is_help=True,
)

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

DryRun = Annotated[bool, Option("Print the command line and stop.")]
Report = Annotated[Path, Option("The report's path without its ending.")]


@dataclass(frozen=True)
class NcuOptions:
    """The windows to measure, and where the report goes."""

    # fmt: off
    windows: Annotated[int, Option("Windows to measure.")] = 20
    skip: Annotated[int, Option(
        "Windows before them: warm-up and gate (see windows.csv).",
    )] = 100
    # fmt: on
    report: Report = Path("nwor-ncu")
    dry_run: DryRun = False
    as_json: AsJson = False
    quiet: Quiet = False


@dataclass(frozen=True)
class NsysOptions:
    """The range to capture, and where the report goes."""

    # fmt: off
    capture: Annotated[HarnessRange, Option(
        "Capture the first of these: sweep, block, cell or batch.",
    )] = "block"
    # fmt: on
    report: Report = Path("nwor-nsys")
    dry_run: DryRun = False
    as_json: AsJson = False
    quiet: Quiet = False


@app.command(
    "ncu",
    cls=Command,
    context_settings=PASSED_ON,
    epilog=examples("nwor-bench profile ncu --windows 10 -- sweep --pair smollm2"),
)
@with_flags()
def ncu(context: typer.Context, options: NcuOptions) -> None:
    """DRAM and L2 counters of chosen windows, by Nsight Compute: profile ncu -- sweep ...

    Each window is measured as one range; the sweep runs once per counter pass,
    with an eager engine (enforce_eager).
    """
    from nwor_bench.instruments import nsight

    nsight.check_is_sweep(
        context.args, ("--output", "--resume", "--file"), "the sweep is run once a pass, each in "
        "a folder of its own under runs/; leave it out"
    )  # fmt: skip
    report = nsight.without_ending(nsight.NCU, options.report)
    arguments = nsight.ncu_options(report, options.windows, options.skip)
    command = nsight.in_eager_mode(context.args)
    _profile(nsight.NCU, [*arguments, *nsight.PROGRAM, *command], report, options)


@app.command(
    "nsys",
    cls=Command,
    context_settings=PASSED_ON,
    epilog=examples("nwor-bench profile nsys --capture block -- sweep --pair smollm2"),
)
@with_flags()
def nsys(context: typer.Context, options: NsysOptions) -> None:
    """A timeline of part of a sweep with its windows as NVTX ranges, by Nsight Systems.

    A block runs every cell once, after warm-up and gate; a sweep's first cell and batch
    belong to warm-up. The exit code is the sweep's.
    """
    from nwor_bench.instruments import nsight

    nsight.check_is_sweep(
        context.args, ("--resume", "--file"), "one range of one new run is captured; write that "
        "run's own flags"
    )  # fmt: skip
    report = nsight.without_ending(nsight.NSYS, options.report)
    arguments = nsight.nsys_options(report, options.capture)
    _profile(nsight.NSYS, [*arguments, *nsight.PROGRAM, *context.args], report, options)


def _profile(
    profiler: "Profiler",
    arguments: "Sequence[str]",
    report: Path,
    options: NcuOptions | NsysOptions,
) -> None:
    """Run the profiler, and print the report with the command line that reads it."""
    from nwor_bench.instruments.nsight import find_tool, run_profile

    if options.dry_run:
        line = shlex.join([profiler.name, *arguments])
        if options.as_json:
            tell_json({"command": line})
        else:
            typer.echo(line)
        return
    tool, _ = find_tool(profiler)
    command = [str(tool), *arguments]
    code, written = run_profile(
        profiler, command, report, stdout_free=options.as_json or options.quiet
    )
    line = shlex.join([*profiler.reads, str(written)])
    if options.as_json:
        tell_json({"report": str(written), profiler.read_key: line})
    else:
        typer.echo(str(written) if options.quiet else f"Report: {written} (to read it: {line})")
    if code:
        raise typer.Exit(code)
