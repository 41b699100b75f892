"""Records of a run: one per window, one per batch, and one summary per cell.

Records are frozen and plain (numbers, strings, tuples), so that they cross process
borders and JSON without their types. A value that was not measured is None, never 0.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Any

from nwor_bench.records.cell import AA, Cell, NworMode, ScvMode, label_of, recorded_cell
from nwor_bench.records.cell_result import CellResult, Verdict
from nwor_bench.records.window import SETTLING, WindowRecord

__all__ = [
    "AA",
    "FORMAT_VERSION",
    "INTERLEAVED_PHASES",
    "SETTLING",
    "AttentionBy",
    "BatchRecord",
    "Cell",
    "CellResult",
    "Interleave",
    "NworMode",
    "Phase",
    "RequestTimes",
    "RunStatus",
    "ScvMode",
    "StageBy",
    "Verdict",
    "WindowRecord",
    "columns",
    "label_of",
    "to_dict",
]

FORMAT_VERSION = 2
"""Version of run.json and records.jsonl; a reader refuses versions that it does not know.

1: first. 2: the A/A arm (`arm`), the machine's conditions a batch, findings.
"""


class StageBy(StrEnum):
    """How mode `stage` holds drafts' K/V on a GPU: in place, or copied to a buffer of its own."""

    REFERENCE = "reference"
    COPY = "copy"


class AttentionBy(StrEnum):
    """What attends the windows of full CUDA graphs on a GPU."""

    AUTO = "auto"
    """The fastest, by measurement as the graphs are captured."""
    OURS = "ours"
    """Our kernel."""
    MERGE = "merge"
    """Stock over the committed tokens and a merge, if it can; else our kernel."""
    STOCK = "stock"
    """Stock: every such window is written directly."""


class BesidePrefill(StrEnum):
    """What mode stage does with drafts in a step that runs a prefill too.

    Such a step writes the prefill's rows anyway, with the same launch in every layer, so that
    writing the drafts directly costs nothing that could be saved.
    """

    DIRECT = "direct"
    STAGE = "stage"


class Interleave(StrEnum):
    """How cells are interleaved: by windows within a batch, or by whole batches."""

    WINDOWS = "windows"
    BATCHES = "batches"


class RunStatus(StrEnum):
    """How a run ended."""

    COMPLETE = "complete"
    PARTIAL = "partial"
    FAILED = "failed"


@dataclass(frozen=True)
class RequestTimes:
    """Samples in ms, rounded to 1 us; the definitions are those of `vllm bench serve`."""

    ttft_ms: tuple[float, ...]
    """Time to first token: from a request's arrival to its first token, one a request."""

    tpot_ms: tuple[float, ...]
    """Time per output token: (e2e - TTFT) / (output tokens - 1), one a request of two tokens or
    more."""


class Phase(StrEnum):
    """Purpose of a batch; a cell's times and counters come from timed batches only."""

    GATE = "gate"
    """Greedy, untimed: tokens, acceptance and K/V of every cell against off x off."""

    INTERLEAVED_GATE = "interleaved gate"
    """Greedy, untimed: all cells interleaved; the batch is checked as a gate batch is."""

    WARMUP = "warmup"
    """Batches of off x off until window times are steady."""

    TIMED = "timed"
    """The blocks that the cells' times come from."""

    INTERLEAVED = "interleaved"
    """Timed: all cells interleaved within the batch, a few windows each. The batch is recorded as
    off x off's, its windows as their own cells'."""

    COUNTERS = "counters"
    """Untimed: each window's DRAM bytes are counted."""

    PROBE = "probe"
    """Untimed: phases of windows, in runs of older versions."""


INTERLEAVED_PHASES = frozenset({Phase.INTERLEAVED, Phase.INTERLEAVED_GATE})
"""Phases in which a batch's windows are of several cells."""


@dataclass(frozen=True)
class BatchRecord:
    """One `generate` call of one cell: a block's prompts, submitted together."""

    pair: str
    """Name of the pair of models."""
    nwor_mode: NworMode
    """The cell's NWOR mode; off for an interleaved batch."""
    scv_mode: ScvMode
    """The cell's SCV mode; off for an interleaved batch."""
    phase: Phase
    """Purpose of the batch: gate, warmup, timed, interleaved ... (`Phase`)."""
    block: int
    """Number of the block of prompts."""
    batch: int
    """Number of the batch in the run."""
    order: int
    """The cell's place in the block's random order."""
    requests: int
    """Requests in the batch."""
    prompt_tokens: int
    """Prompt tokens of all requests."""
    output_tokens: int
    """Output tokens of all requests."""
    latency_ms: float
    """Time of the whole `generate` call."""
    tokens_per_s: float
    """Output tokens per second of that time."""
    windows: int
    """Windows in the batch."""
    draft_tokens: int
    """Draft tokens that the target verified."""
    accepted_tokens: int
    """Draft tokens that the target accepted, staged or not."""
    staged_tokens: int
    """Draft tokens whose K/V was kept out of the cache."""
    committed_tokens: int
    """Staged tokens that were accepted and written to the cache."""
    vllm_num_drafts: int | None
    """vLLM's own counter over this batch: drafts (a request in a window)."""
    vllm_draft_tokens: int | None
    """vLLM's own counter over this batch: draft tokens."""
    vllm_accepted_tokens: int | None
    """vLLM's own counter over this batch: accepted tokens."""
    vllm_accepted_per_position: tuple[int, ...] | None
    """vLLM's own counter over this batch: accepted tokens by position."""
    parity: str | None
    """Result of the comparison with off x off; None if there was none."""
    prompt_digest: str
    """Digest of the block's prompts."""
    token_digests: tuple[str, ...]
    """A digest of each request's output tokens."""
    temperature: float
    """Sampling temperature."""
    seed: int
    """Seed of the batch's sampling."""
    started_at: str
    """Start, in UTC."""
    fallbacks: dict[str, int] = field(default_factory=dict)
    """Windows written directly in mode stage, by reason."""
    scv_counters: dict[str, int] = field(default_factory=dict)
    """SCV's counters over this batch."""
    first_mismatch: str | None = None
    """First difference from off x off; None if there is none."""
    arm: str | None = None
    """The cell's arm: "A/A" for the second off x off, else None."""
    conditions: dict[str, float] = field(default_factory=dict)
    """State of the machine during the batch (`instruments/conditions.py`); empty if not watched."""
    rank_disagreement: str | None = None
    """A count in which another tensor-parallel rank differs from the first."""
    request_times: RequestTimes | None = None
    """vLLM's times of each request; batches.csv has their percentiles instead."""
    request_acceptance: tuple[tuple[int, int], ...] = ()
    """Each request's windows with drafts, and the drafts accepted in them; batches.csv omits it."""
    request_tokens: tuple[tuple[int, int], ...] = ()
    """Each request's output tokens, and the accepted drafts among them; empty in older runs.
    batches.csv omits it."""

    @property
    def cell(self) -> Cell:
        """The cell that the batch is of."""
        return recorded_cell(self.pair, self.nwor_mode, self.scv_mode, self.arm)


def columns(record_type: type) -> list[str]:
    """Field names of a record type, in their fixed order (the CSV header).

    Parts of an interval stand at the place of its field.
    """
    first: tuple[str, ...] = getattr(record_type, "FIRST_COLUMNS", ())
    last: tuple[str, ...] = getattr(record_type, "LAST_COLUMNS", ())
    placed = {*first, *last, *getattr(record_type, "NO_COLUMNS", ())}
    parts: Mapping[str, Iterable[str]] = getattr(record_type, "INTERVAL_COLUMNS", {})
    between = (f.name for f in fields(record_type) if f.name not in placed)
    return [*first, *(column for name in between for column in parts.get(name, (name,))), *last]


def to_dict(record: Any) -> dict[str, Any]:
    """A record as a plain dict in the order of `columns`, ready for JSON."""
    return {name: _plain(getattr(record, name)) for name in columns(type(record))}


def _plain(value: Any) -> Any:
    """Only dataclasses are expanded: `asdict` would copy every other value too."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
