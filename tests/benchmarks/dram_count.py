"""DRAM bytes of what runs on a GPU, by sampled counters; for scripts without an engine."""

from collections.abc import Callable, Sequence
from functools import partial
from time import CLOCK_REALTIME, clock_gettime_ns, perf_counter, sleep
from typing import NamedTuple

import torch

from nwor_bench.microbench.subject import Call
from nwor_bench.profiling.pm_sampling import PmSampler

MARGIN_S = 1e-3
"""Idle time at both ends: samples that began before the first run do not count."""


class DramBytes(NamedTuple):
    """What was read from DRAM and written to it."""

    read: float
    write: float


def captured(*calls: Call) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the calls, each of which has run once before.

    Keep the calls as long as the graph: it reads tensors that only they may hold.
    """
    for call in dict.fromkeys(calls):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def reader(tensor: torch.Tensor, total: torch.Tensor) -> Call:
    """Reads a tensor once and writes nothing but `total`, an int64.

    As int64 itself: PyTorch would first cast a narrower tensor whole, into memory of its own.
    """
    return partial(torch.sum, tensor.view(torch.int64).flatten(), 0, out=total)


def followed(calls: Sequence[Call], by: Call) -> list[Call]:
    """Each call with another after it."""
    return [each for call in calls for each in (call, by)]


def dram_bytes(sampler: PmSampler, run: Callable[[], object], times: int) -> DramBytes:
    """Bytes of one of `times` runs, on average, after one that is not counted."""
    run()
    torch.cuda.synchronize()
    begun = perf_counter()
    sampler.start()
    sleep(MARGIN_S)
    first_ns = clock_gettime_ns(CLOCK_REALTIME)
    for _ in range(times):
        run()
    torch.cuda.synchronize()
    sleep(MARGIN_S)
    samples = sampler.stop(perf_counter() - begun)
    values = samples.values[samples.end_ns > first_ns]  # what came before may show up late
    sums = [
        float(values[:, samples.names.index(f"dram_{way}_bytes")].sum()) / times
        for way in DramBytes._fields
    ]
    return DramBytes(*sums)
