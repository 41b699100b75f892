"""A kernel run as a document and as files (kernels.csv, kernels.json, kernels.md)."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from nwor_bench.microbench.cases import OURS, PEER
from nwor_bench.microbench.rows import FORMAT_VERSION, Result, Row, Status
from nwor_bench.records.facts import to_json
from nwor_bench.records.files import document as json_document
from nwor_bench.records.files import write_atomically
from nwor_bench.report.document import (
    Bullets,
    Code,
    Document,
    Headline,
    Paragraph,
    Section,
    Table,
    table,
)
from nwor_bench.report.files import to_csv
from nwor_bench.report.load import frame_of
from nwor_bench.report.markdown import render_markdown
from nwor_bench.report.text import NOT_MEASURED, decimal

NOTES = (
    "time: median time of one call over rounds. A commit writes all layers.",
    "GB/s: bytes that the call must read and write, each counted once, over the time.",
    "time/nwor: this implementation's time over our kernel's, paired by round, geometric mean "
    "with its 95 % interval; 2 means that ours takes half the time.",
    "gated_delta: a call does Qwen3-Next's 36 gated delta nets. nwor verifies each without a state "
    "write and commits all in one launch; control writes every state, as vLLM does. nwor_norm and "
    "vllm_cuda have Qwen3.5's gated norm in them.",
    "Calls are replayed from CUDA graphs, and L2 holds none of their data.",
    "Every result was checked against a torch reference before it was timed.",
)


def write_files(folder: Path, result: Result) -> list[Path]:
    """Write the three files, replacing older ones. Raises StoreError if that fails."""
    written = {
        "kernels.csv": to_csv(frame_of(Row, result.rows)),
        "kernels.json": json_document(json_content(result)),
        "kernels.md": render_markdown(document(result)),
    }
    for name, content in written.items():
        write_atomically(folder / name, content)
    return [folder / name for name in written]


def json_content(result: Result) -> dict[str, Any]:
    """Everything in kernels.json."""
    return {
        "format_version": FORMAT_VERSION,
        "kind": "kernels",
        "command": result.command,
        "elapsed_s": round(result.elapsed_s, 1),
        "device": result.facts,
        "environment": to_json(result.environment),
        "spec": asdict(result.spec),
        "rows": [asdict(row) for row in result.rows],
    }


def document(result: Result) -> Document:
    """The answer, machine, a table per kernel, and notes."""
    lead = (_headline(result), Paragraph(machine(result)), Code(result.command))
    sections = [
        Section(name, (_short_table(rows),), brief=True) for name, rows in _by_kernel(result.rows)
    ]
    listed = reasons(result.rows)
    if listed:
        bullets = Bullets(tuple(listed))
        sections.append(Section("Rows without a time, or with a remark", (bullets,), brief=True))
    sections.append(Section("How to read the tables", (Bullets(NOTES),)))
    return Document("Kernels against their peers", lead, tuple(sections))


def _headline(result: Result) -> Headline:
    """Each kernel's time against its peer's, and which results are wrong."""
    ratios = {
        (row.kernel, row.implementation): [
            each.time_over_nwor
            for each in result.rows
            if (each.kernel, each.implementation) == (row.kernel, row.implementation)
            and each.time_over_nwor is not None
        ]
        for row in result.rows
        if row.implementation == PEER[row.kernel]
    }
    text = " ".join(
        f"{kernel}: {peer} takes {significant(min(found))} to {significant(max(found))} times "
        "our time."
        for (kernel, peer), found in ratios.items()
        if found
    )
    text = text or "No ratio was measured."
    wrong = dict.fromkeys(
        f"{row.implementation}, {row.kernel} {case(row)}, {row.cache_dtype}: {row.reason}"
        for row in result.invalid
    )
    if not wrong:
        return Headline("", text)
    return Headline("INVALID", f"{text} Wrong results: {'; '.join(wrong)}.", "invalid")


def _by_kernel(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Rows by kernel and cache dtype, under `commit, fp8 cache`."""
    return [
        (f"{kernel}, {dtype} cache", list(own))
        for (kernel, dtype), own in groupby(rows, lambda row: (row.kernel, row.cache_dtype))
    ]


def _short_table(rows: Sequence[Row]) -> Table:
    headers = (case_heading(rows), "implementation", "time us", "GB/s", "time/nwor [95 %]")
    cells = [(case(row), row.implementation, *numbers(row)) for row in rows]
    return table(headers, cells, numbers_from=2)


def machine(result: Result) -> str:
    """Device, copy bandwidth, model shape, library versions and duration, in a few sentences."""
    facts, spec, shape = result.facts, result.spec, result.spec.shape
    packages = result.environment.packages or {}
    libraries = ", ".join(
        f"{n} {packages[n]}" for n in ("torch", "triton", "vllm") if packages.get(n)
    )
    return (
        f"{facts['gpu']}, {facts['l2_bytes'] / 2**20:.0f} MiB of L2; a large device-to-device copy "
        f"moves {decimal(facts['copy_gb_per_s'], 0)} GB/s. {shape.layers} layers, "
        f"{' and '.join(map(str, spec.heads))} query / K/V heads, head dim {shape.head_dim}, block "
        f"size {shape.block_size}. {libraries or 'Library versions unknown'}. It took "
        f"{result.elapsed_s:.0f} s."
    )


def microseconds(value: float | None) -> str:
    """A time in us: two decimals below 100, else none."""
    return decimal(value, 2 if value is None or value < 100 else 0)


def interval(row: Row) -> str:
    """Time over ours with its interval, as `20.1 [19.9, 20.3]`; 1 for our own row."""
    if row.implementation == OURS and row.status is Status.OK:
        return "1"
    numbers = (row.time_over_nwor, row.time_over_nwor_low, row.time_over_nwor_high)
    ratio, low, high = (significant(number) for number in numbers)
    return NOT_MEASURED if row.time_over_nwor is None else f"{ratio} [{low}, {high}]"


def significant(value: float | None) -> str:
    """A number with two decimals below 10, one below 100, else none."""
    if value is None:
        return NOT_MEASURED
    return decimal(value, 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0)


def case(row: Row) -> str:
    """The window with what the kernel's work depends on, as `8x4, 0.5` or `8x4, 1024, 24/8`."""
    more = [] if row.acceptance is None else [f"{row.acceptance:g}"]
    more += [] if row.context is None else [str(row.context)]
    more += [] if row.heads is None else [row.heads]
    return ", ".join([f"{row.requests}x{row.drafts}", *more])


def case_heading(rows: Sequence[Row]) -> str:
    """Column heading for `case`."""
    if any(row.context is not None for row in rows):
        return "window, context, heads"
    return "window, accepted" if any(row.acceptance is not None for row in rows) else "window"


def numbers(row: Row) -> tuple[str, ...]:
    """Time, GB/s and ratio of a row; the status instead of a missing time."""
    if row.status is not Status.OK:
        return (row.status if row.status is Status.INVALID else "refused", *[NOT_MEASURED] * 2)
    return (microseconds(row.time_us), decimal(row.gb_per_s, 0), interval(row))


def reasons(rows: Sequence[Row]) -> list[str]:
    """Distinct reasons as `flashinfer (commit, fp8): REFUSED: ...`, in the order of the rows."""
    found: dict[str, None] = {}
    for row in rows:
        if row.reason:
            where = f"{row.kernel}, {row.cache_dtype}"
            found[f"{row.implementation} ({where}): {row.status}: {row.reason}"] = None
    return list(found)
