"""`nwor-bench compare BASE NEW`: find regressions of NEW against BASE."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from nwor_bench.cli.flags import AsJson, Quiet, with_flags
from nwor_bench.errors import worst_of
from nwor_bench.workload.options import Option, fraction, quantity

_change = quantity(
    fraction,
    lambda value: 0 < value < 1,
    "write a change between 0 and 100 % such as 1% or 0.01",
)


@dataclass(frozen=True)
class CompareOptions:
    """What is a regression, and what is printed."""

    # fmt: off
    threshold: Annotated[float, Option(
        "Smaller changes are no regression.", shown="1%", read=_change,
    )] = 0.01
    decide_by: Annotated[Literal["ratio", "time"], Option(
        "ratio (to off x off; cancels the machine's drift) or time.",
    )] = "ratio"
    strict: Annotated[bool, Option(
        "End with 5 also if a cell is AMBIGUOUS or only in BASE.",
    )] = False
    force: Annotated[bool, Option("Compare runs of different work or machines too.")] = False
    markdown: Annotated[bool, Option("Print a table for a pull request.")] = False
    # fmt: on
    as_json: AsJson = False
    quiet: Quiet = False


@with_flags()
def compare(
    base: Annotated[
        Path, typer.Argument(help="The run to compare with, or a stored baseline.")
    ],
    new: Annotated[
        Path, typer.Argument(help="The run to check.")
    ],
    options: CompareOptions,
) -> None:  # fmt: skip
    """Compare two runs cell by cell: is NEW slower than BASE, or broken?

    Of two folders of `nwor-bench worth` batch size by batch size.

    Exit codes: 0 no regression, 2 bad input, 4 a regression,
    5 not comparable (nothing was timed), or inconclusive: the A/A arm changed by
    more than the threshold; with --strict also a cell AMBIGUOUS or only in BASE.
    """
    from nwor_bench.records.store import read_header

    for folder in (base, new):
        if not folder.is_dir():
            read_header(folder)  # refuses it before pandas and scipy are imported
    from rich.console import Console

    from nwor_bench.analysis.compare import DecideBy, compare_runs, compare_sweeps
    from nwor_bench.analysis.stored_run import is_sweep, load_stored, load_stored_runs
    from nwor_bench.report import comparison as told
    from nwor_bench.report.markdown import render_markdown
    from nwor_bench.report.terminal import print_document, print_path

    rule: dict[str, Any] = {
        "threshold": options.threshold,
        "decide_by": DecideBy(options.decide_by),
        "force": options.force,
    }
    if is_sweep(base) and is_sweep(new):
        runs = compare_sweeps(load_stored_runs(base), load_stored_runs(new), **rule)
    else:
        runs = {told.ONE: compare_runs(load_stored(base), load_stored(new), **rule)}
    if options.as_json:
        typer.echo(told.comparisons_json(runs, strict=options.strict), nl=False)
    elif options.markdown:
        typer.echo(render_markdown(told.comparison_document(runs)), nl=False)
    else:
        console = Console()
        print_document(console, told.comparison_document(runs, brief=True), quiet=options.quiet)
        for name, folder in () if options.quiet else (("BASE", base), ("NEW", new)):
            print_path(console, name, folder)
    raise typer.Exit(worst_of(run.exit_code(strict=options.strict) for run in runs.values()))
