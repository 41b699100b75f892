"""DRAM bytes beyond the known parts: tables, and the numbers in the text around them."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from parts import Parts

from nwor_bench.models.shape import ModelShape

NO_SPLITS, WITH_SPLITS = "full-1split-8x4-0.5", "full-8x4-0.5"
"""The same run without context splits and with them: the difference is what splits cost."""

MEMORY = re.compile("eager(-.*)?-64x8-")
"""Runs whose writes depend on the allocator's choice of memory."""

NOT_MEASURED = "(not measured)"

Row = dict[str, Any]
"""A line of `csv_rows`, with the name of its run."""


def mb(value: float | None, sign: bool = False) -> str:
    """Bytes in MB, to 0.01; '' where there is none."""
    if value is None:
        return ""
    return f"{value / 1e6:{'+' if sign else ''}.2f}"


def error(rows: Iterable[Row], field: str) -> float:
    """Half the width of a measured difference's interval; of two, that of their difference."""
    return math.hypot(*(row[f"{field}_high"] - row[f"{field}_mean"] for row in rows))


def half(row: Row) -> float:
    """Half the width of the measured difference's interval."""
    return error([row], "dram_write_bytes_minus_off")


def is_outside(row: Row, part: Parts) -> bool:
    """True if the unexplained bytes exceed the interval, or are unknown."""
    left = unexplained(row, part)
    return left is None or abs(left) > half(row)


def unexplained(row: Row, part: Parts) -> float | None:
    """Bytes measured above the parts' sum; None where a part is unknown."""
    sum_of = part.explained()
    return None if sum_of is None else row["dram_write_bytes_minus_off_mean"] - sum_of


def memory(rows: list[Row], pairs: list[tuple[Row, Parts]]) -> list[dict[str, str]]:
    """What eager engines write at 64 x 8: stock, with K/V held, staged but for the parts."""
    explained = {row["run"]: part.explained() for row, part in pairs}
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        if not MEMORY.match(row["run"]):
            continue
        line = lines.setdefault(row["run"], {"run": row["run"]})
        if row["nwor_mode"] == "stage":
            parts = explained[row["run"]]
            rest = None if parts is None else row["dram_write_bytes_mean"] - parts
            line["stage, parts taken off"] = mb(rest)
        elif not row["arm"]:
            line["off x off"] = mb(row["dram_write_bytes_mean"])
        elif "-hold-" in row["run"]:
            line["off x off, K/V held"] = mb(row["dram_write_bytes_mean"])
    return list(lines.values())


def levels(rows: list[Row], pairs: list[tuple[Row, Parts]], shape: ModelShape) -> dict[str, str]:
    """Numbers for the words about `memory`."""
    plain = [row for row in rows if row["nwor_mode"] == "off"]
    stock = {n: row["dram_write_bytes_mean"] for n, row in enumerate(plain)
             if MEMORY.match(row["run"]) and not row["arm"]}  # fmt: skip
    held = {row["run"]: row["dram_write_bytes_minus_off_mean"] for row in plain
            if "-hold-" in row["run"] and row["arm"]}  # fmt: skip
    found = {row["run"]: unexplained(row, part) for row, part in pairs}
    left = {run: value for run, value in found.items() if value is not None}
    return {
        "stock_levels": span(stock, sign=False),
        "held": span(held, "eager-hold-64x8"),
        "held_small": span(held, "eager-hold-8x4"),
        "activation": mb(64 * 9 * shape.hidden * 2),
        "moved": _moved(left),
        "copies_left": span(left, "eager-copy-64x8"),
        "small_left": span(left, "(eager|full)(-copy)?-8x4"),
    }


def _moved(left: Mapping[str, float]) -> str:
    """What emptying the allocator's cache changed, at each acceptance."""
    found = []
    for run, value in left.items():
        if "-emptied-" in run:
            acceptance = run.rpartition("-")[2]
            others = [left[name] for name in left
                      if re.fullmatch(f"eager(-engine[0-9])?-64x8-{acceptance}", name)]  # fmt: skip
            if others:
                change = mb(value - sum(others) / len(others), sign=True)
                found.append(f"{change} MB at acceptance {acceptance}")
    return " and ".join(found) or NOT_MEASURED


def without_splits(pairs: list[tuple[Row, Parts]]) -> dict[str, str]:
    """The difference where contexts are never split, the model's, and what splits then left."""
    by_name = {row["run"]: (row, part) for row, part in pairs}
    names = ("no_splits", "no_splits_model", "splits_left")
    if NO_SPLITS not in by_name or WITH_SPLITS not in by_name:
        return dict.fromkeys(names, NOT_MEASURED)
    (row, part), (split, _) = by_name[NO_SPLITS], by_name[WITH_SPLITS]
    field = "dram_write_bytes_minus_off"
    left = row[f"{field}_mean"] - split[f"{field}_mean"]
    told = (
        f"{mb(row[f'{field}_mean'], sign=True)} +- {mb(half(row))}",
        mb(part.explained(), sign=True),
        f"{mb(left)} +- {mb(error([row, split], field))}",
    )
    return dict(zip(names, told, strict=True))


def read_left(rows: list[Row]) -> dict[str, str]:
    """Numbers for the words about what reads are left over."""
    left = {row["run"]: value for row in rows if (value := _reads_left(row)) is not None}
    return {
        "reads_small": span(left, "full(-copy)?-8x4"),
        "reads_big": span(left, "full(-copy)?-64x8"),
        "reads_eager": span(left, "eager(?!-persist).*-64x8"),
        "reads_eager_small": span(left, "eager(-copy)?-8x4"),
    }


def span(values: Mapping[Any, float], pattern: str = "", sign: bool = True) -> str:
    """`lowest to highest` in MB of the runs whose name begins so."""
    found = [value for name, value in values.items() if re.match(pattern, str(name))]
    if not found:
        return NOT_MEASURED
    if len(found) == 1:
        return mb(found[0], sign)
    return f"{mb(min(found), sign)} to {mb(max(found), sign)}"


def reads(row: Row) -> dict[str, str]:
    """A line of the table of reads."""
    rest = row["alone_read_bytes"]
    error_of = mb(error([row], "dram_read_bytes_minus_off"))
    return {
        "run": row["run"],
        "read - off MB": mb(row["dram_read_bytes_minus_off_mean"], sign=True),
        "K/V, model MB": mb(row["dram_read_bytes_minus_off_predicted"], sign=True),
        "kernels, alone MB": mb(rest, sign=True),
        "unexplained MB": f"{mb(_reads_left(row), sign=True)} +- {error_of}",
    }


def _reads_left(row: Row) -> float | None:
    rest, field = row["alone_read_bytes"], "dram_read_bytes_minus_off"
    return None if rest is None else row[f"{field}_mean"] - row[f"{field}_predicted"] - rest
