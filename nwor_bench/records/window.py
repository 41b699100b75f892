"""A window's record: made in the worker, drained as a table of columns, stored by the run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from nwor_bench.records.cell import Cell, recorded_cell

SETTLING = 2
"""Windows after a prefill that are not in the steady state. The host is a step ahead, so the first
waits for the prefill, the second for the drafter's prefill, which runs after the first tokens."""


@dataclass(frozen=True, kw_only=True)
class WindowRecord:
    """One verification step with at least one draft token: counts, times in ms, and its place.

    The worker leaves the fields of the run (`pair` and those after it) at their defaults; the run
    sets them as it stores the batch.

    `staged_tokens = committed_tokens + rejected_tokens` always. A window that was written directly
    (mode off, or a fallback) has `staged_tokens` 0. A time is None if the phase did not run or was
    not measured. In an interleaved batch two cells alternate in a group of four runs, A B B A or
    B A A B, each a few windows long; `group`, `run` and `position` are None in other batches.
    """

    LAST_COLUMNS: ClassVar = ("path", "undelivered_tokens")
    """Newer than the fields below: CSV columns never move."""
    NO_COLUMNS: ClassVar = ("cell_number",)
    """Fields that are not stored."""
    FIRST_COLUMNS: ClassVar = (
        *("pair", "nwor_mode", "scv_mode", "block", "batch", "window"),
        *("num_reqs", "draft_tokens", "staged_tokens", "committed_tokens", "rejected_tokens"),
        *("stage_operations", "bytes_staged", "bytes_committed", "bytes_avoided"),
        *("fallback_reason", "wall_ms", "forward_ms", "sample_ms", "mask_ms", "commit_ms"),
    )
    """First columns of windows.csv, in a fixed order; the others follow in field order."""

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
    cell_number: int | None = None
    """Number of its cell in an interleaved batch, from worker to run only; never stored."""
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

    pair: str = ""
    """Name of the pair of models."""
    nwor_mode: str = ""
    """The cell's NWOR mode."""
    scv_mode: str = ""
    """The cell's SCV mode."""
    block: int = -1
    """Number of the block of prompts."""
    batch: int = -1
    """Number of the batch in the run."""
    window: int = -1
    """Number of the window in its batch."""
    bytes_staged: int | None = None
    """Staged tokens x cache bytes of a token over all target layers; None if unknown."""
    bytes_committed: int | None = None
    """Committed tokens x those bytes."""
    bytes_avoided: int | None = None
    """Rejected tokens x those bytes: what direct writes would have wasted."""
    arm: str | None = None
    """The cell's arm: "A/A" for the second off x off, else None."""
    dram_read_bytes: int | None = None
    """DRAM bytes read from the window's start to the next step's; in phase "counters" only."""
    dram_write_bytes: int | None = None
    """DRAM bytes written meanwhile; in phase "counters" only."""
    state_bytes_committed: int | None = None
    """Bytes of the recurrent states that the commit wrote; None if none is staged."""
    state_bytes_avoided: int | None = None
    """Bytes of those that stock would have written beside them."""

    @property
    def work_ms(self) -> float | None:
        """The GPU's own work: forward, sample, mask, commit and update; None without its clock.

        The drafter, the same in every mode, is left out, and so is a mask that the host decides.
        """
        if self.device_ms is None or self.forward_ms is None or self.sample_ms is None:
            return None
        mask_ms = 0.0 if self.scv_path == "host" else self.mask_ms or 0.0
        return self.forward_ms + self.sample_ms + mask_ms + (self.commit_ms or 0.0)

    @property
    def cell(self) -> Cell:
        """The cell that the window is of."""
        return recorded_cell(self.pair, self.nwor_mode, self.scv_mode, self.arm)


WindowTable = dict[str, list[Any]]
"""Windows as columns of plain values, by field: the form in which they leave a worker."""


def table_of(windows: Sequence[WindowRecord]) -> WindowTable:
    """Windows as columns, in the order of the fields."""
    return {f.name: [getattr(window, f.name) for window in windows] for f in fields(WindowRecord)}


def windows_of(table: Mapping[str, Iterable[Any]]) -> list[WindowRecord]:
    """The windows of a table; tuples that a process border made lists are tuples again."""
    windows = []
    for row in zip(*table.values(), strict=True):
        values: dict[str, Any] = dict(zip(table, row, strict=True))
        for name in ("accepted_per_position", "drafts_per_position"):
            values[name] = tuple(values[name])
        windows.append(WindowRecord(**values))
    return windows
