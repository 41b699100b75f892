"""`nwor-bench compare BASE NEW`: find regressions of NEW against BASE."""

from pathlib import Path
from typing import Annotated

import typer

OUTPUT = "Output"
PRINTED = Path("-")


def compare(
    base: Annotated[Path, typer.Argument(help="The run to compare with, or a stored baseline.")],
    new: Annotated[Path, typer.Argument(help="The run to check.")],
    threshold: Annotated[
        str, typer.Option(help="Smaller changes are no regression.")
    ] = "1%",
    decide_by: Annotated[
        str, typer.Option(help="ratio (to off x off; cancels the machine's drift) or time.")
    ] = "ratio",
    strict: Annotated[
        bool, typer.Option("--strict", help="End with 5 if a cell is AMBIGUOUS or only in BASE.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Compare runs of different work or machines too.")
    ] = False,
    markdown: Annotated[
        Path | None, typer.Option(help="Write a table for a pull request; - prints it instead.",
                                  rich_help_panel=OUTPUT)
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write everything as JSON; - prints it instead.",
                                  rich_help_panel=OUTPUT)
    ] = None,
    github_summary: Annotated[
        bool, typer.Option("--github-summary", rich_help_panel=OUTPUT,
                           help="Append the table to the job's summary on GitHub.")
    ] = False,
) -> None:  # fmt: skip
    """Compare two runs cell by cell: where is NEW slower than BASE, or broken?

    Exit codes: 0 no regression, 2 bad input, 4 a regression,
    5 not comparable, or inconclusive with --strict.
    """
    from rich.console import Console

    from nwor_bench.analysis.comparing.compare import DecideBy, compare_runs
    from nwor_bench.analysis.comparing.stored_run import load_stored
    from nwor_bench.errors import ConfigError
    from nwor_bench.report.comparison.reports import (
        comparison_json,
        comparison_markdown,
        print_comparison,
    )
    from nwor_bench.report.github import append_github_summary, github_summary_file

    if decide_by not in set(DecideBy):
        raise ConfigError.unknown("--decide-by", decide_by, [str(each) for each in DecideBy])
    if markdown == json == PRINTED:
        raise ConfigError.for_field("--json", "-", "--markdown is printed already; name a file")
    fraction = _fraction(threshold)
    if github_summary:
        github_summary_file()  # refuse before anything is read
    comparison = compare_runs(
        load_stored(base),
        load_stored(new),
        threshold=fraction,
        decide_by=DecideBy(decide_by),
        force=force,
    )
    text = comparison_markdown(comparison)
    if PRINTED not in (markdown, json):
        print_comparison(Console(), comparison)
    _put("--markdown", markdown, text)
    _put("--json", json, comparison_json(comparison, strict=strict))
    if github_summary:
        append_github_summary(text)
    raise typer.Exit(comparison.exit_code(strict=strict))


def _put(flag: str, path: Path | None, text: str) -> None:
    from nwor_bench.cli.plan_flags import write_output

    if path == PRINTED:
        typer.echo(text, nl=not text.endswith("\n"))
    elif path is not None:
        write_output(flag, path, text)


def _fraction(threshold: str) -> float:
    from nwor_bench.errors import ConfigError
    from nwor_bench.workload.stopping import parse_fraction

    try:
        return parse_fraction("--threshold", threshold)
    except ConfigError as error:
        raise ConfigError.for_field(
            "--threshold", threshold, "write a change between 0 and 100 % such as 1% or 0.01"
        ) from error
