"""DRAM bytes of each window of a batch.

A window lasts from the start of its step to the start of the next one: the forward, sampling, the
commit and the drafter. `instruments.pm_sampling` says how its events meet the samples. Everything
here is in place only while counters are on.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from nwor_bench.errors import BenchError
from nwor_bench.instruments.pm_sampling import (
    INTERVAL_NS,
    METRICS,
    PmSampler,
    counted_between,
    match_clocks,
    unavailable,
)
from nwor_bench.plugin.patching import Patch
from nwor_bench.plugin.runner_hook import RunnerHook

COPIES = 3
"""Copies of known size before a batch, and as many after it."""

COPY_BYTES = 1 << 28
"""256 MiB: far more than an L2 cache holds, 0.14 ms on an H200."""

QUIET_S = 0.008
"""Pause around each copy, so that no other traffic is near it."""

TRUSTED = (0.95, 1.05)
"""Bytes counted over bytes copied: outside of this the counters are not used."""


class StreamSampler(PmSampler):
    """Counters of this process's GPU, and events on its current stream: times are read later.

    Raises ConfigError if this worker has no CUDA device or cannot sample it.
    """

    copy_bytes = COPY_BYTES

    def __init__(self, interval_ns: int = INTERVAL_NS) -> None:
        if not torch.cuda.is_available():
            raise unavailable("there is no CUDA device in this worker")
        super().__init__(torch.cuda.current_device(), interval_ns)
        self._from = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
        self._to = torch.zeros_like(self._from)
        self._zero: Any = None

    def anchor(self) -> int:
        """Set the zero on an idle stream; the host's CLOCK_REALTIME of it, in ns."""
        torch.cuda.synchronize()
        before = time.clock_gettime_ns(time.CLOCK_REALTIME)
        self._zero = self.mark()
        self._zero.synchronize()
        return (before + time.clock_gettime_ns(time.CLOCK_REALTIME)) // 2

    def mark(self) -> Any:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def ns(self, mark: Any) -> float:
        """Time of a mark in ns since the anchor (to about 0.5 us); waits for the device."""
        mark.synchronize()
        return float(self._zero.elapsed_time(mark)) * 1e6

    def copy(self) -> None:
        """Read and write `copy_bytes`."""
        self._to.copy_(self._from)


class CountedWindows:
    """Counts the bytes that the windows of one runner move, batch by batch."""

    def __init__(self, hook: RunnerHook):
        self._patch = Patch(hook.runner, "execute_model", self._wrap_execute_model)
        self._sampler: StreamSampler | None = None
        self._marks: list[tuple[Any, bool]] = []
        self._copies: list[tuple[Any, Any]] = []
        self._started = 0.0
        self._anchor_ns = 0

    def _wrap_execute_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("dummy_run") and scheduler_output.total_num_scheduled_tokens:
                is_window = bool(scheduler_output.scheduled_spec_decode_tokens)
                self._marks.append((self._opened().mark(), is_window))
            return original(scheduler_output, *args, **kwargs)

        return execute_model

    def switch(self, on: bool) -> None:
        """Open the counters and mark windows, or close them; call it between batches."""
        if on == self._patch.applied:
            return
        if on:
            self._sampler = StreamSampler()
            self._patch.apply()
            return
        self._patch.undo()
        self._opened().close()
        self._sampler = None

    def start(self) -> None:
        """Start sampling, and make the copies before a batch."""
        sampler = self._opened()
        self._marks, self._copies = [], []
        sampler.start()
        self._started = time.perf_counter()
        self._anchor_ns = sampler.anchor()
        self._copy(sampler)

    def take(self) -> dict[str, list[int | None]]:
        """End the batch: columns of the bytes of each window.

        Raises BenchError if the counters do not show the known copies correctly.
        """
        sampler = self._opened()
        self._marks.append((sampler.mark(), False))
        self._copy(sampler)
        samples = sampler.stop(time.perf_counter() - self._started)
        copies = [(sampler.ns(start), sampler.ns(end)) for start, end in self._copies]
        match = match_clocks(samples, copies, sampler.copy_bytes, self._anchor_ns)
        if match is None or not TRUSTED[0] <= match.copy_ratio <= TRUSTED[1]:
            raise BenchError.at(
                "--counters dram",
                "the counters do not show copies of known size correctly "
                f"({match or 'none is found'}); none of their values is used",
            )
        times = [sampler.ns(mark) for mark, _ in self._marks]
        counted = counted_between(samples, match.offset_ns, times[:-1], times[1:])
        of_windows = counted[[is_window for _, is_window in self._marks[:-1]]]
        return {
            name: [None if value != value else round(value) for value in column]
            for name, column in zip(METRICS, of_windows.T.tolist(), strict=True)
        }

    def _copy(self, sampler: StreamSampler) -> None:
        for _ in range(COPIES):
            time.sleep(QUIET_S)
            start = sampler.mark()
            sampler.copy()
            end = sampler.mark()
            sampler.ns(end)  # waits, so that the pause after it is one
            self._copies.append((start, end))
        time.sleep(QUIET_S)

    def _opened(self) -> StreamSampler:
        if self._sampler is None:
            raise BenchError("hardware counters are not switched on in this worker")
        return self._sampler
