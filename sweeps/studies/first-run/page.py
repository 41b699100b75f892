"""README.md: the first published NWOR run beside ours in its setting, from one CSV of runs.

    nwor-bench sweep --file first-run-smollm2 --output first-smollm2
    nwor-bench sweep --file first-run-3b --output first-3b
    python sweeps/studies/runs/compact.py first-smollm2 first-3b --output FILE.csv
    python sweeps/studies/first-run/page.py FILE.csv

8 requests, 4 drafts, temperature 0.7, 2 batches, short prompts. Published were windows, drafted and
accepted tokens; they are quoted here, all else is read from the CSV.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from nwor_bench.report.text import NOT_MEASURED, count, decimal

RUNS = Path(__file__).parents[2] / "results" / "h200" / "runs.csv.gz"


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
  ours, so its rate and ours cannot be compared; the 3B shape has the published one by synthetic
  acceptance.
- **Drafted tokens a window**: {drafted:.1f} published, of 8 x 4 = 32 at most. Where requests end at
  different times, later windows hold fewer of them; our scenario keeps each request going for the
  same number of tokens.
- **Staged and committed tokens** were not published (that harness read 0 in all of its sweeps: its
  counters were read after the engine was gone). Here a cell of mode stage shows both, and committed
  equals what vLLM counted as accepted.
- **Two batches** are two blocks: no interval, so no cell is called faster or slower.
"""


def main() -> None:
    """Read the CSV, write the page beside this file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path, nargs="?", default=RUNS)
    text = document(pd.read_csv(parser.parse_args().table))
    Path(__file__).with_name("README.md").write_text(text, encoding="utf-8")


def columns_of(run: pd.DataFrame) -> list[Column]:
    """off x off and every cell that stages."""
    return [
        _column(row)
        for row in run.to_dict("records")
        if row["cell"].startswith("stage") or row["verdict"] == "reference"
    ]


def _column(row: dict[str, Any]) -> Column:
    return Column(
        title=f"{row['pair']}, {row['cell']}",
        windows=row["windows"],
        drafted=row["draft_tokens_total"],
        accepted=row["accepted_tokens"],
        staged=row["staged"],
        committed=row["committed"],
        verdict=row["verdict"],
    )


def document(rows: pd.DataFrame) -> str:
    """The Markdown page, from the CSV's runs of sweeps named first-..., SmolLM2's first."""
    chosen = rows[rows["run"].str.startswith("first-")]
    runs = [run for _, run in chosen.groupby("run", sort=False)]
    columns = [PUBLISHED, *(column for run in runs for column in columns_of(run))]
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
        "Our two runs in the setting of the first published one (8 requests, 4 drafts,\n"
        "temperature 0.7, 2 batches, short prompts) stage every draft and commit what is\n"
        "accepted; the published harness counted no staged token. Made by\n"
        "`sweeps/studies/first-run/page.py` from these rows of\n"
        "[runs.csv.gz](../../results/h200/runs.csv.gz):\n\n"
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


def _origin(run: pd.DataFrame) -> str:
    first = run.iloc[0]
    return f"`{first['command']}` on {first['gpu']}"


if __name__ == "__main__":
    main()
