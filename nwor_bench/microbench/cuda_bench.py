"""The bench on a CUDA device: a stopwatch, and each kernel's implementations.

The stopwatch times a round, a replayed graph, between two events. It first reads a buffer larger
than L2, and each call of the round has buffers of its own. A spin kernel runs before a graph, so
that the host has queued everything when the first event is reached.
"""

import gc
from collections.abc import Sequence
from typing import Any

import torch

from nwor_bench.instruments.conditions import ConditionMonitor
from nwor_bench.microbench.attention import attention_implementations
from nwor_bench.microbench.cases import Group, Spec
from nwor_bench.microbench.commit import commit_implementations
from nwor_bench.microbench.gated_delta import gated_delta_implementations
from nwor_bench.microbench.rows import Bench, Call, Implementation, Implementations, Replay

_BUILDERS = {
    "commit": commit_implementations,
    "verify_attention": attention_implementations,
    "gated_delta": gated_delta_implementations,
}

MOST_NODES = 1024
"""Most kernels in one graph; an implementation with many launches makes fewer calls a round."""

SPIN_CYCLES = 60_000
"""About 30 us, longer than the host needs to queue two events and a graph."""

FLUSH_OVER_L2 = 4
"""Bytes read to flush L2, as a multiple of its size."""


class CudaStopwatch:
    """Makes replays on the current CUDA device."""

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.l2_bytes = int(properties.L2_cache_size)
        size = FLUSH_OVER_L2 * self.l2_bytes // 4
        self._flushed = torch.ones(size, dtype=torch.float32, device="cuda")
        self._start, self._end = (_event() for _ in range(2))

    def prepare(self, implementation: Implementation) -> Replay:
        """A replay of one round; makes each of its calls once first."""
        number = max(1, min(len(implementation.calls), MOST_NODES // implementation.launches))
        calls = list(implementation.calls[:number])
        for call in calls:
            call()
        graph = capture(calls)

        def replay() -> float:
            self._flushed.sum()
            torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]
            self._start.record()
            graph.replay()
            self._end.record()
            self._end.synchronize()
            return float(self._start.elapsed_time(self._end)) * 1000 / len(calls)

        return replay

    def copy_gb_per_s(self, size: int = 1 << 31) -> float:
        """GB/s (10^9 bytes read and written) of a copy far larger than L2: the device's maximum."""
        source, target = (torch.ones(size, dtype=torch.uint8, device="cuda") for _ in range(2))
        times = []
        for _ in range(5):
            self._start.record()
            target.copy_(source)
            self._end.record()
            self._end.synchronize()
            times.append(self._start.elapsed_time(self._end))
        return 2 * size / min(times) / 1e6


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of calls that have each run before.

    Keep the calls as long as the graph: they may hold the only reference to its tensors.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def make_bench(spec: Spec) -> tuple[Bench, dict[str, Any]]:
    """The bench on the current CUDA device, and facts about that device for the report."""
    stopwatch = CudaStopwatch()
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "l2_bytes": stopwatch.l2_bytes,
        "copy_gb_per_s": stopwatch.copy_gb_per_s(),
    }
    device = torch.device("cuda", torch.cuda.current_device())

    def build(group: Group) -> Implementations:
        torch.manual_seed(spec.seed)
        try:
            return _BUILDERS[group.kernel](group, group.shape(spec.shape), device, spec.seed)
        except torch.OutOfMemoryError as error:
            raise MemoryError from error

    monitor = ConditionMonitor(gpus=True)

    def throttled_ms() -> float | None:
        return monitor.end().get("gpu_throttled_ms")

    return Bench(spec, build, stopwatch, throttled_ms, _release), facts


def _release() -> None:
    """Free a group's memory: graphs hold their buffers until they are collected."""
    gc.collect()
    torch.cuda.empty_cache()
