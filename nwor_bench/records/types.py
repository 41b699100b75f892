"""What a sweep writes down: one record a window, one a batch, one summary a cell.

Records are frozen and plain (numbers, strings, tuples), so that they cross process
borders and JSON without their types. A value that was not measured is None, never 0.
"""

from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from nwor_bench.records.batch import BatchRecord, Phase
from nwor_bench.records.cell import AA, Cell, NworMode, ScvMode, label_of, recorded_cell
from nwor_bench.records.cell_result import CellResult, Verdict

__all__ = [
    "AA",
    "FORMAT_VERSION",
    "LAUNCH_COUNTS",
    "SETTLING",
    "BatchRecord",
    "Cell",
    "CellResult",
    "NworMode",
    "Phase",
    "RunStatus",
    "ScvMode",
    "StageBy",
    "StageL2",
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


class StageL2(StrEnum):
    """How that buffer is cached: as anything else, or in L2 that is set aside for it."""

    NORMAL = "normal"
    PERSIST = "persist"


class RunStatus(StrEnum):
    """How a run ended."""

    COMPLETE = "complete"
    PARTIAL = "partial"
    FAILED = "failed"


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

    @property
    def cell(self) -> Cell:
        """The cell that the window is of."""
        return recorded_cell(self.pair, self.nwor_mode, self.scv_mode, self.arm)


LAUNCH_COUNTS = ("kernel_launches", "graph_launches", "host_syncs", "async_copies")
"""The window's fields that batches of phase "launches" fill."""


def columns(record_type: type) -> list[str]:
    """Field names of a record type, in their fixed order (the CSV header)."""
    return [f.name for f in fields(record_type)]


def to_dict(record: Any) -> dict[str, Any]:
    """A record as a plain dict, ready for JSON."""
    return asdict(record)
