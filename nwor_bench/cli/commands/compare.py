"""`nwor-bench compare BASE NEW`: find regressions of NEW against BASE."""

from pathlib import Path
from typing import Annotated, Any

import typer

from nwor_bench.cli import completion
from nwor_bench.cli.help import Command

OUTPUT = "Output"
PRINTED = Path("-")


class CompareCommand(Command):
    """Takes --json without a file too, as the other commands do."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """A --json that no file follows prints."""
        return super().parse_args(ctx, with_printed_json(args))


def with_printed_json(args: list[str]) -> list[str]:
    """The arguments with `--json -` for a --json that an option or nothing follows."""
    found = []
    for place, arg in enumerate(args):
        after = args[place + 1 : place + 2]
        is_bare = arg == "--json" and (not after or (after[0][:1] == "-" and after[0] != "-"))
        found += [arg, "-"] if is_bare else [arg]
    return found


def compare(
    base: Annotated[
        Path, typer.Argument(help="The run to compare with, or a stored baseline.",
                             autocompletion=completion.runs)
    ],
    new: Annotated[
        Path, typer.Argument(help="The run to check.", autocompletion=completion.runs)
    ],
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
        Path | None, typer.Option(help="Write everything as JSON; without a file or with - it is "
                                       "printed instead.", rich_help_panel=OUTPUT)
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only the answer.", rich_help_panel=OUTPUT)
    ] = False,
    github_summary: Annotated[
        bool, typer.Option("--github-summary", rich_help_panel=OUTPUT,
                           help="Append the table to the job's summary on GitHub.")
    ] = False,
) -> None:  # fmt: skip
    """Compare two runs cell by cell: where is NEW slower than BASE, or broken?

    Exit codes: 0 no regression, 2 bad input, 4 a regression,
    5 not comparable, or inconclusive with --strict.
    """
    from nwor_bench.errors import ConfigError
    from nwor_bench.records.store import read_header

    if markdown == json == PRINTED:
        raise ConfigError.for_field("--json", "-", "--markdown is printed already; name a file")
    fraction = _fraction(threshold)
    for folder in (base, new):
        if not folder.is_dir():
            read_header(folder)  # refuses it before pandas and scipy are imported
    from rich.console import Console

    from nwor_bench.analysis.comparing.compare import DecideBy, compare_runs
    from nwor_bench.analysis.comparing.stored_run import load_stored
    from nwor_bench.report.comparison.reports import (
        comparison_json,
        comparison_markdown,
        print_comparison,
    )
    from nwor_bench.report.github import append_github_summary, github_summary_file

    if decide_by not in set(DecideBy):
        raise ConfigError.unknown("--decide-by", decide_by, [str(each) for each in DecideBy])
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
        print_comparison(Console(), comparison, quiet=quiet)
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
