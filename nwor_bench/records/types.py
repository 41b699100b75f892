"""What a sweep writes down: one record a window, one a batch, one summary a cell.

Records are frozen and plain (numbers, strings, tuples), so that they cross process
borders and JSON without their types. A value that was not measured is None, never 0.
"""

from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

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


@dataclass(frozen=True)
class WindowRecord:
    """One verification step with at least one draft token. Times in ms, sizes in bytes.

    `staged_tokens = committed_tokens + rejected_tokens` always; a window that was written
    directly (mode off, or a fallback) has staged_tokens 0 and its acceptance is in
    `accepted_tokens`. `stage_operations = staged_tokens x target layers`.
    `accepted_per_position[j]` counts requests whose draft j was accepted, and
    `drafts_per_position[j]` requests that had a draft j. `hook_ms` is host time that the hooks
    added, `scv_host_ms` the part of it that decided what was accepted (waiting included).
    `dram_*_bytes` and `l2_bytes` are what the GPU's counters counted from the window's start to
    the next step's, in batches of phase "counters" alone; the launches, waits of the host and
    copies are those of the host's calls meanwhile, in batches of phase "launches".
    """

    pair: str
    nwor_mode: str
    scv_mode: str
    block: int
    batch: int
    window: int
    num_reqs: int
    draft_tokens: int
    staged_tokens: int
    committed_tokens: int
    rejected_tokens: int
    stage_operations: int
    bytes_staged: int | None
    bytes_committed: int | None
    bytes_avoided: int | None
    fallback_reason: str | None
    wall_ms: float | None
    forward_ms: float | None
    sample_ms: float | None
    mask_ms: float | None
    commit_ms: float | None
    accepted_tokens: int = 0
    uncounted_draft_tokens: int = 0
    uncounted_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    drafts_per_position: tuple[int, ...] = ()
    scv_path: str | None = None
    scv_fallback_reason: str | None = None
    hook_ms: float | None = None
    scv_host_ms: float | None = None
    arm: str | None = None
    dram_read_bytes: int | None = None
    dram_write_bytes: int | None = None
    l2_bytes: int | None = None
    kernel_launches: int | None = None
    graph_launches: int | None = None
    host_syncs: int | None = None
    async_copies: int | None = None


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
    return [f.name for f in fields(record_type)]


def to_dict(record: Any) -> dict[str, Any]:
    """A record as a plain dict, ready for JSON."""
    return asdict(record)
