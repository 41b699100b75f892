"""`nwor-bench profile`: a sweep under Nsight Compute or Nsight Systems, and its windows."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nwor_bench.cli.command import AsJson, Command, Group, Quiet, examples, tell_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nwor_bench.report.document import Table

    Rows = Sequence[Mapping[str, Any]]

app = typer.Typer(
    cls=Group,
    help="Run a sweep under one of NVIDIA's profilers: profile ncu -- sweep ...",
    no_args_is_help=True,
)

UNITS = {"_bytes": ("_MB", 1e6), "_ns": ("_ms", 1e6)}
"""Larger units for the terminal."""

WHOLE = 10_000
"""Numbers from here on have no decimals on the terminal."""

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the command line and stop.")]
Report = Annotated[
    Path, typer.Option(help="The report's path without its ending; tables go beside it.")
]
Read = Annotated[Path | None, typer.Option(help="Read this report (or export) and run nothing.")]


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
    read: Read = None,
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
    from nwor_bench.instruments.nsight.ncu_profile import (
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
    shown = _Shown(as_json, quiet)
    if dry_run:
        shown.commands([ncu_command(Path("ncu"), context.args, report, windows, skip)])
        _warn(graph_warning(context.args))
        return
    if read is None:
        tool = find_tool("ncu")
        command = ncu_command(tool, context.args, report, windows, skip)
        check_version("ncu", tool)
        _warn(graph_warning(context.args))
        read, run = run_profile(command, report, stdout_free=shown.is_short)
        again = ["nwor-bench", "profile", "ncu", "--read", str(read)]
        again += [] if run is None else ["--run", str(run)]
        typer.echo(f"Report: {read} (again: {shlex.join(again)})", err=True)
    _tell_ncu(read, run, shown)


def _tell_ncu(report: Path, run: Path | None, shown: "_Shown") -> None:
    """Write and print the windows of a report, with their cells if the run is known."""
    from nwor_bench.errors import ConfigError
    from nwor_bench.instruments.nsight.ncu_read import (
        cells_of,
        load_module,
        read_report,
        warmup_warning,
    )
    from nwor_bench.instruments.nsight.tools import TABLE, look_for_tool, write_table
    from nwor_bench.records.store import read_run

    if not report.is_file():
        raise ConfigError.at(f"profile ncu: {report}", "there is no such file")
    data = None if run is None else read_run(run)
    cells = {} if data is None else cells_of(data)
    windows = read_report(report, load_module(look_for_tool("ncu")), cells)
    rows = [window.row() for window in windows]
    write_table(report.with_suffix(TABLE), rows)
    shown.windows("Windows by Nsight Compute, means", rows, rows, report.with_suffix(TABLE))
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
    gpu_metrics: Annotated[
        bool, typer.Option("--gpu-metrics", help="Sample GPU metrics too.")
    ] = False,
    report: Report = Path("nwor-nsys"),
    read: Read = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Launches, waits, idle time and bandwidth of each window, by Nsight Systems.

    A block runs every cell once, after warm-up and gate; a sweep's first cell and batch
    belong to warm-up. The exit code is the sweep's.
    """
    from nwor_bench.errors import ConfigError
    from nwor_bench.instruments.nsight.nsys_profile import (
        EXPORT,
        REPORT,
        export_command,
        export_of,
        nsys_command,
        run_profile,
    )
    from nwor_bench.instruments.nsight.tools import check_version, ending, find_tool, without_ending
    from nwor_bench.instruments.nvtx_ranges import HARNESS_RANGES

    if capture not in HARNESS_RANGES:
        raise ConfigError.unknown("--capture", capture, HARNESS_RANGES)
    _check_read(read, context)
    report = without_ending(report, REPORT)
    code, written = 0, ending(report, REPORT)
    shown = _Shown(as_json, quiet)
    if dry_run:
        tool = Path("nsys")
        profiling = nsys_command(tool, context.args, report, capture, gpu_metrics)
        shown.commands([profiling, export_command(tool, written, ending(report, EXPORT))])
        return
    if read is None:
        tool = find_tool("nsys")
        command = nsys_command(tool, context.args, report, capture, gpu_metrics)
        check_version("nsys", tool)
        code = run_profile(command, report, capture, stdout_free=shown.is_short)
    _tell_nsys(export_of(read or written, stdout_free=shown.is_short), shown)
    if code:
        raise typer.Exit(code)


def _tell_nsys(export: Path, shown: "_Shown") -> None:
    """Write the windows of an export, print their means by cell, and warn of missing data."""
    from nwor_bench.instruments.nsight import nsys_windows
    from nwor_bench.instruments.nsight.nsys_export import read_export
    from nwor_bench.instruments.nsight.tools import TABLE, write_table

    found = read_export(export)
    windows = nsys_windows.windows_of(found)
    every = [window.row() for window in windows]
    write_table(export.with_suffix(TABLE), every)
    _warn(nsys_windows.nothing_of_the_gpu(found))
    _warn(nsys_windows.lost_calls(found, windows))
    _warn(nsys_windows.nothing_settled(windows))
    settled = [window.row() for window in nsys_windows.settled(windows)]
    title = "Windows by Nsight Systems, steady-state means"
    shown.windows(title, settled, every, export.with_suffix(TABLE))


@dataclass(frozen=True)
class _Shown:
    """What a profile prints."""

    as_json: bool
    quiet: bool

    @property
    def is_short(self) -> bool:
        """True if the sweep's own output goes to stderr."""
        return self.as_json or self.quiet

    def commands(self, commands: "Sequence[Sequence[str]]") -> None:
        """Print the command lines of a dry run."""
        lines = [shlex.join(command) for command in commands]
        if self.as_json:
            tell_json({"commands": lines})
        else:
            typer.echo("\n".join(lines))

    def windows(self, title: str, counted: "Rows", every: "Rows", file: Path) -> None:
        """Print means over the counted windows; only the file's path if quiet; as JSON all rows."""
        if self.as_json:
            tell_json({"table": str(file), "windows": [dict(row) for row in every]})
        elif self.quiet:
            typer.echo(str(file))
        else:
            from rich.console import Console

            from nwor_bench.report.document import Document
            from nwor_bench.report.terminal import print_document

            table = means_table(title, counted, [row.get("cell") for row in every])
            print_document(Console(), Document(title, (table,)))


def means_table(title: str, counted: "Rows", cells: "Iterable[str | None]") -> "Table":
    """Means over each cell's windows: a row per measure, a column per cell.

    Cells without a counted window have columns too.
    """
    from nwor_bench.instruments.nsight.tools import by_cell, columns_of
    from nwor_bench.report.document import table

    means = by_cell(counted, cells)
    names = [name for name in columns_of(means) if name != "cell"]
    rows = [_measure(name, [mean[name] for mean in means]) for name in names]
    return table(("", *(str(mean["cell"] or "") for mean in means)), rows, caption=title)


def _measure(name: str, values: "Sequence[float | None]") -> tuple[str, ...]:
    """A measure's name and values in the terminal's unit."""
    from nwor_bench.report.text import decimal

    size = 1.0
    for unit, (larger, times) in UNITS.items():
        if name.endswith(unit):
            name, size = name.removesuffix(unit) + larger, times
    scaled = [None if value is None else value / size for value in values]
    whole = name == "windows" or any(abs(value or 0) >= WHOLE for value in scaled)
    return (name.replace("_", " "), *(decimal(value, 0 if whole else 3) for value in scaled))


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
