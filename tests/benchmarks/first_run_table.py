"""The first published NWOR run beside ours in its setting: one table of counts.

    nwor-bench sweep --file first-run-smollm2 --output A
    nwor-bench sweep --file first-run-3b --output B
    python tests/benchmarks/first_run_table.py A B --output sweeps/results/first-published-run.md

8 requests, 4 drafts, temperature 0.7, 2 batches, short prompts. Published were windows, drafted and
accepted tokens; they are quoted here, all else is read from the runs.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from nwor_bench.analysis.aggregate import summarise
from nwor_bench.records.store import RUN_FILE, RunData, read_run
from nwor_bench.records.types import AA, CellResult
from nwor_bench.report.text import NOT_MEASURED, count, decimal


@dataclass(frozen=True)
class Column:
    """One run's cell, or the published run."""

    title: str
    windows: int | None
    drafted: int | None
    accepted: int | None
    staged: int | None = None
    committed: int | None = None
    verdict: str = ""


PUBLISHED = Column("published", windows=92, drafted=2024, accepted=205)

WHY = """
What differs, and why:

- **Acceptance** belongs to target, drafter and prompts together. The published run's models are not
  ours, so its rate and ours cannot be compared; the 3B shape is given the published one by dice.
- **Drafted tokens a window**: {drafted:.1f} published, of 8 x 4 = 32 at most. Where requests end at
  different times, later windows hold fewer of them; our scenario keeps each request going for the
  same number of tokens.
- **Staged and committed tokens** were not published (that harness read 0 in all of its sweeps: its
  counters were read after the engine was gone). Here a cell of mode stage shows both, and committed
  equals what vLLM counted as accepted.
- **Two batches** are two blocks: no interval, so no cell is called faster or slower.
"""


def main() -> int:
    """Read the runs, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, help="run or sweep folders")
    parser.add_argument("--output", type=Path, help="a Markdown file (default: the terminal)")
    args = parser.parse_args()
    runs = [read_run(path.parent) for f in args.folders for path in sorted(f.rglob(RUN_FILE))]
    columns = [PUBLISHED] + [column for run in runs for column in columns_of(run)]
    text = document(columns, runs)
    if args.output is None:
        print(text)
    else:
        args.output.write_text(text)
    return 0


def columns_of(run: RunData) -> list[Column]:
    """off x off and every cell that stages."""
    cells = [c for c in summarise(run) if c.arm != AA]
    shown = [c for c in cells if c.nwor_mode == "stage" or c.verdict == "reference"]
    return [_column(cell) for cell in shown]


def _column(cell: CellResult) -> Column:
    return Column(
        title=f"{cell.pair}, {cell.label}",
        windows=cell.windows,
        drafted=cell.draft_tokens,
        accepted=cell.accepted_tokens,
        staged=cell.nwor_total_staged,
        committed=cell.nwor_total_committed,
        verdict=cell.verdict,
    )


def document(columns: Sequence[Column], runs: Sequence[RunData]) -> str:
    """The Markdown page."""
    names = ["windows", "drafted tokens", "accepted tokens", "acceptance rate",
             "drafted a window", "tokens a request gains a window (k = 4)", "staged", "committed",
             "verdict"]  # fmt: skip
    table = pd.DataFrame(
        {column.title: _figures(column) for column in columns},
        index=pd.Index(names, name="figure"),
    )
    where = "\n".join(f"- {_origin(run)}" for run in runs)
    drafted = (PUBLISHED.drafted or 0) / (PUBLISHED.windows or 1)
    return (
        "# The first published run's setting\n\n"
        "8 requests, 4 drafts, temperature 0.7, 2 batches, short prompts. Made by\n"
        "`tests/benchmarks/first_run_table.py` from:\n\n"
        f"{where}\n\n{table.to_markdown()}\n{WHY.format(drafted=drafted)}"
    )


def _figures(c: Column) -> list[str]:
    length = None if c.accepted is None or not c.drafted else 1 + 4 * c.accepted / c.drafted
    return [
        count(c.windows),
        count(c.drafted),
        count(c.accepted),
        decimal(_over(c.accepted, c.drafted), 3),
        decimal(_over(c.drafted, c.windows), 3),
        decimal(length, 3),
        count(c.staged),
        count(c.committed),
        c.verdict or NOT_MEASURED,
    ]


def _over(a: int | None, b: int | None) -> float | None:
    return None if a is None or not b else a / b


def _origin(run: RunData) -> str:
    environment = run.header.environment
    gpus = environment.gpus
    device = gpus[0].name if gpus else f"{environment.cpu.model} (CPU)"
    return f"`{run.header.command}` on {device}"


if __name__ == "__main__":
    sys.exit(main())
