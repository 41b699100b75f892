"""Rings of records with one state slot a request: each running request has one, by its id.

A commit leaves its tokens' records in the ring, and writes the state only if the next window would
not fit: about every fifth time. So **the slot that vLLM reads next is current, or the request's
ring has live rows**. Every reader of a state asks `OneSlotStates.current`; before stock does,
`OneSlotStates.make_current` writes what is missing. How many rows are live only the device knows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nwor_bench.errors import EngineError
from nwor_kernels.gated_delta.records import RecordRings
from nwor_kernels.limits import RECORD_ROWS

RINGS = "rings of states' records"
"""Subject of an error of the rings."""


class StateRings:
    """The rings of one worker's requests: at most `requests` run at a time.

    Args:
        window: most tokens of a request's window, k + 1.
    """

    def __init__(self, requests: int, window: int, device: torch.device):
        of_row = torch.zeros(requests, dtype=torch.int32, device=device)
        cursors = torch.zeros(requests + 1, 2, dtype=torch.int32, device=device)
        self.records = RecordRings(of_row, cursors, window)
        """What the kernels are given: fixed addresses, so that graphs may read them."""
        self._ring_of: dict[str, int] = {}
        self._free = list(range(requests, 0, -1))
        self._placed: list[str] | None = None
        self._live: set[str] = set()
        """Requests that have had a window since states were made current."""
        self.in_use = False
        """A step runs in which stock must not read states."""
        self._before: dict[str, tuple[int, int]] = {}

    def scheduled(self, step: Any) -> None:
        """Give back the rings of requests that end, or start over, with a SchedulerOutput."""
        started = (new.req_id for new in step.scheduled_new_reqs)
        resumed, preempted = step.scheduled_cached_reqs.resumed_req_ids, step.preempted_req_ids
        for req_id in (*step.finished_req_ids, *(preempted or ()), *resumed, *started):
            self._before.pop(req_id, None)
            self._live.discard(req_id)
            if req_id in self._ring_of:
                self._free.append(self._ring_of.pop(req_id))
                self._placed = None

    def place(self, req_ids: Sequence[str]) -> None:
        """Give every request of a step its ring, in the batch's order, an empty one if it has none.

        Raises EngineError if there are too few.
        """
        if req_ids == self._placed:
            return
        fresh = [req_id for req_id in req_ids if req_id not in self._ring_of]
        if len(fresh) > len(self._free):
            problem = f"{len(fresh)} requests start, and {len(self._free)} rings are free"
            raise EngineError.at(RINGS, problem, len(fresh))
        for req_id in fresh:
            self._ring_of[req_id] = self._free.pop()
        if fresh:
            rings = self._on_device([self._ring_of[req_id] for req_id in fresh])
            self.records.cursors.index_fill_(0, rings.long(), 0)
        self._fill([self._ring_of[req_id] for req_id in req_ids])
        self._placed = list(req_ids)

    def stock_reads(self, drafts: Mapping[str, Sequence[int]]) -> bool:
        """True if stock reads states of the step's requests that may be behind live rows: a request
        has no drafts, and has had some since states were made current, as they are to be now.

        Args:
            drafts: of each request, by id; also notes that these have live rows from now on.
        """
        assert self._placed is not None
        placed = set(self._placed)
        windows = {req_id for req_id in placed if drafts.get(req_id)}
        due = not self._live.isdisjoint(placed - windows)
        self._live = windows | (self._live - placed if due else self._live)
        self.in_use = bool(windows) and not due
        return due

    def only(self, windows: Tensor) -> None:
        """Keep the rings of some rows in place, until the next step: `windows` [rows] bool."""
        assert self._placed is not None
        rows = zip(self._placed, windows.tolist(), strict=False)
        self._fill([self._ring_of[req_id] for req_id, is_window in rows if is_window])
        self._placed = None

    def _fill(self, rings: list[int]) -> None:
        of_row = self.records.of_row
        of_row.copy_(self._on_device([*rings, *[0] * (len(of_row) - len(rings))]))

    def _on_device(self, numbers: list[int]) -> Tensor:
        """Ring numbers as int32 on the device, without waiting for it."""
        device = self.records.of_row.device
        made = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
        return made.to(device, non_blocking=True)

    def check(self, req_ids: Sequence[str], computed: Tensor) -> None:
        """Debugging: raise EngineError if the live rows are not those of the tokens since the last
        write; waits for the device. `computed`: [requests] int, each one's tokens before the step.
        """
        live = self.records.cursors[self.records.of_row[: len(req_ids)].long(), 0].tolist()
        for req_id, rows, tokens in zip(req_ids, live, computed.tolist(), strict=True):
            had, before = self._before.get(req_id, (0, tokens))
            due = had + tokens - before
            if rows != due and (rows or due + self.records.window <= RECORD_ROWS):
                problem = f"{req_id}: {rows} live rows at {tokens} tokens, {had} at {before}"
                raise EngineError.at(RINGS, problem, rows)
            self._before[req_id] = rows, tokens

    def empty(self) -> None:
        """No row of the step's requests is live any more: their states were made current."""
        for req_id in self._placed or ():
            self._before.pop(req_id, None)
