"""The files of a kernel run: kernels.csv, kernels.json and kernels.md."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd

from nwor_bench.microbench import text
from nwor_bench.microbench.cases import Spec
from nwor_bench.microbench.goals import GoalResult, goal_results
from nwor_bench.microbench.rows import COLUMNS, FORMAT_VERSION, Row, Status
from nwor_bench.records.environment import Environment
from nwor_bench.records.json_part import to_json
from nwor_bench.records.store import write_atomically
from nwor_bench.report.document import (
    Block,
    Bullets,
    Callout,
    Code,
    Document,
    Paragraph,
    Section,
    table,
)
from nwor_bench.report.markdown import render_markdown
from nwor_bench.report.text import decimal


@dataclass(frozen=True)
class Result:
    """A kernel run.

    Attributes:
        command: as it was typed.
        facts: of the device: `gpu`, `l2_bytes`, `copy_gb_per_s`.
        environment: as `nwor_bench.instruments.environment.collect` has it.
    """

    spec: Spec
    rows: Sequence[Row]
    command: str
    facts: dict[str, Any]
    environment: Environment
    elapsed_s: float

    @property
    def goals(self) -> list[GoalResult]:
        """The goals whose kernels were measured."""
        return goal_results(self.rows)

    @property
    def invalid(self) -> list[Row]:
        """Lines whose implementation wrote something wrong."""
        return [row for row in self.rows if row.status is Status.INVALID]


def write_files(folder: Path, result: Result) -> list[Path]:
    """Write the three files, replacing older ones. Raises StoreError if the disk refuses."""
    written = {
        "kernels.csv": csv_text(result.rows),
        "kernels.json": json_text(result),
        "kernels.md": render_markdown(document(result)),
    }
    for name, content in written.items():
        write_atomically(folder / name, content)
    return [folder / name for name in written]


def csv_text(rows: Sequence[Row]) -> str:
    """One row a line of the result; what was not measured is empty."""
    frame = pd.DataFrame([asdict(row) for row in rows], columns=list(COLUMNS))
    return frame.convert_dtypes().to_csv(index=False, float_format="%.6g")


def json_text(result: Result) -> str:
    """Everything, with the format's version."""
    goals = [
        {
            "goal": each.goal.text,
            "bound": each.goal.bound,
            "verdict": each.verdict,
            "cases": each.cases,
            "met": each.met,
            "worst": None if each.worst is None else asdict(each.worst),
        }
        for each in result.goals
    ]
    content = {
        "format_version": FORMAT_VERSION,
        "kind": "kernels",
        "command": result.command,
        "elapsed_s": round(result.elapsed_s, 1),
        "device": result.facts,
        "environment": to_json(result.environment),
        "spec": asdict(result.spec),
        "goals": goals,
        "rows": [asdict(row) for row in result.rows],
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def document(result: Result) -> Document:
    """The run as a report: the command and the machine, the goals, every line, the notes."""
    lead: list[Block] = [Code(result.command), Paragraph(machine(result))]
    wrong = dict.fromkeys(
        f"{row.implementation}, {row.kernel} {text.case(row)}, {row.cache_dtype}: {row.reason}"
        for row in result.invalid
    )
    lead += [Callout("INVALID", each) for each in wrong]
    sections = []
    if result.goals:
        headers = ("goal (graph-captured)", "verdict", "cases", "worst time/nwor [95 %]")
        rows = [text.goal_cells(each) for each in result.goals]
        sections.append(Section("Goals", (table(headers, rows, numbers_from=4),)))
    for (kernel, dtype), lines in groupby(result.rows, lambda row: (row.kernel, row.cache_dtype)):
        name = kernel if kernel == "mask" else f"{kernel}, {dtype} cache"
        sections.append(Section(name, (_lines(list(lines)),)))
    listed = text.reasons(result.rows)
    if listed:
        sections.append(
            Section("Listed without a time, or with a remark", (Bullets(tuple(listed)),))
        )
    sections.append(Section("How to read the tables", (Bullets(text.NOTES),)))
    return Document("Kernels against their peers", tuple(lead), tuple(sections))


def machine(result: Result) -> str:
    """One sentence on the device, its ceiling, the shape and the libraries."""
    facts, shape = result.facts, result.spec.shape
    packages = result.environment.packages or {}
    libraries = ", ".join(
        f"{n} {packages[n]}" for n in ("torch", "triton", "vllm") if packages.get(n)
    )
    return (
        f"{facts['gpu']}, {facts['l2_bytes'] / 2**20:.0f} MiB of L2; a large device-to-device copy "
        f"moves {decimal(facts['copy_gb_per_s'], 0)} GB/s. {shape.layers} layers, {shape.heads} "
        f"query and {shape.kv_heads} K/V heads of {shape.head_dim}, blocks of {shape.block_size}. "
        f"{libraries or 'Library versions unknown'}. It took {result.elapsed_s:.0f} s."
    )


def _lines(rows: Sequence[Row]) -> Block:
    headers = (
        text.case_heading(rows), "L2", "launch", "implementation", "launches", "time us", "GB/s",
        "of copy", "time/nwor [95 %]", "host us", "rounds",
    )  # fmt: skip
    cells = [
        (
            text.case(row),
            row.l2,
            row.launch,
            row.implementation,
            decimal(row.launches, 0),
            *text.numbers(row),
            text.microseconds(row.host_us_per_call),
            decimal(row.rounds, 0),
        )
        for row in rows
    ]
    return table(headers, cells, numbers_from=4)
