"""`nwor-bench compare BASE NEW`: find regressions of NEW against BASE."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nwor_bench.cli.command import AsJson, Quiet, write_output
from nwor_bench.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nwor_bench.analysis.comparing.sweeps import Compare
    from nwor_bench.report.document import Document


def compare(
    base: Annotated[
        Path, typer.Argument(help="The run or sweep to compare with, or a stored baseline.")
    ],
    new: Annotated[
        Path, typer.Argument(help="The run or sweep to check.")
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
    html: Annotated[
        Path | None, typer.Option(help="Write a page that opens offline.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Compare two runs cell by cell: is NEW slower than BASE, or broken?

    Two sweep folders are compared run by run.
    Exit codes: 0 no regression, 2 bad input, 4 a regression,
    5 not comparable, or inconclusive: the A/A arm changed by more than the
    threshold; with --strict also a cell AMBIGUOUS or only in BASE.
    """
    from nwor_bench.analysis.comparing.preconditions import DecideBy
    from nwor_bench.records.store import read_header

    fraction = _fraction(threshold)
    if decide_by not in set(DecideBy):
        raise ConfigError.unknown("--decide-by", decide_by, [str(each) for each in DecideBy])
    for folder in (base, new):
        if not folder.is_dir():
            read_header(folder)  # refuses it before pandas and scipy are imported
    from nwor_bench.analysis.comparing.compare import compare_runs

    compare = partial(compare_runs, threshold=fraction, decide_by=DecideBy(decide_by), force=force)
    outputs = _sweeps(base, new, compare) if _both_sweeps(base, new) else _runs(base, new, compare)
    if as_json:
        typer.echo(outputs.as_json(strict=strict), nl=False)
    elif markdown:
        from nwor_bench.report.markdown import render_markdown

        typer.echo(render_markdown(outputs.document), nl=False)
    else:
        _show(outputs.document, base, new, quiet=quiet)
    if html is not None:
        from nwor_bench.report.html import render_html

        write_output("--html", html, render_html(outputs.document))
    raise typer.Exit(outputs.exit_code(strict=strict))


@dataclass(frozen=True)
class _Outputs:
    """What the command can write of a comparison."""

    document: "Document"
    as_json: "Callable[..., str]"
    exit_code: "Callable[..., int]"


def _both_sweeps(*folders: Path) -> bool:
    from nwor_bench.records.run_folder import RUN_FILE, SWEEP_FILE

    return all((f / SWEEP_FILE).is_file() and not (f / RUN_FILE).is_file() for f in folders)


def _runs(base: Path, new: Path, compare: "Compare") -> _Outputs:
    from nwor_bench.analysis.comparing.stored_run import load_stored
    from nwor_bench.report.comparison import comparison_document, comparison_json

    found = compare(load_stored(base), load_stored(new))
    return _Outputs(comparison_document(found), partial(comparison_json, found), found.exit_code)


def _sweeps(base: Path, new: Path, compare: "Compare") -> _Outputs:
    from nwor_bench.analysis.comparing.sweeps import compare_sweeps
    from nwor_bench.report.comparison import sweep_comparison_document, sweep_comparison_json
    from nwor_bench.run.sweep_summary import load_sweep_runs

    runs = load_sweep_runs(base), load_sweep_runs(new)
    found = compare_sweeps((base, new), *runs, compare)
    as_json = partial(sweep_comparison_json, found)
    return _Outputs(sweep_comparison_document(found), as_json, found.exit_code)


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
