"""Record of one batch: its work, our counts, and vLLM's own counters."""

from dataclasses import dataclass, field
from enum import StrEnum

from nwor_bench.records.cell import Cell, NworMode, ScvMode, recorded_cell


@dataclass(frozen=True)
class RequestTimes:
    """Samples in ms, rounded to 1 us; the definitions are those of `vllm bench serve`."""

    ttft_ms: tuple[float, ...]
    """Time to first token: from a request's arrival to its first token, one a request."""

    tpot_ms: tuple[float, ...]
    """Time per output token: (e2e - TTFT) / (output tokens - 1), one a request of two tokens or
    more."""

    itl_ms: tuple[float, ...]
    """Inter-token latencies: from one output of a request to its next, whatever number of tokens
    a step puts out. Distinct values, in ascending order."""

    itl_counts: tuple[int, ...]
    """How often each of `itl_ms` occurred: requests that decode together share theirs."""


class Phase(StrEnum):
    """Purpose of a batch; a cell's times and counters come from timed batches only."""

    GATE = "gate"
    """Greedy, untimed: tokens, acceptance and K/V of every cell against off x off."""

    INTERLEAVED_GATE = "interleaved gate"
    """Greedy, untimed: all cells take turns, and the batch is checked as a gate batch is."""

    WARMUP = "warmup"
    """Batches of off x off until window times are steady."""

    TIMED = "timed"
    """The blocks that the cells' times come from."""

    INTERLEAVED = "interleaved"
    """Timed: all cells take turns within the batch, a few windows each. The batch is recorded as
    off x off's, its windows as their own cells'."""

    COUNTERS = "counters"
    """Untimed: each window's DRAM bytes are counted."""

    LAUNCHES = "launches"
    """Untimed: each window's CUDA calls are counted."""

    PROBE = "probe"
    """Untimed: each window's phases are timed on the device."""


INTERLEAVED_PHASES = frozenset({Phase.INTERLEAVED, Phase.INTERLEAVED_GATE})
"""Phases in which a batch's windows are of several cells."""


@dataclass(frozen=True)
class BatchRecord:
    """One `generate` call of one cell: a block's prompts, submitted together.

    `order` is the cell's place in the block's random order. `vllm_*` are vLLM's own spec_decode
    counters over this batch, read while the engine lives. `token_digests` has one digest a
    request of its output token ids (parity evidence); `prompt_digest` identifies the block's
    prompts.
    `conditions` are the machine's conditions during the batch (see `conditions.py`), empty if not
    watched. `rank_disagreement` names a count in which another tensor-parallel rank differs from
    the first, whose records these are. `request_times` are vLLM's own request metrics, None if it
    gave none; batches.csv has their percentiles instead.
    """

    pair: str
    nwor_mode: NworMode
    scv_mode: ScvMode
    phase: Phase
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
    request_times: RequestTimes | None = None

    @property
    def cell(self) -> Cell:
        """The cell that the batch is of."""
        return recorded_cell(self.pair, self.nwor_mode, self.scv_mode, self.arm)
