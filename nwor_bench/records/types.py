"""Records of a run: one per window, one per batch, and one summary per cell.

Records are frozen and plain (numbers, strings, tuples), so that they cross process
borders and JSON without their types. A value that was not measured is None, never 0.
"""

from dataclasses import asdict, dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Any, ClassVar

from nwor_bench.records.cell import AA, Cell, NworMode, ScvMode, label_of, recorded_cell
from nwor_bench.records.cell_result import CellResult, Verdict

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
    "MeasuredWindow",
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


SETTLING = 2
"""Windows after a prefill that are not in the steady state. The host is a step ahead, so the first
waits for the prefill, the second for the drafter's prefill, which runs after the first tokens."""


@dataclass(frozen=True, kw_only=True)
class MeasuredWindow:
    """What one worker measured of one window: counts, times in ms, and its place.

    `staged_tokens = committed_tokens + rejected_tokens` always. A window that was written directly
    (mode off, or a fallback) has `staged_tokens` 0. A time is None if the phase did not run or was
    not measured. In an interleaved batch two cells alternate in a group of four runs, A B B A or
    B A A B, each a few windows long; `group`, `run` and `position` are None in other batches.
    """

    num_reqs: int
    """Requests with at least one draft token in this window; all of them at k = 0."""
    draft_tokens: int
    """Draft tokens that the target verified."""
    accepted_tokens: int = 0
    """Draft tokens that the target accepted, staged or not."""
    staged_tokens: int
    """Draft tokens whose K/V was kept out of the cache."""
    committed_tokens: int
    """Staged tokens that were accepted and written to the cache."""
    rejected_tokens: int
    """Staged tokens that were dropped."""
    stage_operations: int
    """Staged tokens x target layers."""
    uncounted_draft_tokens: int = 0
    """Draft tokens that vLLM's counters leave out: forbidden by a grammar, or of requests that had
    finished before this window."""
    uncounted_accepted_tokens: int = 0
    """Accepted tokens of requests that had finished before this window."""
    fallback_reason: str | None
    """Why the window was written directly in mode stage; None otherwise. In windows.csv SCV's
    reason follows as `scv:REASON`."""
    accepted_per_position: tuple[int, ...] = ()
    """[j]: requests whose draft j was accepted."""
    drafts_per_position: tuple[int, ...] = ()
    """[j]: requests that had a draft j."""
    scv_path: str | None = None
    """How acceptance was decided: "host", "device", "capture" or "graph"; None: not by SCV."""
    scv_fallback_reason: str | None = None
    """Why SCV did not decide as its mode says; None if it did."""
    control_tokens: int = 0
    """Draft tokens that were written directly, and that attention read from the window all the
    same; in mode control only."""
    wall_ms: float | None = None
    """From the start of this window's step to the next step's; on the V1 runner only the step."""
    forward_ms: float | None = None
    """The target's forward. On a GPU this and the next three are device times, and only interleaved
    batches have them."""
    sample_ms: float | None = None
    """Logits and vLLM's rejection sampling."""
    mask_ms: float | None = None
    """Deciding which drafts were accepted; None if the commit decides."""
    commit_ms: float | None = None
    """Writing the accepted tokens of all layers to the cache, and on a GPU vLLM's update of its
    requests, which one launch may do together; in mode off the update."""
    hook_ms: float | None = None
    """Host time that the hooks added."""
    scv_host_ms: float | None = None
    """The part of `hook_ms` that decided what was accepted, waiting included."""
    device_ms: float | None = None
    """From the start of this window's step to the next step's on the device's clock; in
    interleaved batches only."""
    group: int | None = None
    """Number of the group in its batch; None also for windows between groups."""
    run: int | None = None
    """Number of the run in its group, 0 to 3."""
    run_length: int | None = None
    """Windows of each run in this group."""
    position: int | None = None
    """Number of the window in its run; 0 follows a switch."""
    states_committed: int = 0
    """Recurrent states that the commit wrote: one a request and layer; 0 if stock wrote them."""
    states_avoided: int = 0
    """States that stock would have written beside them: one a draft token and layer."""
    states_reason: str | None = None
    """Why stock wrote the recurrent states of a staged window; None if it did not, or there are
    none."""
    path: str | None = None
    """How a staged window ran: its forward (full graph, piecewise, eager), what attended it (ours,
    ours4, ours32, merge; several joined by +), and its commit: ready (planned before, one launch),
    joined (planned, the launch that runs vLLM's update too), validated (one launch decides and
    commits), host or device (where the drafts to commit were found first); a control has none.
    None: written directly, or recorded by an older version."""
    undelivered_tokens: int | None = None
    """Accepted tokens behind a request's last one: beyond max_tokens, or behind a stop. In a server
    those that the scheduler dropped since the window before. None in older runs."""

    @property
    def work_ms(self) -> float | None:
        """The GPU's own work: forward, sample, mask, commit and update; None without its clock.

        The drafter, the same in every mode, is left out, and so is a mask that the host decides.
        """
        if self.device_ms is None or self.forward_ms is None or self.sample_ms is None:
            return None
        mask_ms = 0.0 if self.scv_path == "host" else self.mask_ms or 0.0
        return self.forward_ms + self.sample_ms + mask_ms + (self.commit_ms or 0.0)


@dataclass(frozen=True, kw_only=True)
class WindowRecord(MeasuredWindow):
    """One verification step with at least one draft token, in one batch of one cell."""

    LAST_COLUMNS: ClassVar = ("path", "undelivered_tokens")
    """Newer than the fields below: CSV columns never move."""
    FIRST_COLUMNS: ClassVar = (
        *("pair", "nwor_mode", "scv_mode", "block", "batch", "window"),
        *("num_reqs", "draft_tokens", "staged_tokens", "committed_tokens", "rejected_tokens"),
        *("stage_operations", "bytes_staged", "bytes_committed", "bytes_avoided"),
        *("fallback_reason", "wall_ms", "forward_ms", "sample_ms", "mask_ms", "commit_ms"),
    )
    """First columns of windows.csv, in a fixed order; the others follow in field order."""

    pair: str
    """Name of the pair of models."""
    nwor_mode: str
    """The cell's NWOR mode."""
    scv_mode: str
    """The cell's SCV mode."""
    block: int
    """Number of the block of prompts."""
    batch: int
    """Number of the batch in the run."""
    window: int
    """Number of the window in its batch."""
    bytes_staged: int | None
    """Staged tokens x cache bytes of a token over all target layers; None if unknown."""
    bytes_committed: int | None
    """The same of committed tokens."""
    bytes_avoided: int | None
    """The same of rejected tokens: bytes that direct writes would have wasted."""
    arm: str | None = None
    """The cell's arm: "A/A" for the second off x off, else None."""
    dram_read_bytes: int | None = None
    """DRAM bytes read from the window's start to the next step's; in phase "counters" only."""
    dram_write_bytes: int | None = None
    """DRAM bytes written meanwhile; in phase "counters" only."""
    state_bytes_committed: int | None = None
    """Bytes of the recurrent states that the commit wrote; None if none is staged."""
    state_bytes_avoided: int | None = None
    """The same of those that stock would have written beside them."""

    @property
    def cell(self) -> Cell:
        """The cell that the window is of."""
        return recorded_cell(self.pair, self.nwor_mode, self.scv_mode, self.arm)


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
    """Field names of a record type, in their fixed order (the CSV header)."""
    first: tuple[str, ...] = getattr(record_type, "FIRST_COLUMNS", ())
    last: tuple[str, ...] = getattr(record_type, "LAST_COLUMNS", ())
    placed = {*first, *last}
    return [*first, *(f.name for f in fields(record_type) if f.name not in placed), *last]


def to_dict(record: Any) -> dict[str, Any]:
    """A record as a plain dict in the order of `columns`, ready for JSON."""
    return {name: _plain(getattr(record, name)) for name in columns(type(record))}


def _plain(value: Any) -> Any:
    """Alone a dataclass needs to be taken apart: `asdict` would copy every other value too."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
