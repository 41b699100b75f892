"""`nwor-bench compare BASE NEW`: find regressions of NEW against BASE."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nwor_bench.cli.command import AsJson, Quiet
from nwor_bench.errors import ConfigError, ExitCode, worst_of

if TYPE_CHECKING:
    from nwor_bench.report.document import Document


def compare(
    base: Annotated[
        Path, typer.Argument(help="The run to compare with, or a stored baseline.")
    ],
    new: Annotated[
        Path, typer.Argument(help="The run to check.")
    ],
    threshold: Annotated[
        str, typer.Option(help="Smaller changes are no regression.")
    ] = "1%",
    decide_by: Annotated[
        str, typer.Option(help="ratio (to off x off; cancels the machine's drift) or time.")
    ] = "ratio",
    strict: Annotated[
        bool, typer.Option("--strict",
                           help="End with 5 also if a cell is AMBIGUOUS or only in BASE.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Compare runs of different work or machines too.")
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a table for a pull request.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Compare two runs cell by cell: is NEW slower than BASE, or broken?

    Of two folders of `nwor-bench worth` batch size by batch size.

    Exit codes: 0 no regression, 2 bad input, 4 a regression,
    5 not comparable (nothing was timed), or inconclusive: the A/A arm changed by
    more than the threshold; with --strict also a cell AMBIGUOUS or only in BASE.
    """
    from nwor_bench.analysis.compare import DecideBy
    from nwor_bench.records.store import read_header

    fraction = _fraction(threshold)
    if decide_by not in set(DecideBy):
        raise ConfigError.unknown("--decide-by", decide_by, [str(each) for each in DecideBy])
    for folder in (base, new):
        if not folder.is_dir():
            read_header(folder)  # refuses it before pandas and scipy are imported
    options = {"threshold": fraction, "decide_by": DecideBy(decide_by), "force": force}
    document, text, code = _compared(base, new, options, strict=strict)
    if as_json:
        typer.echo(text, nl=False)
    elif markdown:
        from nwor_bench.report.markdown import render_markdown

        typer.echo(render_markdown(document), nl=False)
    else:
        _show(document, base, new, quiet=quiet)
    raise typer.Exit(code)


def _compared(
    base: Path, new: Path, options: dict[str, Any], *, strict: bool
) -> tuple["Document", str, ExitCode]:
    """The comparison as a document, as JSON, and its exit code."""
    from nwor_bench.analysis.compare import (
        compare_runs,
        compare_sweeps,
    )
    from nwor_bench.analysis.stored_run import is_sweep, load_stored, load_stored_runs
    from nwor_bench.report import comparison as told

    if is_sweep(base) and is_sweep(new):
        runs = compare_sweeps(load_stored_runs(base), load_stored_runs(new), **options)
        code = worst_of(each.exit_code(strict=strict) for each in runs.values())
        return told.comparisons_document(runs), told.comparisons_json(runs, strict=strict), code
    found = compare_runs(load_stored(base), load_stored(new), **options)
    text = told.comparison_json(found, strict=strict)
    return told.comparison_document(found), text, found.exit_code(strict=strict)


def _show(document: "Document", base: Path, new: Path, *, quiet: bool) -> None:
    from rich.console import Console

    from nwor_bench.report.terminal import print_document, print_path

    console = Console()
    print_document(console, document.shortened(), quiet=quiet)
    for name, folder in () if quiet else (("BASE", base), ("NEW", new)):
        print_path(console, name, folder)


def _fraction(threshold: str) -> float:
    from nwor_bench.workload.stopping import parse_fraction

    try:
        return parse_fraction("--threshold", threshold)
    except ConfigError as error:
        raise ConfigError.for_field(
            "--threshold", threshold, "write a change between 0 and 100 % such as 1% or 0.01"
        ) from error
