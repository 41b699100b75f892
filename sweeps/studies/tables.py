"""Fill the tables and numbers of study pages from their CSV files.

    python sweeps/studies/tables.py [PAGE.md ...]    # without an argument: all pages

A page is Markdown written by hand. The file of its name with the suffix `.sql` has its statements
(SQLite's), in which each CSV file beside the page (or in the folder that a line `-- tables from
FOLDER` names) is a table of its name, without suffix and with `_` for `-`. A line above each
statement says what it is for:

    -- values         one row, whose columns the page names: <!--name-->filled in here<!--/-->
    -- view NAME      a view for the statements that follow
    -- table NAME     the rows between <!-- table NAME --> and <!-- end -->
    -- pivot NAME     the same; the last two columns are a column's heading and cell

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import quantile_test, spearmanr

SWEEPS = Path(__file__).resolve().parents[1]
STATEMENT = re.compile(
    r"^-- (values|view|table|pivot)(?: (\w+))?\n(.*?);$", re.DOTALL | re.MULTILINE
)
TABLE = re.compile(r"(<!-- table (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
VALUE = re.compile(r"(<!--(\w+)-->)(.*?)(<!--/-->)", re.DOTALL)

Rows = tuple[list[str], list[Sequence[Any]]]
"""Column names and rows."""


def pages() -> Iterator[Path]:
    """Every page below sweeps/ and in docs/ with statements beside it."""
    for page in sorted([*SWEEPS.rglob("*.md"), *(SWEEPS.parent / "docs").glob("*.md")]):
        if page.with_suffix(".sql").exists():
            yield page


def filled(page: Path) -> str:
    """The page's text with every table and value filled in.

    Raises:
        KeyError: a table or value that no statement defines, or a table without a place.
        sqlite3.Error: a statement that SQLite refuses.
    """
    known, found = evaluated(page)
    text = VALUE.sub(
        lambda place: f"{place[1]}{known[place[2]]}{place[4]}", page.read_text(encoding="utf-8")
    )
    return with_tables(text, {name: markdown(*rows) for name, rows in found.items()})


def with_tables(text: str, tables: Mapping[str, str]) -> str:
    """The text with these tables in their places."""
    if homeless := tables.keys() - {place[2] for place in TABLE.finditer(text)}:
        raise KeyError(f"the page has no <!-- table {' or '.join(sorted(homeless))} -->")
    return TABLE.sub(lambda place: f"{place[1]}\n{tables[place[2]]}\n\n{place[4]}", text)


def values(page: Path) -> dict[str, Any]:
    """The values that a page may name."""
    return evaluated(page)[0]


def evaluated(page: Path) -> tuple[dict[str, Any], dict[str, Rows]]:
    """Values and tables of the statements beside a page, by name."""
    statements = page.with_suffix(".sql").read_text(encoding="utf-8")
    folder = re.search(r"^-- tables from (\S+)$", statements, re.MULTILINE)
    database = open_tables(page.parent / (folder[1] if folder else ""))
    known: dict[str, Any] = {}
    tables: dict[str, Rows] = {}
    for kind, name, query in STATEMENT.findall(statements):
        if kind == "view":
            database.execute(f"CREATE TEMP VIEW {name} AS {query}")
        elif kind == "values":
            names, ((*row,),) = rows_of(database, query)
            known |= dict(zip(names, row, strict=True))
        else:
            rows = rows_of(database, query)
            tables[name] = pivoted(*rows) if kind == "pivot" else rows
    return known, tables


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
    text = new.convert_dtypes().to_csv(index=False, float_format="%.7g")  # whole numbers stay whole
    rows = _as_text(StringIO(text))
    if file.exists():
        kept = _as_text(file).set_index(setting, drop=False)
        rows = pd.concat([kept[~kept.index.isin(rows.set_index(setting).index)], rows])
    packed = {"method": "infer", "mtime": 0}  # the same rows are the same bytes
    rows.to_csv(file, index=False, compression=packed)


def _as_text(file: Path | StringIO) -> pd.DataFrame:
    """A CSV in which nothing changes when it is written again."""
    return pd.read_csv(file, dtype=str, keep_default_na=False)


def rows_of(database: sqlite3.Connection, query: str) -> Rows:
    """Column names and rows of a query."""
    cursor = database.execute(query)
    return [column[0] for column in cursor.description], cursor.fetchall()


def pivoted(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Rows:
    """Rows whose last two columns became columns, in the order in which they first come."""
    headings = list(dict.fromkeys(row[-2] for row in rows))
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for *key, heading, cell in rows:
        lines.setdefault(tuple(key), {})[heading] = cell
    return [*names[:-2], *headings], [
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
