"""Windows counted late, many at a time, and kept until they are drained.

Accepted counts stay on the device: each step leaves the tensor that vLLM computed anyway, and one
copy reads those of many steps. Windows are recorded when they are drained, when the lengths of the
finished requests are known (see `step`).

In a server nobody drains: counts are read every quarter of a second, without waiting for the
device, and a few windows are recorded before each step.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from operator import add
from typing import Any
from zlib import crc32

import numpy as np
from torch import Tensor, cat

from nwor_bench.plugin.device_counts import Coming, SideReader, WrittenRows, read_all
from nwor_bench.plugin.step import Before, Step, accepted_of, has_passed, measured
from nwor_bench.records.types import SETTLING, MeasuredWindow
from nwor_bench.records.window_order import Turn

logger = logging.getLogger("vllm.nwor_bench")

MAX_UNDRAINED = 10_000
"""Windows kept if none was ever drained (`vllm serve`); of older ones only totals remain."""

MAX_BETWEEN_DRAINS = 1_000_000
"""Windows kept between two drains of a run: more than an hour of one batch."""

TOTALS = {
    "draft_tokens": "draft_tokens",
    "accepted_tokens": "accepted_tokens",
    "nwor_total_staged": "staged_tokens",
    "nwor_total_committed": "committed_tokens",
    "nwor_total_rejected": "rejected_tokens",
    "nwor_stage_operations": "stage_operations",
}
"""The field of a window that each total sums up."""


@dataclass
class Accumulator:
    """Measured windows and running totals of one worker. Plain host numbers only."""

    windows: deque[tuple[MeasuredWindow, Turn | None]] = field(default_factory=deque)
    """Windows since the last drain with their turns in an interleaved batch, oldest first."""
    totals: Counter[str] = field(default_factory=Counter)
    """Sums over all windows, by metric name; a drain leaves them."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Windows that were written directly, by reason; a drain leaves them."""
    listeners: list[Callable[[MeasuredWindow, Turn | None], None]] = field(default_factory=list)
    """Called with every window as it is added, for the metrics of `vllm serve`."""
    drained: bool = False
    """True after the first drain: then more drains are expected."""

    @property
    def most_kept(self) -> int:
        """Most windows that wait for a drain."""
        return MAX_BETWEEN_DRAINS if self.drained else MAX_UNDRAINED

    def add(self, window: MeasuredWindow, turn: Turn | None = None) -> None:
        """Keep one finished window."""
        self.windows.append((window, turn))
        if len(self.windows) > self.most_kept:
            self.windows.popleft()
        self.totals["windows"] += 1
        for name, of_window in TOTALS.items():
            self.totals[name] += getattr(window, of_window)
        if window.fallback_reason:
            self.totals["nwor_fallback_count"] += 1
            self.fallbacks[window.fallback_reason] += 1
        for listener in self.listeners:
            listener(window, turn)

    def drain(self) -> list[dict[str, Any]]:
        """Return the windows since the last drain as dicts, oldest first, and forget them."""
        drained = [
            {**vars(window), **(vars(turn) if turn else {})} for window, turn in self.windows
        ]
        self.windows.clear()
        self.drained = True
        return drained


SEALED = 16
"""If commits run, the device's counters are copied behind every step of this number, so that a
reading may end there. Steps are counted, not time: the same ones are sealed on every rank."""

READ_S = 0.25
"""How often counts that are still on the device are read. A commit that wrote something else than
was accepted is found then, and staging stops: within a second."""

COUNTED_A_STEP = 2
"""Steps that are counted before a step: their counts come many at a time, and one that waited for
all of them would be late by tens of milliseconds."""

MOST_PENDING = 2_000
"""Steps whose counts wait on the device; then one copy reads them."""


class LateCounts:
    """Turns pending steps into window records.

    Args:
        accumulator: receives the records.
        num_layers: target layers, for stage operations.
        debug: log every window; it may be switched at any time.
    """

    def __init__(self, accumulator: Accumulator, num_layers: int, debug: bool = False):
        self._accumulator = accumulator
        self._num_layers = num_layers
        self.debug = debug
        self._pending: deque[Step] = deque()
        self._arrived: deque[tuple[Step, list[int]]] = deque()
        self._sampled_before: dict[str, int] = {}
        self._finished: set[str] = set()
        self._restarted: dict[str, int] = {}
        self._last: Step | None = None
        self._alone_in_a_row = 0
        self._counters: tuple[Tensor, Tensor] | None = None
        self._take_flags: Callable[[list[int]], None] | None = None
        self._written = WrittenRows(())
        self._added = 0
        self._unsealed = False
        self._digest = 0
        self._reader = SideReader()
        self._coming: tuple[list[Step], Coming] | None = None
        self.on_overcount: Callable[[], None] | None = None
        """Called if a request got more tokens than its drafts and one."""
        self.tell_digest: Callable[[int, int], None] | None = None
        """Given the number of each sealed step and a checksum of all counts up to it."""

    @property
    def is_reading(self) -> bool:
        """True while counts are on their way to the host."""
        return self._coming is not None

    @property
    def requests_known(self) -> int:
        """Requests whose tokens are still counted: their end has not been read."""
        return len(self._sampled_before)

    def read_with(self, flags: Tensor, take: Callable[[list[int]], None], written: Tensor) -> None:
        """Read two tensors on the steps' device with every copy of counts.

        Args:
            flags: [n] int32, and who takes them.
            take: is given them.
            written: [layers] int32, rows that commits have stored in each layer, modulo 2**32.
        """
        self._counters, self._take_flags = (flags, written), take
        self._written = WrittenRows(written.tolist())

    def step_started(self, now: float, mark: Any = None) -> None:
        """A step begins on the host: the one before it lasted until now.

        `mark` is the CUDA event of its start, if steps are timed on the device too.
        """
        last, self._last = self._last, None
        if last is not None:
            last.period_s = now - last.started
            last.ended = mark

    def went_idle(self) -> None:
        """No step follows the last one: the time to the next one is no time of it."""
        self._last = None

    def note_requests(self, finished: Collection[str], restarted: Mapping[str, int]) -> None:
        """Note the requests that a step ends and restarts (see `scheduler_output`)."""
        if finished:
            self._finished.update(finished)
        if restarted:
            self._restarted.update(restarted)

    def add(self, step: Step) -> None:
        """Remember a finished step."""
        step.scheduler_output = step.batch = None  # neither is kept while its counts wait
        if self._finished:
            step.finished, self._finished = self._finished, set()
        if self._restarted:
            step.restarted, self._restarted = self._restarted, {}
        self._pending.append(step)
        self._last = step
        self._added += 1
        self._unsealed |= step.certain is not None
        if self._unsealed and self._added % SEALED == 0:
            step.sealed, step.counters = self._added, self._counters_now()
            self._unsealed = False
        step.ends_reading = not self._unsealed
        if len(self._pending) > MOST_PENDING:
            self._read_pending()

    def resolve(self, output_lengths: dict[str, int] | None) -> None:
        """Read the counts of all pending steps in one copy and record their windows.

        Args:
            output_lengths: tokens that each finished request returned, by its external name; None
                (`vllm serve`): every window counts.
        """
        self._read_pending()
        self._record_arrived(len(self._arrived), output_lengths)
        self._forget(self._finished)  # all of their steps have been counted
        self._finished = set()
        if output_lengths is not None:
            self._sampled_before.clear()
            self._last = None
            self._alone_in_a_row = 0

    def read_finished(self) -> None:
        """Read counts of steps that the device has finished: one call begins a copy, a later takes
        it.

        Waits for nothing. Needs the marks of `step_started`.
        """
        if self._coming is not None:
            if self._coming[1].is_there():
                self._take_coming()
            return
        number = 0
        for place, step in enumerate(self._pending, start=1):
            if not has_passed(step.ended):
                break
            if step.ends_reading:
                number = place
        if number:
            steps = [self._pending.popleft() for _ in range(number)]
            counts = [step.num_sampled for step in steps]
            sealed = (step.counters for step in reversed(steps) if step.counters is not None)
            self._coming = (steps, self._reader.begin(counts, next(sealed, None)))

    def settle(self, most: int) -> None:
        """Count at most so many of the steps that have been read; every window counts."""
        self._record_arrived(min(most, len(self._arrived)), None)

    def _record_arrived(self, number: int, lengths: dict[str, int] | None) -> None:
        for _ in range(number):
            self._count(*self._arrived.popleft(), lengths)

    def _take_coming(self) -> None:
        assert self._coming is not None
        (steps, coming), self._coming = self._coming, None
        self._take(steps, coming.lists())

    def _read_pending(self) -> None:
        """Bring all pending counts to the host, in one copy."""
        if self._coming is not None:
            self._take_coming()
        steps = list(self._pending)
        self._pending.clear()
        self._take(steps, read_all([step.num_sampled for step in steps], self._counters_now()))

    def _take(self, steps: list[Step], lists: list[list[int]]) -> None:
        if self._counters is not None and len(lists) > len(steps):
            counters, flags = lists.pop(), self._counters[0].numel()
            assert self._take_flags is not None
            self._take_flags(counters[:flags])
            self._written.settle(steps, lists, counters[flags:])
        for step, num_sampled in zip(steps, lists, strict=True):
            step.num_sampled = step.counters = None
            self._arrived.append((step, num_sampled))
        self._record_arrived(len(self._arrived) - self._accumulator.most_kept, None)

    def _counters_now(self) -> Tensor | None:
        """Flags and rows written behind all steps that have been launched; waits for nothing."""
        return None if self._counters is None else cat(self._counters)

    def _forget(self, req_ids: Collection[str]) -> None:
        for req_id in req_ids:
            self._sampled_before.pop(req_id, None)

    def _count(self, step: Step, num_sampled: list[int], lengths: Mapping[str, int] | None) -> None:
        """Add up each request's tokens, in the steps' order; record the window if it is one."""
        known = self._sampled_before
        self._forget(step.finished)
        known.update(step.restarted)
        step.finished, step.restarted = (), {}
        if self.tell_digest is not None:
            self._tell(step, num_sampled)
        tokens = [known.get(req_id, 0) for req_id in step.req_ids]
        known.update(zip(step.req_ids, map(add, tokens, num_sampled), strict=False))
        steady = self._alone_in_a_row >= SETTLING
        self._alone_in_a_row = self._alone_in_a_row + 1 if step.is_window_alone else 0
        if step.drafts is None:
            return
        overcount = num_sampled and bool((np.array(num_sampled) > step.drafts + 1).any())
        if overcount and self.on_overcount is not None:
            self.on_overcount()
        window = measured(step, num_sampled, Before(tokens, lengths, steady), self._num_layers)
        self._accumulator.add(window, step.turn)
        if self.debug:
            _log(step, num_sampled, window)

    def _tell(self, step: Step, num_sampled: list[int]) -> None:
        counted = (num_sampled, step.committed_tokens)
        self._digest = crc32(repr(counted).encode(), self._digest)
        if step.sealed and self.tell_digest is not None:
            self.tell_digest(step.sealed, self._digest)


def _log(step: Step, num_sampled: list[int], window: MeasuredWindow) -> None:
    assert step.drafts is not None
    logger.info(
        "nwor commit: accepted per request %s; staged %d, committed %d, rejected %d%s",
        dict(zip(step.req_ids, accepted_of(step.drafts, num_sampled).tolist(), strict=True)),
        window.staged_tokens,
        window.committed_tokens,
        window.rejected_tokens,
        f", fallback {window.fallback_reason}" if window.fallback_reason else "",
    )


def read_without_waiting(
    late: LateCounts, clock: Callable[[], float] = time.perf_counter
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Read counts of steps that the device has finished, and the rest when work runs out."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        last = clock()

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal last
            # vLLM runs one more step, an empty one, when its last request has finished.
            if not scheduler_output.total_num_scheduled_tokens:
                late.resolve(None)
            elif late.is_reading or clock() - last > READ_S:
                late.read_finished()
                last = clock()
            late.settle(COUNTED_A_STEP)
            return original(scheduler_output, *args, **kwargs)

        return execute_model

    return wrap
