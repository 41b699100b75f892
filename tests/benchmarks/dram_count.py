"""DRAM bytes of what runs on a GPU, by sampled counters; for scripts without an engine."""

from collections.abc import Callable, Sequence
from time import perf_counter, sleep
from typing import NamedTuple

import torch

from nwor_bench.microbench.subject import Call
from nwor_bench.profiling.pm_sampling import PmSampler

MARGIN_S = 1e-3
"""Idle time at both ends: the first sample is dropped, and the last must have ended."""


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
    for _ in range(times):
        run()
    torch.cuda.synchronize()
    sleep(MARGIN_S)
    samples = sampler.stop(perf_counter() - begun)
    sums = [
        float(samples.values[:, samples.names.index(f"dram_{way}_bytes")].sum()) / times
        for way in DramBytes._fields
    ]
    return DramBytes(*sums)
