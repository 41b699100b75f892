"""README.md from kernels.csv.gz: python sweeps/studies/kernels/page.py"""

import gzip
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
from compact import COLUMNS

from nwor_bench.microbench.cases import L2, LaunchMode
from nwor_bench.microbench.report import case, interval, microseconds, significant
from nwor_bench.microbench.rows import Row, Status

TEXT = """# Our kernels against their peers

Graph-captured on an H200, vLLM's write takes at least 19.3 times as long as our commit of 32
staged tokens, and 4.69 times for 512. Staging takes less time than that write, and the mask (warm
L2) no more than an empty kernel. verify_attention at k = 4, bf16, 8 and 64 requests takes at most
5 % more than FlashAttention 3.

    {command}
    python sweeps/studies/kernels/compact.py FOLDER && python sweeps/studies/kernels/page.py

{machine} Every line of the run is a row of [kernels.csv.gz](kernels.csv.gz).

Times in microseconds; in brackets the time over ours with its 95 % interval: 2 means that ours
takes half the time. The tables by kernel are graph-captured. `cold`: nothing that a call reads or
writes is in L2; `warm`: what the last call left is. A commit's call writes all layers, a stage's
one. Every result was compared with a torch reference before it was timed.

{sections}

## Eager calls

Lowest to highest over the cases above: what a call takes the host in microseconds, and its time
over ours.

{eager}

## Without a time, or with a remark

{remarks}
"""


def read_rows(table: Path) -> tuple[list[Row], dict[str, str]]:
    """The rows, and the facts before the table."""
    text = gzip.decompress(table.read_bytes()).decode("utf-8")
    told = (line[2:].partition(": ") for line in text.splitlines() if line.startswith("# "))
    names = {ours: theirs for theirs, ours in COLUMNS.items()}
    frame = pd.read_csv(StringIO(text), comment="#").rename(columns=names).astype(object)
    records = frame.where(frame.notna(), None).to_dict("records")
    return [_row(record) for record in records], {name: value for name, _, value in told}


def _row(record: dict[str, Any]) -> Row:
    """Written tokens are not kept: no page shows them."""
    kinds = {"status": Status, "l2": L2, "launch": LaunchMode}
    typed = {name: kind(record[name]) for name, kind in kinds.items()}
    whole = {name: int(record[name]) for name in ("context", "rounds") if record[name] is not None}
    texts = {"reason": record["reason"] or ""}
    return Row(**{**record, **typed, **whole, **texts, "written_tokens": 0})


def text_of(table: Path) -> str:
    """The whole page."""
    rows, facts = read_rows(table)
    graph = [row for row in rows if row.launch is LaunchMode.GRAPH]
    kinds = dict.fromkeys((row.kernel, row.cache_dtype) for row in rows)
    remarks = dict.fromkeys(
        f"- {row.implementation} ({row.kernel}, {row.cache_dtype}): {row.status}: {row.reason}"
        for row in rows
        if row.reason
    )
    return TEXT.format(
        **facts,
        sections="\n\n".join(_section(graph, *kind) for kind in kinds),
        eager=_markdown(_eager([row for row in rows if row.launch is LaunchMode.EAGER])),
        remarks="\n".join(remarks) or "None.",
    )


def _section(rows: list[Row], kernel: str, dtype: str) -> str:
    """A kernel's table: a line a case, a column an implementation."""
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        if (row.kernel, row.cache_dtype) == (kernel, dtype):
            where = (case(row), str(row.l2))
            start = dict(zip(("case", "L2"), where, strict=True))
            lines.setdefault(where, start)[row.implementation] = _time(row)
    return f"## {_name(kernel, dtype)}\n\n{_markdown(list(lines.values()))}"


def _name(kernel: str, dtype: str) -> str:
    return kernel if kernel == "mask" else f"{kernel}, {dtype} cache"


def _eager(rows: list[Row]) -> list[dict[str, str]]:
    """A line a kernel and implementation that was timed."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.status is Status.OK:
            key = (_name(row.kernel, row.cache_dtype), row.implementation)
            groups.setdefault(key, []).append(row)
    return [
        {
            "kernel": kernel,
            "implementation": implementation,
            "host": _span([row.host_us_per_call for row in group], microseconds),
            "time over ours": _span([row.time_over_nwor for row in group], significant),
        }
        for (kernel, implementation), group in groups.items()
    ]


def _span(values: list[float | None], text: Callable[[float], str]) -> str:
    found = [value for value in values if value is not None]
    return f"{text(min(found))} to {text(max(found))}" if found else ""


def _time(row: Row) -> str:
    if row.status is not Status.OK:
        return str(row.status)
    ratio = "" if row.time_over_nwor is None else f" ({interval(row)})"
    return f"{microseconds(row.time_us)}{ratio}"


def _markdown(lines: list[dict[str, str]]) -> str:
    """A table without padding."""
    frame = pd.DataFrame(lines).fillna("")
    header = [" | ".join(frame.columns), "|".join([" --- "] * len(frame.columns)).strip()]
    return "\n".join(f"| {row} |" for row in [*header, *map(" | ".join, frame.to_numpy())])


if __name__ == "__main__":
    here = Path(__file__).parent
    (here / "README.md").write_text(text_of(here / "kernels.csv.gz"), encoding="utf-8")
