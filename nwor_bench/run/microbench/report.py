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
from nwor_bench.run.microbench.cases import ONE_ROW, OURS, PEER, Spec
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
    "attention: 1 row is a step without drafts; its time and that of k + 1 rows a request, drafts "
    "and one more, are paired by round. 2 means that attention takes twice as long with drafts.",
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
    one_row_us: float | None = None
    """Median time of a call with one query row a request; of kernel `attention`."""
    over_one_row: Interval | None = None

    INTERVAL_COLUMNS: ClassVar = {
        "ratio": {
            "time_over_nwor": ("value", "This time over our kernel's, geometric mean over rounds; "
                               "2 means that ours takes half the time."),
            "time_over_nwor_low": ("low", "Low end of its 95 % interval."),
            "time_over_nwor_high": ("high", "High end of it."),
        },
        "over_one_row": {
            "time_over_one_row": ("value", "This time over `one_row_us`, mean over rounds."),
            "time_over_one_row_low": ("low", "Low end of its 95 % interval."),
            "time_over_one_row_high": ("high", "High end of it."),
        },
    }  # fmt: skip

    if not TYPE_CHECKING:

        def __getattr__(self, column: str) -> float | None:
            """A part of a ratio by its column's name, for the files."""
            for field, columns in self.INTERVAL_COLUMNS.items():
                if column in columns:
                    return getattr(getattr(self, field), columns[column][0], None)
            raise AttributeError(column)

    @property
    def case(self) -> str:
        """The window with what the work depends on, as `8x4, 0.5` or `8x4, 1024, 24/8`."""
        share = None if self.acceptance is None else f"{self.acceptance:g}"
        parts = (f"{self.requests}x{self.drafts}", share, self.context, self.heads)
        return ", ".join(str(part) for part in parts if part is not None)

    @property
    def numbers(self) -> tuple[str, str, str]:
        """Time, GB/s and ratio, or of `attention` times at 1 and k + 1 rows, and ratio; a status
        instead of a missing time."""
        if self.status is not Status.OK:
            word = "INVALID" if self.status is Status.INVALID else "refused"
            return word, NOT_MEASURED, NOT_MEASURED
        shown = "1" if self.implementation == OURS else NOT_MEASURED
        if (ratio := self.ratio or self.over_one_row) is not None:
            ends = significant(ratio.low), significant(ratio.high)
            shown = f"{significant(ratio.value)} [{', '.join(ends)}]"
        time_us = significant(self.time_us)
        if self.one_row_us is not None:
            return significant(self.one_row_us), time_us, shown
        return time_us, decimal(self.gb_per_s, 0), shown


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
    """Each time over its own at one query row, or if that was not timed over ours, by round."""
    bases = {name: times.get(f"{name}{ONE_ROW}", times.get(OURS)) for name in times if name != OURS}
    return {name: paired_ratio(times[name], base) for name, base in bases.items() if base}


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
    for (kernel, dtype), group in groupby(result.rows, lambda row: (row.kernel, row.cache_dtype)):
        rows = list(group)
        if kernel == "attention":  # each backend by context
            rows.sort(key=lambda row: (row.requests, row.drafts, row.heads, row.implementation))
        cells = [(row.case, row.implementation, *row.numbers) for row in rows]
        more = {"commit": ", accepted", "gated_delta": ""}.get(kernel, ", context, heads")
        numbers = ("time us", "GB/s", "time/nwor [95 %]")
        if kernel == "attention":
            numbers = ("1 row us", "k + 1 us", "k + 1 over 1 [95 %]")
        headers = (f"window{more}", "implementation", *numbers)
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
    told: dict[str, list[float]] = {}
    for row in result.rows:
        name, ratio = row.implementation, row.over_one_row
        said = f"{name}: k + 1 query rows take {{}} times one's time."
        if ratio is None and name == PEER.get(row.kernel):
            ratio, said = row.ratio, f"{row.kernel}: {name} takes {{}} times our time."
        if ratio:
            told.setdefault(said, []).append(ratio.value)
    ranges = [f"{significant(min(each))} to {significant(max(each))}" for each in told.values()]
    text = " ".join(map(str.format, told, ranges)) or "No ratio was measured."
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
