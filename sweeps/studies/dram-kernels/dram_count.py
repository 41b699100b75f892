"""DRAM bytes of what runs on a GPU, by sampled counters; for scripts without an engine."""

from collections.abc import Callable, Sequence
from functools import partial
from time import CLOCK_REALTIME, clock_gettime_ns, perf_counter, sleep
from typing import NamedTuple

import torch

from nwor_bench.instruments.pm_sampling import PmSampler
from nwor_bench.microbench.cuda_bench import capture
from nwor_bench.microbench.implementation import Call

MARGIN_S = 1e-3
"""Idle time at both ends: samples that ended before the first run do not count."""

LAYER_BYTES = 201_326_592
"""Weights of a layer of Llama-3.2-3B in bf16."""

LAYERS_IN_TURN = 6


class DramBytes(NamedTuple):
    """What was read from DRAM and written to it."""

    read: float
    write: float


def captured(*calls: Call) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the calls, each of which has run once before."""
    for call in dict.fromkeys(calls):
        call()
    return capture(calls)


def reader(tensor: torch.Tensor, total: torch.Tensor) -> Call:
    """Reads a tensor once and writes nothing but `total`, an int64.

    As int64 itself: PyTorch would first cast a narrower tensor whole, into memory of its own.
    """
    return partial(torch.sum, tensor.view(torch.int64).flatten(), 0, out=total)


def layer_weights(total: torch.Tensor) -> list[Call]:
    """Readers of some layers' weights, to be called in turn: together more than L2 holds."""
    sizes = (LAYERS_IN_TURN, LAYER_BYTES // 8)
    weights = torch.ones(sizes, dtype=torch.int64, device=total.device)
    return [reader(each, total) for each in weights]


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
