"""Windows counted late, many at a time.

Accepted counts stay on the device: each step leaves the tensor that vLLM computed anyway, and one
copy reads those of many steps, with the sum of rows that commits wrote so far. Windows are recorded
when they are drained: then the lengths of the finished requests are known (see `step`).

In a server nobody drains: counts are read every quarter of a second, without waiting for the
device, and a few windows are recorded before each step.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from nwor_bench.plugin.scheduler_output import external_request_id
from nwor_bench.plugin.step import Accumulator, Step, accepted_of, has_passed, measured, tokens_left
from nwor_bench.records.window import SETTLING, WindowRecord

logger = logging.getLogger("vllm.nwor_bench")

SEALED = 16
"""If commits run, the device's counters are copied behind every step of this number, so that a
reading may end there. Steps are counted, not time: the same ones are sealed on every rank."""

READ_S = 0.25
"""How often counts that are still on the device are read. A commit that wrote something else than
was accepted is found then, and staging stops: within a second."""

COUNTED_A_STEP = 2
"""Steps that are counted before a step: their counts come many at a time, and one that waited for
all of them would be late by tens of milliseconds."""

MAX_PENDING = 2_000
"""Steps whose counts wait on the device; then one copy reads them."""


def read_all(counts: Sequence[Tensor | None], also: Tensor | None) -> list[list[int]]:
    """Every step's counts as host lists, and `also` as one more if anything is copied; waits."""
    wanted = _with(counts, also)
    there = [tensor for tensor in wanted if tensor is not None]
    return _split(torch.cat(there).tolist() if there else [], wanted)


@dataclass
class Coming:
    """A copy that the device may still be making; its source is kept until it has been read."""

    _wanted: Sequence[Tensor | None]
    _on_device: Tensor | None
    _on_host: Tensor | None
    _copied: torch.cuda.Event | None
    """None if there was nothing to wait for."""

    def is_there(self) -> bool:
        """True if `lists` would not wait."""
        return self._copied is None or has_passed(self._copied)

    def lists(self) -> list[list[int]]:
        """The counts as `read_all` returns them; waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        return _split([] if self._on_host is None else self._on_host.tolist(), self._wanted)


class SideReader:
    """Copies on a stream that waits for no step in flight: only for tensors that are final."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def begin(self, counts: Sequence[Tensor | None], also: Tensor | None) -> Coming:
        """Begin to copy every step's counts, and `also` as `read_all` does."""
        wanted = _with(counts, also)
        there = [tensor for tensor in wanted if tensor is not None]
        if not there or there[0].device.type != "cuda":
            return Coming(wanted, None, torch.cat(there) if there else None, None)
        if self._stream is None:
            self._stream = torch.cuda.Stream(there[0].device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            flat = torch.cat(there)
            host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            host.copy_(flat, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        return Coming(wanted, flat, host, copied)


def _with(counts: Sequence[Tensor | None], also: Tensor | None) -> list[Tensor | None]:
    if also is None or all(tensor is None for tensor in counts):
        return list(counts)
    return [*counts, also]


def _split(flat: list[int], counts: Sequence[Tensor | None]) -> list[list[int]]:
    lists: list[list[int]] = []
    start = 0
    for tensor in counts:
        end = start + (0 if tensor is None else tensor.numel())
        lists.append(flat[start:end])
        start = end
    return lists


class WrittenRows:
    """Rows that the commits of each reading wrote.

    The counters are a sum over all commits. If it equals the accepted rows, so does each window's.
    If not, the oldest windows get the written rows and the last one the excess: its committed
    tokens are then not the accepted ones.

    Args:
        before: rows written in each layer so far, modulo 2**32.
    """

    def __init__(self, before: Sequence[int]):
        self._before = before

    def settle(
        self, steps: Sequence[Step], num_sampled: Sequence[list[int]], now: Sequence[int]
    ) -> None:
        """Set how many drafts the commit of each step of a reading wrote.

        Args:
            num_sampled: tokens that each request of each step got.
            now: rows written in each layer up to the last step, modulo 2**32.
        """
        pairs = zip(steps, num_sampled, strict=True)
        committed = [
            (step, *_rows_due(step, counts)) for step, counts in pairs if step.certain is not None
        ]
        if not committed:
            return  # rows that nobody committed are found in the next reading with a commit
        wrote = [(new - old) % 2**32 for new, old in zip(now, self._before, strict=True)]
        self._before = now
        left = in_every_layer(wrote, sum(due for _, due, _ in committed))
        for step, due, certain in committed:
            rows = min(due, left)
            left -= rows
            step.committed_tokens = max(rows - certain, 0)
        step.committed_tokens = (step.committed_tokens or 0) + left


def in_every_layer(wrote: Sequence[int], due: int) -> int:
    """One number for all layers: the least if a layer lacks rows, else the most."""
    least = min(wrote)
    return least if least < due else max(wrote)


def _rows_due(step: Step, num_sampled: list[int]) -> tuple[int, int]:
    """Rows that the step's commit had to write in each layer; how many of them are certain."""
    assert step.certain is not None
    assert step.drafts is not None
    requests = len(num_sampled)
    if step.decided_in_commit:  # by `num_sampled`: a request that got no token has no row
        requests -= num_sampled.count(0)
    certain = requests * step.certain
    return int(accepted_of(step.drafts, num_sampled).sum()) + certain, certain


class LateCounts:
    """Turns pending steps into window records; `counted` gets each step after that."""

    def __init__(
        self,
        accumulator: Accumulator,
        num_layers: int,
        debug: bool = False,
        counted: Callable[[Step], None] = lambda _: None,
    ):
        self._accumulator = accumulator
        self._counted = counted
        self._num_layers = num_layers
        self.debug = debug
        self.in_server = False
        """True: nobody drains, so only what /metrics and the live ratio need is computed."""
        self._pending: deque[Step] = deque()
        self._arrived: deque[tuple[Step, list[int]]] = deque()
        self._sampled_before: dict[str, int] = {}
        self.by_request: dict[str, list[int]] = {}
        """Windows with drafts, accepted drafts, and those of them that it got, of each request, by
        its external name."""
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
        self.on_sealed: Callable[[int, int], None] | None = None
        """Called with the number of each sealed step and a checksum of all counts up to it."""

    @property
    def is_reading(self) -> bool:
        """True while counts are on their way to the host."""
        return self._coming is not None

    def read_with(self, flags: Tensor, take: Callable[[list[int]], None], written: Tensor) -> None:
        """Read two tensors on the steps' device with every copy of counts.

        Args:
            flags: [n] int32, and who takes them.
            written: [layers] int32, rows that commits have stored in each layer, modulo 2**32.
        """
        self._counters, self._take_flags = (flags, written), take
        self._written = WrittenRows(written.tolist())

    def step_started(self, now: float, mark: Any = None) -> None:
        """A step begins: the one before it lasted until now. `mark`: CUDA event of the start."""
        last, self._last = self._last, None
        if last is not None:
            last.period_s = now - last.started
            last.ended = mark

    def went_idle(self) -> None:
        """No step follows the last one: the time to the next one is no time of it."""
        self._last = None

    def note_requests(self, finished: Collection[str], restarted: Mapping[str, int]) -> None:
        """Note the requests that have ended before a step, and those that it restarts.

        Steps without tokens name ended ones too: the last requests of a server end with one.
        """
        if finished:
            self._finished.update(finished)
        if restarted:
            self._restarted.update(restarted)

    def add(self, step: Step) -> None:
        """Remember a finished step."""
        step.scheduler_output = step.batch = step.ready = None  # none is kept while its counts wait
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
        if len(self._pending) > MAX_PENDING:
            self._read_pending()

    def resolve(self, output_lengths: dict[str, int] | None) -> None:
        """Read the counts of all pending steps in one copy and record their windows.

        Args:
            output_lengths: tokens that each finished request returned, by its external name; None
                (`vllm serve`): every window counts.
        """
        self._read_pending()
        self.settle(len(self._arrived), output_lengths)
        for req_id in self._finished:  # all of their steps have been counted
            self._sampled_before.pop(req_id, None)
        self._finished = set()
        if output_lengths is not None:
            self._sampled_before.clear()
            self._last = None
            self._alone_in_a_row = 0

    def read_finished(self) -> None:
        """Read counts of steps that the device has finished, without waiting for it.

        One call begins a copy, a later one takes it. Needs the marks of `step_started`.
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

    def settle(self, most: int, output_lengths: Mapping[str, int] | None = None) -> None:
        """Count at most so many of the steps that have been read; lengths as for `resolve`."""
        for _ in range(min(most, len(self._arrived))):
            step, num_sampled = self._arrived.popleft()
            self._count(step, num_sampled, output_lengths)
            self._counted(step)

    def _take_coming(self) -> None:
        assert self._coming is not None
        (steps, coming), self._coming = self._coming, None
        self._take(steps, coming.lists())

    def _read_pending(self) -> None:
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
        self.settle(len(self._arrived) - self._accumulator.most_kept)

    def _counters_now(self) -> Tensor | None:
        return None if self._counters is None else torch.cat(self._counters)

    def _count(self, step: Step, num_sampled: list[int], lengths: Mapping[str, int] | None) -> None:
        left = None if self.in_server else self._tokens_left(step, num_sampled, lengths)
        if self.on_sealed is not None:
            counted = (num_sampled, step.committed_tokens)
            self._digest = crc32(repr(counted).encode(), self._digest)
            if step.sealed:
                self.on_sealed(step.sealed, self._digest)
        steady = self._alone_in_a_row >= SETTLING
        self._alone_in_a_row = self._alone_in_a_row + 1 if step.only_verifies else 0
        if step.drafts is None:
            return
        report = self.on_overcount if num_sampled else None
        if report is not None and (np.array(num_sampled) > step.drafts + 1).any():
            report()
        if left is not None and lengths is not None:
            self._count_requests(step, num_sampled, left)
        window = measured(step, num_sampled, left, self._num_layers, steady=steady)
        self._accumulator.add(window, step.place)
        if self.debug:
            _log(step, num_sampled, window)

    def _tokens_left(
        self, step: Step, num_sampled: list[int], lengths: Mapping[str, int] | None
    ) -> np.ndarray:
        """`tokens_left` of the requests, none of a step that died; counts the tokens of all."""
        known = self._sampled_before
        for req_id in step.finished:
            known.pop(req_id, None)
        known.update(step.restarted)
        step.finished, step.restarted = (), {}
        tokens = [known.get(req_id, 0) for req_id in step.req_ids]
        known.update(zip(step.req_ids, map(add, tokens, num_sampled), strict=False))
        left = tokens_left(step.req_ids, tokens, lengths)
        return left if num_sampled else np.zeros_like(left)

    def _count_requests(self, step: Step, num_sampled: list[int], left: np.ndarray) -> None:
        assert step.drafts is not None
        accepted = accepted_of(step.drafts, num_sampled)
        got = np.minimum(accepted, left - 1)
        for index in np.flatnonzero((left > 0) & (step.drafts > 0)):
            name = external_request_id(step.req_ids[index])
            counts = self.by_request.setdefault(name, [0, 0, 0])
            for at, more in enumerate((1, accepted[index], got[index])):
                counts[at] += int(more)


def _log(step: Step, num_sampled: list[int], window: WindowRecord) -> None:
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
