"""Percentiles of TTFT, TPOT and ITL over the requests of several batches."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nwor_bench.records.types import BatchRecord, RequestTimes

LEAST_SAMPLES = {50: 1, 95: 20, 99: 100}
"""Samples that a percentile needs: below, it would be one of the largest values."""

METRICS = ("ttft", "tpot", "itl")

PERCENTILES = tuple(f"{metric}_ms_p{point}" for metric in METRICS for point in LEAST_SAMPLES)
"""Names of the percentiles in batches.csv, cells.csv and JSON."""


def request_percentiles(batches: Sequence[BatchRecord]) -> dict[str, float | None]:
    """Each of `PERCENTILES` over all samples of the batches; None where these are too few."""
    times = [batch.request_times for batch in batches if batch.request_times is not None]
    samples = {
        "ttft": _joined([own.ttft_ms for own in times]),
        "tpot": _joined([own.tpot_ms for own in times]),
        "itl": _joined([_repeated(own) for own in times]),
    }
    return {
        f"{metric}_ms_p{point}": float(np.percentile(samples[metric], point))
        if len(samples[metric]) >= least
        else None
        for metric in METRICS
        for point, least in LEAST_SAMPLES.items()
    }


def _joined(parts: Sequence[Sequence[float] | NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.concatenate([np.asarray(part, dtype=float) for part in parts]) if parts else _NONE


def _repeated(times: RequestTimes) -> NDArray[np.float64]:
    return np.repeat(np.asarray(times.itl_ms, dtype=float), np.asarray(times.itl_counts, dtype=int))


_NONE: NDArray[np.float64] = np.array([], dtype=float)
