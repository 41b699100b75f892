"""A comparison of two sweeps on the terminal and as JSON."""

from rich.console import Console
from rich.text import Text

from nwor_bench.analysis.comparing.sweeps import SweepComparison
from nwor_bench.records.json_text import document
from nwor_bench.report.comparison import text as words
from nwor_bench.report.comparison.documents import sweep_headline, sweep_verdict, worst_cell
from nwor_bench.report.comparison.reports import (
    COMPARISON_FORMAT_VERSION,
    STYLES,
    content_of,
    new_table,
)


def print_sweep_comparison(
    console: Console, comparison: SweepComparison, *, quiet: bool = False
) -> None:
    """Print a row for each run, and the headline last; `quiet` prints it alone."""
    headline = sweep_headline(comparison)
    if quiet:
        console.print(Text(headline))
        return
    for name, folder in (("BASE", comparison.base), ("NEW", comparison.new)):
        # Unwrapped, so that the path can be copied from a narrow terminal too.
        console.print(Text(f"{name:4} {folder}"), soft_wrap=True)
    rows = new_table(("Run", "Change", "Changed cell", "NEW / BASE"))
    for run in comparison.runs:
        cell = worst_cell(run)
        change = words.deciding(cell, run.comparison)
        name = words.name_of(cell, run.comparison)
        outcome = Text(str(run.outcome), style=STYLES.get(run.outcome, ""))
        rows.add_row(Text(run.name), outcome, Text(name), words.change_text(change))
    console.print()
    console.print(rows)
    console.print()
    console.print(Text("The cell of each row is the one that changed most among the worst."))
    console.print()
    console.print(Text(headline, style=STYLES.get(sweep_verdict(comparison), "bold")))


def sweep_comparison_json(comparison: SweepComparison, *, strict: bool) -> str:
    """Everything as JSON; values that were not measured are null."""
    content = {
        "comparison_version": COMPARISON_FORMAT_VERSION,
        "headline": sweep_headline(comparison),
        "exit_code": int(comparison.exit_code(strict=strict)),
        "base": {"folder": str(comparison.base)},
        "new": {"folder": str(comparison.new)},
        "runs": [
            {
                "name": run.name,
                "outcome": str(run.outcome),
                **content_of(run.comparison, strict=strict),
            }
            for run in comparison.runs
        ],
        "only_in_base": list(comparison.only_in_base),
        "only_in_new": list(comparison.only_in_new),
    }
    return document(content)
