"""Times calls on a CUDA device: rounds of a graph, or of eager launches, between two events.

Cold: a large buffer is read first, which leaves L2 full of clean lines of it, and every call of
the round has buffers of its own. Warm: every call has the same buffers. A spin kernel goes ahead
of a graph, so that the host has queued everything before the first event is reached.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch

from nwor_bench.microbench.cases import L2, LaunchMode
from nwor_bench.microbench.rounds import Replay
from nwor_bench.microbench.rows import Sample
from nwor_bench.microbench.subject import Call, Subject

MOST_NODES = 1024
"""Kernels of one graph; an implementation of many launches makes fewer calls a round."""

MOST_QUEUED = 256
"""Launches of an eager round: the queue must never fill, or the host's time is the device's."""

SPIN_CYCLES = 60_000
"""About 30 us: longer than the host takes to queue two events and a graph."""

FLUSH_OVER_L2 = 4
"""Bytes read to flush L2, over its size."""


class CudaStopwatch:
    """Makes replays on the current device."""

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.l2_bytes = int(properties.L2_cache_size)
        size = FLUSH_OVER_L2 * self.l2_bytes // 4
        self._flushed = torch.ones(size, dtype=torch.float32, device="cuda")
        self._start, self._end = (_event() for _ in range(2))

    def prepare(self, subject: Subject, l2: L2, launch: LaunchMode) -> Replay:
        """A round of this subject; makes each of its calls once before."""
        limit = MOST_NODES if launch is LaunchMode.GRAPH else MOST_QUEUED
        number = max(1, min(len(subject.calls), limit // subject.launches))
        calls = list(subject.calls[:number])
        if l2 is L2.WARM:
            calls = [subject.calls[0]] * number
        for call in calls:
            call()
        if launch is LaunchMode.EAGER:
            return self._eager(calls, l2)
        return self._captured(calls, l2)

    def copy_gb_per_s(self, size: int = 1 << 31) -> float:
        """10^9 bytes read and written a second by a copy far larger than L2: the chip's ceiling."""
        source, target = (torch.ones(size, dtype=torch.uint8, device="cuda") for _ in range(2))
        times = []
        for _ in range(5):
            self._start.record()
            target.copy_(source)
            self._end.record()
            self._end.synchronize()
            times.append(self._start.elapsed_time(self._end))
        return 2 * size / min(times) / 1e6

    def _captured(self, calls: Sequence[Call], l2: L2) -> Replay:
        graph = capture(calls)

        def replay() -> Sample:
            self._flush(l2)
            torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]
            self._start.record()
            graph.replay()
            self._end.record()
            self._end.synchronize()
            return Sample(self._start.elapsed_time(self._end) * 1000 / len(calls))

        return replay

    def _eager(self, calls: Sequence[Call], l2: L2) -> Replay:
        def replay() -> Sample:
            self._flush(l2)
            torch.cuda.synchronize()
            self._start.record()
            begun = time.perf_counter()
            for call in calls:
                call()
            host_s = time.perf_counter() - begun
            self._end.record()
            self._end.synchronize()
            device_us = self._start.elapsed_time(self._end) * 1000
            return Sample(device_us / len(calls), host_s * 1e6 / len(calls))

        return replay

    def _flush(self, l2: L2) -> None:
        if l2 is L2.COLD:
            self._flushed.sum()


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of calls, of which each has run before.

    Keep the calls as long as the graph: it reads tensors that only they may hold.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
