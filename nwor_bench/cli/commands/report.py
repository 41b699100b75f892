"""`nwor-bench report FOLDER`: rebuild the reports of a run or a sweep from its records."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from nwor_bench.cli.flags import AsJson, with_flags
from nwor_bench.errors import StoreError, worst_of
from nwor_bench.run.run_options import RunOptions
from nwor_bench.workload.options import Option


@dataclass(frozen=True)
class ReportOptions:
    """What is printed."""

    quiet: Annotated[bool, Option("Print only the answer and the folder.", aliases=("-q",))] = False
    as_json: AsJson = False
    verbose: Annotated[bool, Option("Show all details.", aliases=("-v",))] = False


@with_flags()
def report(
    run: Annotated[
        Path, typer.Argument(help="A run or sweep folder, or a folder of run folders.")
    ],
    options: ReportOptions,
) -> None:  # fmt: skip
    """Rebuild all reports of RUN from its records, and show its cells.

    For a sweep folder, or a folder of runs: its summary.html, summary.md and summary.csv.
    Exits with 3 if a cell is INVALID, with 5 if no cell did anything.
    """
    from nwor_bench.records.files import RECORDS_FILE, RUN_FILE, SWEEP_FILE
    from nwor_bench.records.store import read_run
    from nwor_bench.records.types import RunStatus

    shown = RunOptions(quiet=options.quiet, as_json=options.as_json, verbose=options.verbose)
    if not (run / RUN_FILE).is_file() and (
        (run / SWEEP_FILE).is_file() or any(run.glob(f"*/{RUN_FILE}"))
    ):
        raise typer.Exit(_report_sweep(run, shown))
    data = read_run(run)
    if data.header.status is RunStatus.COMPLETE and not data.batches:
        raise StoreError.at(
            run / RECORDS_FILE,
            f"holds no batch, but {RUN_FILE} says that the run is complete; "
            "restore it: reports from it would replace the run's tables with empty ones",
        )
    from rich.console import Console

    from nwor_bench.analysis.analyse import analyse
    from nwor_bench.report.load import write_files
    from nwor_bench.report.run_report import exit_code_of
    from nwor_bench.run.progress import tell_result

    analysis = analyse(data)
    write_files(run, analysis)
    tell_result(Console(), shown, analysis, run, in_sweep=False)
    raise typer.Exit(exit_code_of(analysis))


def _report_sweep(folder: Path, options: RunOptions) -> int:
    """Rebuild the summary of several runs; the reports of its runs stay as they are."""
    from nwor_bench.run.sweep_folder import INDEX_FILE, SweepIndex

    of_sweep = (folder / INDEX_FILE).is_file()
    index = SweepIndex.open(folder) if of_sweep else SweepIndex.of_runs(folder)
    index.check_readable()
    from rich.console import Console

    from nwor_bench.report.run_report import exit_code_of
    from nwor_bench.report.sweep import swept_check
    from nwor_bench.run.sweep_summary import tell_sweep

    runs = tell_sweep(Console(), options, index)
    begun = [run.analysis for run in runs if run.analysis and (run.cells or swept_check(runs))]
    return worst_of(map(exit_code_of, begun))
