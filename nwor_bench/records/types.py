"""What a sweep writes down: one record a window, one a batch, one summary a cell.

Records are frozen and plain (numbers, strings, tuples), so that they cross process
borders and JSON without their types. A value that was not measured is None, never 0.
"""

from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar

FORMAT_VERSION = 2
"""Version of run.json and records.jsonl; a reader refuses versions that it does not know.

1: first. 2: the A/A arm (`arm`), the machine's conditions a batch, findings.
"""

AA = "A/A"
"""`arm` of the second off x off: what it differs from the first by is noise."""


class NworMode(StrEnum):
    """Where a draft token's K/V goes: straight to the cache, or staged until it is accepted."""

    OFF = "off"
    STAGE = "stage"


class ScvMode(StrEnum):
    """Who decides which drafts were accepted: the host, a graph-replayed kernel, or adaptively."""

    OFF = "off"
    GRAPH = "graph"
    ADAPTIVE = "adaptive"


class StageBy(StrEnum):
    """How mode `stage` holds drafts' K/V on a GPU: in place, or copied to a buffer of its own."""

    REFERENCE = "reference"
    COPY = "copy"


class StageL2(StrEnum):
    """How that buffer is cached: as anything else, or in L2 that is set aside for it."""

    NORMAL = "normal"
    PERSIST = "persist"


class Verdict(StrEnum):
    """What a cell's numbers allow one to say."""

    SAME = "SAME"
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    AMBIGUOUS = "AMBIGUOUS"
    INEFFECTIVE = "INEFFECTIVE"
    INVALID = "INVALID"


class RunStatus(StrEnum):
    """How a run ended."""

    COMPLETE = "complete"
    PARTIAL = "partial"
    FAILED = "failed"


@dataclass(frozen=True)
class Cell:
    """One (pair, NWOR mode, SCV mode); `pair` is the pair's name.

    `arm` is "A/A" for the second off x off, which is run and compared like any other cell so
    that the run shows its own noise floor; else None.
    """

    pair: str
    nwor_mode: NworMode
    scv_mode: ScvMode
    arm: str | None = None

    @property
    def is_baseline(self) -> bool:
        """True for off x off, against which every other cell is compared."""
        off = self.nwor_mode is NworMode.OFF and self.scv_mode is ScvMode.OFF
        return off and self.arm is None

    @property
    def label(self) -> str:
        """For people: `stage x graph`."""
        return label_of(self.nwor_mode, self.scv_mode, self.arm)

    @property
    def names(self) -> dict[str, str | None]:
        """The cell in an event of the records."""
        return {
            "pair": self.pair,
            "nwor_mode": str(self.nwor_mode),
            "scv_mode": str(self.scv_mode),
            "arm": self.arm,
        }


def label_of(nwor_mode: str, scv_mode: str, arm: str | None) -> str:
    """A cell's name for people: `stage x graph`, `off x off (A/A)`."""
    return f"{nwor_mode} x {scv_mode}" + (f" ({arm})" if arm else "")


SETTLING = 2
"""Windows behind a prefill that say nothing of any other. The host is a step ahead, so the first
waits for the prefill; the second for the drafter's own, which runs after its tokens are out."""


@dataclass(frozen=True, kw_only=True)
class WindowCounts:
    """What one worker counts in one window.

    `staged_tokens = committed_tokens + rejected_tokens` always. A window that was written directly
    (mode off, or a fallback) has `staged_tokens` 0.
    """

    num_reqs: int
    """Requests with at least one draft token in this window."""
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
    """Why the window was written directly in mode stage; None otherwise."""
    accepted_per_position: tuple[int, ...] = ()
    """[j]: requests whose draft j was accepted."""
    drafts_per_position: tuple[int, ...] = ()
    """[j]: requests that had a draft j."""
    scv_path: str | None = None
    """How acceptance was decided: "host", "device", "capture" or "graph"; None: not by SCV."""
    scv_fallback_reason: str | None = None
    """Why SCV did not decide as its mode says; None if it did."""


@dataclass(frozen=True, kw_only=True)
class WindowTimes:
    """Times of one window in ms; None where a phase did not run or was not measured."""

    wall_ms: float | None
    """From the start of this window's step to the next step's; on the V1 runner the step alone."""
    forward_ms: float | None
    """The target's forward."""
    sample_ms: float | None
    """vLLM's rejection sampling."""
    mask_ms: float | None
    """Deciding which drafts were accepted; None where the commit decides."""
    commit_ms: float | None
    """Writing the accepted tokens of all layers to the cache."""
    hook_ms: float | None = None
    """Host time that the hooks added."""
    scv_host_ms: float | None = None
    """The part of `hook_ms` that decided what was accepted, waiting included."""


UNTIMED = WindowTimes(wall_ms=None, forward_ms=None, sample_ms=None, mask_ms=None, commit_ms=None)
"""Of a window of which no time is known."""


@dataclass(frozen=True, kw_only=True)
class WindowRecord(WindowTimes, WindowCounts):
    """One verification step with at least one draft token, in one batch of one cell."""

    FIRST_COLUMNS: ClassVar = (
        *("pair", "nwor_mode", "scv_mode", "block", "batch", "window"),
        *("num_reqs", "draft_tokens", "staged_tokens", "committed_tokens", "rejected_tokens"),
        *("stage_operations", "bytes_staged", "bytes_committed", "bytes_avoided"),
        *("fallback_reason", "wall_ms", "forward_ms", "sample_ms", "mask_ms", "commit_ms"),
    )
    """The columns of windows.csv that never move; the others follow in the order of the fields."""

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
    """Staged tokens x cache bytes of a token over all target layers; None where that is unknown."""
    bytes_committed: int | None
    """The same of committed tokens."""
    bytes_avoided: int | None
    """The same of rejected tokens: what direct writes would have written in vain."""
    arm: str | None = None
    """The cell's arm: "A/A" for the second off x off, else None."""
    dram_read_bytes: int | None = None
    """DRAM bytes read from the window's start to the next step's; in phase "counters" only."""
    dram_write_bytes: int | None = None
    """DRAM bytes written meanwhile; in phase "counters" only."""
    l2_bytes: int | None = None
    """Bytes that the L2 cache moved meanwhile; in phase "counters" only."""
    kernel_launches: int | None = None
    """Kernels that the host launched meanwhile; in phase "launches" only."""
    graph_launches: int | None = None
    """CUDA graphs that the host launched meanwhile; in phase "launches" only."""
    host_syncs: int | None = None
    """Times that the host waited for the device meanwhile; in phase "launches" only."""
    async_copies: int | None = None
    """Asynchronous copies that the host began meanwhile; in phase "launches" only."""


LAUNCH_COUNTS = ("kernel_launches", "graph_launches", "host_syncs", "async_copies")
"""The window's fields that batches of phase "launches" fill."""


@dataclass(frozen=True)
class BatchRecord:
    """One `generate` call of one cell: a block's prompts, submitted together.

    `phase` is "gate" (greedy, untimed use), "warmup", "timed", "counters" or "launches".
    `order` is the cell's place in the block's random order. `vllm_*` are vLLM's own spec_decode
    counters over this batch, read while the engine lives. `token_digests` has one digest a
    request of its output token ids (parity evidence); `prompt_digest` identifies the block's
    prompts.
    `conditions` is what the machine did meanwhile (see `conditions.py`), empty if not watched.
    `rank_disagreement` says where another tensor-parallel rank counted other windows than the
    first, whose records these are.
    """

    pair: str
    nwor_mode: str
    scv_mode: str
    phase: str
    block: int
    batch: int
    order: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    latency_ms: float
    tokens_per_s: float
    windows: int
    draft_tokens: int
    accepted_tokens: int
    staged_tokens: int
    committed_tokens: int
    vllm_num_drafts: int | None
    vllm_draft_tokens: int | None
    vllm_accepted_tokens: int | None
    vllm_accepted_per_position: tuple[int, ...] | None
    parity: str | None
    prompt_digest: str
    token_digests: tuple[str, ...]
    temperature: float
    seed: int
    started_at: str
    fallbacks: dict[str, int] = field(default_factory=dict)
    scv_counters: dict[str, int] = field(default_factory=dict)
    first_mismatch: str | None = None
    arm: str | None = None
    conditions: dict[str, float] = field(default_factory=dict)
    rank_disagreement: str | None = None


@dataclass(frozen=True)
class CellResult:
    """A cell's summary: sums over its timed batches and a paired ratio to off x off.

    `ratio_to_off` is the cell's time over the baseline's on the same prompts, block by block;
    it is None where the cell is INEFFECTIVE or INVALID, and for the baseline itself.
    `compared` says which time: "window_ms", the mean time of windows of equal batch size and
    context (`matched_windows` of the cell's, `unmatched_windows` of both cells' left out), or
    "latency_ms" of whole batches where no window can be matched or was timed.
    `ratio_ci_*` is the cell's own 95 % interval; `ratio_simultaneous_*` the one that holds for all
    `simultaneous_cells` compared cells at once, and so for the one that came out best.
    `p_value` belongs to the ratio's own interval, `wilcoxon_p` to the signed rank test on the
    blocks, `bootstrap_*` to the block bootstrap's interval; `_holm` is adjusted for the number of
    cells that are compared. `smallest_effect` is the smallest relative effect that the run could
    have seen in this cell, `outlier_blocks` the blocks whose ratio stands apart (they count all
    the same).
    `arm` is "A/A" for the second off x off.
    `scv_status` judges SCV alone: "off", "ok" or "INEFFECTIVE".
    `scv_status` is "not measured", and the counts of tokens, stage operations and fallbacks are
    None, for a cell that was never timed.
    `parity` is "reference", "exact", "explained" (ties alone differ), "acceptance only",
    "INVALID" or None (not checked).
    `verdict` is one of `Verdict`, or "reference" for the baseline.
    """

    pair: str
    nwor_mode: str
    scv_mode: str
    batches: int
    windows: int
    requests: int
    output_tokens: int
    draft_tokens: int | None
    accepted_tokens: int | None
    acceptance_rate: float | None
    mean_accepted_per_window: float | None
    nwor_total_staged: int | None
    nwor_total_committed: int | None
    nwor_total_rejected: int | None
    nwor_stage_operations: int | None
    nwor_fallback_count: int | None
    bytes_staged: int | None
    bytes_committed: int | None
    bytes_avoided: int | None
    latency_ms_p50: float | None
    latency_ms_p95: float | None
    window_ms_mean: float | None
    tokens_per_s: float | None
    ratio_to_off: float | None
    ratio_ci_low: float | None
    ratio_ci_high: float | None
    parity: str | None
    verdict: str
    acceptance_length: float | None = None
    acceptance_per_position: tuple[float, ...] = ()
    nwor_unique_tokens: int | None = None
    scv_status: str = "off"
    scv_graph_hits: int | None = None
    scv_graph_captures: int | None = None
    scv_fallback_count: int | None = None
    scv_device_validations: int | None = None
    fallbacks: dict[str, int] = field(default_factory=dict)
    scv_fallbacks: dict[str, int] = field(default_factory=dict)
    reason: str | None = None
    arm: str | None = None
    compared: str | None = None
    matched_windows: int | None = None
    unmatched_windows: int | None = None
    p_value: float | None = None
    p_value_holm: float | None = None
    wilcoxon_p: float | None = None
    wilcoxon_p_holm: float | None = None
    smallest_effect: float | None = None
    outlier_blocks: tuple[int, ...] = ()
    bootstrap_low: float | None = None
    bootstrap_high: float | None = None
    ratio_simultaneous_low: float | None = None
    ratio_simultaneous_high: float | None = None
    simultaneous_cells: int | None = None

    @property
    def half_width(self) -> float | None:
        """Half the ratio's interval, a fraction; None if there is none."""
        if self.ratio_ci_low is None or self.ratio_ci_high is None:
            return None
        return (self.ratio_ci_high - self.ratio_ci_low) / 2

    @property
    def label(self) -> str:
        """For people: `stage x graph`."""
        return label_of(self.nwor_mode, self.scv_mode, self.arm)


def columns(record_type: type) -> list[str]:
    """Field names of a record type, in their fixed order (the CSV header)."""
    first: tuple[str, ...] = getattr(record_type, "FIRST_COLUMNS", ())
    return [*first, *(f.name for f in fields(record_type) if f.name not in first)]


def to_dict(record: Any) -> dict[str, Any]:
    """A record as a plain dict in the order of `columns`, ready for JSON."""
    plain = asdict(record)
    return {name: plain[name] for name in columns(type(record))}
