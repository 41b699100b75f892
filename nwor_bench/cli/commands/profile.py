"""`nwor-bench profile`: a sweep under Nsight Compute or Nsight Systems."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nwor_bench.cli.command import AsJson, Command, Group, Quiet, examples, tell_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nwor_bench.instruments.nsight.ncu import NcuWindow
    from nwor_bench.report.document import Table

app = typer.Typer(
    cls=Group,
    help="Run a sweep under one of NVIDIA's profilers: profile ncu -- sweep ...",
    no_args_is_help=True,
)

UNITS = {"bytes": ("MB", 1e6), "ns": ("ms", 1e6)}
"""Larger units for the terminal."""

WHOLE = 10_000
"""Numbers from here on have no decimals on the terminal."""

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
    read: Annotated[Path | None, typer.Option(help="Read this report and run nothing.")] = None,
    run: Annotated[
        Path | None, typer.Option(help="With --read: the run folder, to name the windows' cells.")
    ] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """DRAM and L2 counters of chosen windows, by Nsight Compute: profile ncu -- sweep ...

    Each window is measured as one range; the sweep runs once per counter pass.
    """
    from nwor_bench.errors import ConfigError
    from nwor_bench.instruments.nsight.ncu import (
        REPORT,
        graph_warning,
        ncu_command,
        run_profile,
    )
    from nwor_bench.instruments.nsight.tools import check_version, find_tool, without_ending

    _check_read(read, context)
    report = without_ending(report, REPORT)
    if run is not None and read is None:
        raise ConfigError.for_field("--run", str(run), "leave it out: the run made here is found")
    if dry_run:
        _print_command(ncu_command(Path("ncu"), context.args, report, windows, skip), as_json)
        _warn(graph_warning(context.args))
        return
    if read is None:
        tool = find_tool("ncu")
        command = ncu_command(tool, context.args, report, windows, skip)
        check_version("ncu", tool)
        _warn(graph_warning(context.args))
        read, run = run_profile(command, report, stdout_free=as_json or quiet)
        again = ["nwor-bench", "profile", "ncu", "--read", str(read)]
        again += [] if run is None else ["--run", str(run)]
        typer.echo(f"Report: {read} (again: {shlex.join(again)})", err=True)
    _read_ncu(read, run, as_json=as_json, quiet=quiet)


def _read_ncu(report: Path, run: Path | None, *, as_json: bool, quiet: bool) -> None:
    """Write and print the windows of a report, with their cells if the run is known."""
    from nwor_bench.errors import ConfigError
    from nwor_bench.instruments.nsight.ncu import (
        TABLE,
        cells_of,
        load_module,
        read_report,
        warmup_warning,
        write_table,
    )
    from nwor_bench.instruments.nsight.tools import look_for_tool
    from nwor_bench.records.store import read_run

    if not report.is_file():
        raise ConfigError.at(f"profile ncu: {report}", "there is no such file")
    data = None if run is None else read_run(run)
    cells = {} if data is None else cells_of(data)
    windows = read_report(report, load_module(look_for_tool("ncu")), cells)
    file = report.with_suffix(TABLE)
    write_table(file, windows)
    if as_json:
        tell_json({"table": str(file), "windows": [window.row() for window in windows]})
    elif quiet:
        typer.echo(str(file))
    else:
        from rich.console import Console

        from nwor_bench.report.document import Document
        from nwor_bench.report.terminal import print_document

        title = "Windows by Nsight Compute, means"
        print_document(Console(), Document(title, (means_table(title, windows),)))
    _warn(None if data is None else warmup_warning(windows, data))


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
    stats = shlex.join(stats_command(written))
    if as_json:
        tell_json({"report": str(written), "stats": stats})
    else:
        typer.echo(str(written) if quiet else f"Report: {written} (GPU time by range: {stats})")
    if code:
        raise typer.Exit(code)


def _print_command(command: "Sequence[str]", as_json: bool) -> None:
    """Print the command line of a dry run."""
    line = shlex.join(command)
    if as_json:
        tell_json({"command": line})
    else:
        typer.echo(line)


def means_table(title: str, windows: "Sequence[NcuWindow]") -> "Table":
    """Means over each cell's windows: a row per counter, a column per cell."""
    from statistics import fmean

    from nwor_bench.instruments.nsight.ncu import METRICS
    from nwor_bench.report.document import table
    from nwor_bench.report.text import decimal

    cells = {w.cell: [o for o in windows if o.cell == w.cell] for w in windows}
    rows = [("windows", *(str(len(own)) for own in cells.values()))]
    for name in METRICS:
        plain, unit = name.rsplit("_", 1)
        shown, size = UNITS.get(unit, (unit, 1.0))
        known = [[v for w in own if (v := w.values[name]) is not None] for own in cells.values()]
        means = [fmean(values) / size if values else None for values in known]
        digits = 0 if any((mean or 0) >= WHOLE for mean in means) else 3
        label = f"{plain} {shown}".replace("_", " ")
        rows.append((label, *(decimal(mean, digits) for mean in means)))
    return table(("", *(str(cell or "") for cell in cells)), rows, caption=title)


_WITH_READ = ("read", "run", "as_json", "quiet")
"""Options that have an effect if --read runs nothing."""


def _check_read(read: Path | None, context: typer.Context) -> None:
    """Raise ConfigError for a sweep or an option that --read would ignore."""
    from nwor_bench.errors import ConfigError

    if read is None:
        return
    sources = {name: context.get_parameter_source(name) for name in context.params}
    written = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    given = [f"--{name.replace('_', '-')}" for name in written if name not in _WITH_READ]
    if ignored := shlex.join([*given, *context.args]):
        raise ConfigError.for_field(
            "profile", ignored, f"--read {read} runs nothing; leave out one of them"
        )


def _warn(sentence: str | None) -> None:
    if sentence is not None:
        typer.secho(f"nwor-bench: {sentence}", fg="yellow", err=True)
