"""`nwor-bench report RUN`: make a run's reports anew from its records."""

from pathlib import Path
from typing import Annotated

import typer

from nwor_bench.errors import ExitCode


def report(
    run: Annotated[Path, typer.Argument(help="A run folder, as `nwor-bench sweep` wrote it.")],
) -> None:
    """Rebuild all reports of RUN from its records and show its cells.

    Exits with 3 if a cell is INVALID.
    """
    from rich.console import Console

    from nwor_bench.aggregate import summarise
    from nwor_bench.records import Verdict
    from nwor_bench.report import print_summary, write_files
    from nwor_bench.store import read_run

    data = read_run(run)
    cells = summarise(data)
    write_files(run, data, cells)
    print_summary(Console(), data, cells, run)
    if any(cell.verdict == Verdict.INVALID for cell in cells):
        raise typer.Exit(ExitCode.CORRECTNESS_BROKEN)
