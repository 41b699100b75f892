"""Fill the tables and numbers of study pages from their CSV files.

    python sweeps/studies/tables.py [PAGE.md ...]    # without an argument: every page below sweeps/

A page is Markdown written by hand. Comments in it hold SQL (SQLite's), in which each CSV file
beside the page is a table of its name, without suffix and with `_` for `-`:

    <!-- table SELECT ... -->        the rows, from here to <!-- end -->
    <!-- pivot SELECT ... -->        the same; the last two columns are a column's heading and cell
    <!-- view NAME AS SELECT ... --> a view for the statements that follow
    <!-- let SELECT ... AS name -->  one row of values: <!--name-->filled in here<!--/-->

A line never begins with a value: Markdown would take the whole line for HTML. Besides SQLite's
functions there are `fmt(pattern, value, ...)`, which is Python's `str.format` (NULL if a value is),
and the aggregates `median(x)`, `median_low(x)` and `median_high(x)` (its 95 % interval by the sign
test), `rank_correlation(x, y)`, `pooled(x, half)` with `pooled_half(x, half)` (the mean of values
weighted by their intervals, and half its interval), and `effect(x)` with `half_width(x)`: the
robust location that reports use for groups of windows, and half its 95 % interval.
"""

import argparse
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import quantile_test, spearmanr

SWEEPS = Path(__file__).resolve().parents[1]
DEFINITION = re.compile(r"<!-- (view|let)\s(.*?)-->", re.DOTALL)
TABLE = re.compile(r"(<!-- (table|pivot)\s(.*?)-->\n)(.*?)(<!-- end -->)", re.DOTALL)
VALUE = re.compile(r"(<!--(\w+)-->)(.*?)(<!--/-->)", re.DOTALL)


def pages() -> Iterator[Path]:
    """Every page below sweeps/ that has something to fill."""
    for page in sorted(SWEEPS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if TABLE.search(text) or VALUE.search(text):
            yield page


def filled(page: Path) -> str:
    """The page's text with every table and value filled in.

    Raises:
        KeyError: a value that no `let` of the page defines.
        sqlite3.Error: a statement that SQLite refuses.
    """
    text = page.read_text(encoding="utf-8")
    database = open_tables(page.parent)
    known = define(database, text)

    def table(found: re.Match[str]) -> str:
        head, kind, query, _, end = found.groups()
        return f"{head}\n{markdown(*rows_of(database, kind, query))}\n\n{end}"

    def value(found: re.Match[str]) -> str:
        head, name, _, end = found.groups()
        return f"{head}{known[name]}{end}"

    return VALUE.sub(value, TABLE.sub(table, text))


def values(page: Path) -> dict[str, Any]:
    """What the page's `let` statements define, by name."""
    return define(open_tables(page.parent), page.read_text(encoding="utf-8"))


def open_tables(folder: Path) -> sqlite3.Connection:
    """A database in memory with every CSV file of the folder, without lines that begin with #."""
    database = sqlite3.connect(":memory:")
    for file in sorted([*folder.glob("*.csv"), *folder.glob("*.csv.gz")]):
        name = file.name.partition(".")[0].replace("-", "_")
        pd.read_csv(file, comment="#").to_sql(name, database, index=False)
    database.create_function("fmt", -1, fmt, deterministic=True)
    for name, of in AGGREGATES.items():
        arguments = len(signature(of).parameters)
        database.create_aggregate(name, arguments, aggregate(of))  # type: ignore[arg-type]
    return database


def add_rows(file: Path, new: pd.DataFrame, setting: list[str]) -> None:
    """Add rows to a CSV in place of those of the same settings; other rows stay as written.

    Args:
        setting: columns that a run's rows share, and no other run's rows have.
    """
    rows = _as_text(StringIO(new.to_csv(index=False)))
    if file.exists():
        kept = _as_text(file).set_index(setting, drop=False)
        rows = pd.concat([kept[~kept.index.isin(rows.set_index(setting).index)], rows])
    rows.to_csv(file, index=False)


def _as_text(file: Path | StringIO) -> pd.DataFrame:
    """A CSV in which nothing changes when it is written again."""
    return pd.read_csv(file, dtype=str, keep_default_na=False)


def define(database: sqlite3.Connection, text: str) -> dict[str, Any]:
    """Run the page's `view` and `let` statements, in their order; the values of the latter."""
    known: dict[str, Any] = {}
    for kind, statement in DEFINITION.findall(text):
        if kind == "view":
            database.execute(f"CREATE TEMP VIEW {statement}")
        else:
            cursor = database.execute(statement)
            ((*row,),) = cursor.fetchall()
            known |= dict(zip((column[0] for column in cursor.description), row, strict=True))
    return known


def rows_of(
    database: sqlite3.Connection, kind: str, query: str
) -> tuple[list[str], list[Sequence[Any]]]:
    """Column names and rows of a query; a pivot's in the order in which they first come."""
    cursor = database.execute(query)
    names = [column[0] for column in cursor.description]
    rows: list[Sequence[Any]] = cursor.fetchall()
    if kind == "table":
        return names, rows
    headings = list(dict.fromkeys(row[-2] for row in rows))
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for *key, heading, cell in rows:
        lines.setdefault(tuple(key), {})[heading] = cell
    return names[:-2] + headings, [
        [*key, *(cells.get(heading) for heading in headings)] for key, cells in lines.items()
    ]


def markdown(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table without padding; NULL is an empty cell."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(
        f"| {' | '.join('' if cell is None else str(cell) for cell in line)} |" for line in lines
    )


def fmt(pattern: str, *arguments: Any) -> str | None:
    """Python's `str.format`; None if an argument is."""
    return None if None in arguments else pattern.format(*arguments)


def effect(numbers: list[float]) -> float:
    """Robust location of groups' effects."""
    return _located(numbers).value


def half_width(numbers: list[float]) -> float:
    """Half of its 95 % interval."""
    return _located(numbers).half_width


def _located(numbers: list[float]) -> Any:
    from nwor_bench.stats.robust import robust_location

    found = robust_location(np.asarray(numbers))
    assert found is not None
    return found


def pooled(numbers: list[float], halves: list[float]) -> float:
    """Mean of numbers, each with the weight that half its interval gives it."""
    return float(np.average(numbers, weights=np.array(halves) ** -2.0))


def pooled_half(numbers: list[float], halves: list[float]) -> float:
    """Half the interval of `pooled`, if the numbers differ by no more than theirs."""
    return float((np.array(halves) ** -2.0).sum() ** -0.5)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's."""
    return float(spearmanr(first, second).statistic)


AGGREGATES: dict[str, Callable[..., float]] = {
    "median": median,
    "median_low": lambda numbers: quantile_test(numbers).confidence_interval().low,
    "median_high": lambda numbers: quantile_test(numbers).confidence_interval().high,
    "effect": effect,
    "half_width": half_width,
    "pooled": pooled,
    "pooled_half": pooled_half,
    "rank_correlation": rank_correlation,
}


def aggregate(of: Callable[..., float]) -> type:
    """An SQLite aggregate that calls `of` with a list per argument.

    Rows with a NULL are left out; without any other row the result is NULL.
    """

    class Aggregate:
        def __init__(self) -> None:
            self.found: list[tuple[float, ...]] = []

        def step(self, *row: float | None) -> None:
            if None not in row:
                self.found.append(row)  # type: ignore[arg-type]

        def finalize(self) -> float | None:
            return float(of(*map(list, zip(*self.found, strict=True)))) if self.found else None

    return Aggregate


def main() -> None:
    """Write the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", type=Path, nargs="*")
    for page in parser.parse_args().pages or pages():
        page.write_text(filled(page), encoding="utf-8")


if __name__ == "__main__":
    main()
