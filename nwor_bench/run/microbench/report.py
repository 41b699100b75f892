"""The rows of a kernel run, as a document and as files (kernels.csv, kernels.json, kernels.md)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nwor_bench.records import files
from nwor_bench.records.facts import Environment, to_json
from nwor_bench.records.types import to_dict
from nwor_bench.report import document as blocks
from nwor_bench.report.load import frame_of, to_csv
from nwor_bench.report.markdown import render_markdown
from nwor_bench.report.text import NOT_MEASURED, decimal
from nwor_bench.run.microbench.cases import OURS, PEER, Spec
from nwor_bench.stats.interval import Interval
from nwor_bench.stats.paired import paired_ratio

FORMAT_VERSION = 4
"""Version of kernels.json and kernels.csv; increase it when a column changes its meaning."""

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


class Status(StrEnum):
    """A row has a time, or the reason why not."""

    OK = "OK"
    INVALID = "INVALID"
    """A wrong result, which was not timed."""
    REFUSED = "REFUSED"
    """Not installed, does not support this case, or raised an error."""


@dataclass(frozen=True)
class KernelRow:
    """A row of the table; None if not measured."""

    kernel: str
    """The kernel whose work the row does."""
    implementation: str
    """`nwor`, or the peer's name."""
    status: Status
    """`OK`, `INVALID` (wrong result) or `REFUSED`."""
    cache_dtype: str
    """Data type of the cache."""
    requests: int
    """Requests per call."""
    drafts: int
    """Draft tokens per request."""
    acceptance: float | None
    """Accepted over draft tokens."""
    context: int | None
    """Tokens per request in the cache."""
    staged_tokens: int
    """Draft tokens per call."""
    bytes_moved: int | None = None
    """Bytes that a call must read and write, each counted once."""
    rounds: int | None = None
    """Timed rounds."""
    time_us: float | None = None
    """Median time of a call."""
    gb_per_s: float | None = None
    """`bytes_moved` over `time_us`, in 10^9 bytes/s."""
    ratio: Interval | None = None
    reason: str = ""
    """Why there is no time, or that the GPU throttled."""
    heads: str | None = None
    """Query heads / K/V heads of attention."""

    INTERVAL_COLUMNS: ClassVar = {
        "ratio": {
            "time_over_nwor": ("value", "This time over our kernel's, geometric mean over rounds; "
                               "2 means that ours takes half the time."),
            "time_over_nwor_low": ("low", "Low end of its 95 % interval."),
            "time_over_nwor_high": ("high", "High end of it."),
        }
    }  # fmt: skip

    if not TYPE_CHECKING:

        def __getattr__(self, column: str) -> float | None:
            """A part of the ratio by its column's name, for the files."""
            part, _ = self.INTERVAL_COLUMNS["ratio"].get(column, ("", ""))
            if not part:
                raise AttributeError(column)
            return getattr(self.ratio, part, None)

    @property
    def case(self) -> str:
        """The window with what the work depends on, as `8x4, 0.5` or `8x4, 1024, 24/8`."""
        share = None if self.acceptance is None else f"{self.acceptance:g}"
        parts = (f"{self.requests}x{self.drafts}", share, self.context, self.heads)
        return ", ".join(str(part) for part in parts if part is not None)

    @property
    def numbers(self) -> tuple[str, str, str]:
        """Time, GB/s and ratio with its interval; the status instead of a missing time."""
        if self.status is not Status.OK:
            word = "INVALID" if self.status is Status.INVALID else "refused"
            return word, NOT_MEASURED, NOT_MEASURED
        ratio = "1" if self.implementation == OURS else NOT_MEASURED
        if self.ratio is not None:
            ends = significant(self.ratio.low), significant(self.ratio.high)
            ratio = f"{significant(self.ratio.value)} [{', '.join(ends)}]"
        time_us = decimal(self.time_us, 2 if (self.time_us or 0) < 100 else 0)
        return time_us, decimal(self.gb_per_s, 0), ratio


@dataclass(frozen=True)
class Result:
    """One kernel run."""

    spec: Spec
    rows: Sequence[KernelRow]
    command: str
    facts: Mapping[str, Any]
    """Facts of the device: `gpu`, `l2_bytes`, `copy_gb_per_s`."""
    environment: Environment
    elapsed_s: float

    @property
    def invalid(self) -> list[KernelRow]:
        """Rows whose implementation gave a wrong result."""
        return [row for row in self.rows if row.status is Status.INVALID]


def ratios(times: Mapping[str, Sequence[float]]) -> dict[str, Interval]:
    """Each time over ours, paired by round."""
    if OURS not in times:
        return {}
    ours = times[OURS]
    return {name: paired_ratio(samples, ours) for name, samples in times.items() if name != OURS}


def half_widths(times: Mapping[str, Sequence[float]]) -> list[float | None]:
    """Relative half width of each ratio's interval; None while there is no interval."""
    every = ratios(times).values()
    return [ratio.half_width / ratio.value if ratio.is_bounded else None for ratio in every]


def significant(value: float | None) -> str:
    """A number with two decimals below 10, one below 100, else none."""
    return decimal(value, 0 if value is None or value >= 100 else 1 if value >= 10 else 2)


def write_files(folder: Path, result: Result) -> list[Path]:
    """Write the three files, replacing older ones. Raises StoreError if that fails."""
    written = {
        "kernels.csv": to_csv(frame_of(KernelRow, result.rows)),
        "kernels.json": files.document(json_content(result)),
        "kernels.md": render_markdown(document(result)),
    }
    for name, content in written.items():
        files.write_atomically(folder / name, content)
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
        "rows": [to_dict(row) for row in result.rows],
    }


def document(result: Result) -> blocks.Document:
    """The answer, machine, a table per kernel, and notes."""
    lead = (_headline(result), blocks.Paragraph(_machine(result)), blocks.Code(result.command))
    sections = []
    for (kernel, dtype), rows in groupby(result.rows, lambda row: (row.kernel, row.cache_dtype)):
        cells = [(row.case, row.implementation, *row.numbers) for row in rows]
        more = {"commit": ", accepted", "verify_attention": ", context, heads"}.get(kernel, "")
        headers = (f"window{more}", "implementation", "time us", "GB/s", "time/nwor [95 %]")
        shown = blocks.table(headers, cells, numbers_from=2)
        sections.append(blocks.Section(f"{kernel}, {dtype} cache", (shown,), brief=True))
    listed = dict.fromkeys(
        f"{row.implementation} ({row.kernel}, {row.cache_dtype}): {row.status}: {row.reason}"
        for row in result.rows if row.reason
    )  # fmt: skip
    if listed:
        bullets = blocks.Bullets(tuple(listed))
        sections.append(
            blocks.Section("Rows without a time, or with a remark", (bullets,), brief=True)
        )
    sections.append(blocks.Section("How to read the tables", (blocks.Bullets(NOTES),)))
    return blocks.Document("Kernels against their peers", lead, tuple(sections))


def _headline(result: Result) -> blocks.Headline:
    """Each kernel's time against its peer's, and which results are wrong."""
    sentences = []
    for kernel, peer in PEER.items():
        rows = [row for row in result.rows if (row.kernel, row.implementation) == (kernel, peer)]
        values = [row.ratio.value for row in rows if row.ratio]
        if values:
            low, high = significant(min(values)), significant(max(values))
            sentences.append(f"{kernel}: {peer} takes {low} to {high} times our time.")
    text = " ".join(sentences) or "No ratio was measured."
    wrong = [
        f"{row.implementation}, {row.kernel} {row.case}, {row.cache_dtype}: {row.reason}"
        for row in result.invalid
    ]
    if not wrong:
        return blocks.Headline("", text)
    return blocks.Headline("INVALID", f"{text} Wrong results: {'; '.join(wrong)}.", "invalid")


def _machine(result: Result) -> str:
    """Device, copy bandwidth, model shape, library versions and duration, in a few sentences."""
    facts, spec, shape = result.facts, result.spec, result.spec.shape
    packages = result.environment.packages or {}
    names = [f"{n} {packages[n]}" for n in ("torch", "triton", "vllm") if packages.get(n)]
    return (
        f"{facts['gpu']}, {facts['l2_bytes'] / 2**20:.0f} MiB of L2; a large device-to-device copy "
        f"moves {decimal(facts['copy_gb_per_s'], 0)} GB/s. {shape.layers} layers, "
        f"{' and '.join(map(str, spec.heads))} query / K/V heads, head dim {shape.head_dim}, block "
        f"size {shape.block_size}. {', '.join(names) or 'Library versions unknown'}. It took "
        f"{result.elapsed_s:.0f} s."
    )
