"""Hardware counters of one GPU, sampled at a fixed interval (CUPTI's PM sampling).

Uses NVIDIA's package cupti-python: no wrapper process, no replay, no serialised kernels. How CUPTI
behaves is in sweeps/studies/dram-bytes/counters.md.

Windows are marked by events on the GPU's stream; samples carry host times. Copies of known size are
marked by events too and show up in the samples. They give the clock offset (a copy's middle by
events against its middle by samples) and the trust in the counters (bytes counted over bytes
copied).

cupti-python must use its own CUPTI instead of PyTorch's older one. Both libraries are called
libcupti.so.13, a process loads only one, and importing PyTorch loads PyTorch's. The dynamic linker
reads LD_LIBRARY_PATH only when a process starts, so the command line restarts itself once
(`run_under_own_cupti`).
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from psutil import Process

from nwor_bench.errors import ConfigError

METRICS = {"dram_read_bytes": "dram__bytes_read.sum", "dram_write_bytes": "dram__bytes_write.sum"}
"""Field names of a window, and NVIDIA's names of their counters; reads come first."""

INTERVAL_NS = 50_000
OLDEST = (13, 4)
"""Oldest cupti-python (and libcupti) with PM sampling."""

MAX_SAMPLES = 400_000
"""Most samples in one decode; each takes 3.2 kB of host memory."""

CLOCK_NS = 1_000_000_000
"""Above this difference CUPTI does not use CLOCK_REALTIME; normally they agree to 1 us."""

SEARCH_NS = 3_000_000
"""A copy is searched for within this distance of its time by the host's clock."""

COVERED = 0.999
"""A window counts only if samples cover at least this share of it."""

PERMISSION = (
    "this user may not read the GPU's counters; run as root, start the container with "
    "--cap-add=SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
)


def unavailable(reason: str) -> ConfigError:
    """The refusal of --counters dram; the reason names the remedy too."""
    return ConfigError.at("--counters dram", reason)


class PmSamples(NamedTuple):
    """Samples in order of time."""

    start_ns: NDArray[np.int64]
    """[n] on CLOCK_REALTIME, as `end_ns`."""
    end_ns: NDArray[np.int64]
    values: NDArray[np.float64]
    """[n, metrics], counts within each sample, in METRICS' order."""


class PmSampler:
    """Samples one GPU between `start` and `stop`, any number of times; `close` it when done.

    Raises ConfigError if package, library, device or permission is missing.
    """

    def __init__(self, device: int = 0, interval_ns: int = INTERVAL_NS):
        self.interval_ns = interval_ns
        self._collector = _enabled(_collector_class()(device))
        from cupti import cupti

        if abs(cupti.get_timestamp() - time.clock_gettime_ns(time.CLOCK_REALTIME)) > CLOCK_NS:
            self.close()
            raise unavailable(
                "PyTorch's profiler has run in this process and changed CUPTI's clock; "
                "measure in another process"
            )
        names = list(METRICS.values())
        try:
            self._collector.configure(metrics=names, sampling_interval=interval_ns)
        except Exception as refusal:  # CUPTI's own error types
            self.close()
            raise unavailable(
                f"this GPU does not sample {', '.join(names)} ({refusal}); "
                "use `nwor-bench profile ncu` instead"
            ) from refusal

    def start(self) -> None:
        """Start sampling."""
        self._collector.start()

    def stop(self, seconds: float) -> PmSamples:
        """Stop sampling; returns the samples since `start`, which was `seconds` ago.

        Raises ConfigError if the samples do not fit into one decode.
        """
        self._collector.stop()
        room = int(seconds * 1e9 / self.interval_ns * 1.1) + 1000
        if room > MAX_SAMPLES:
            most = MAX_SAMPLES * self.interval_ns / 1.1e9
            raise unavailable(
                f"a batch took {seconds:.0f} s and at most {most:.0f} s can be sampled; "
                "write fewer --max-new-tokens or --requests"
            )
        samples = list(self._collector.decode(room))[1:]  # the first reaches back to the last stop
        values = np.array([sample.metric_values for sample in samples], dtype=np.float64)
        return PmSamples(
            np.array([sample.start_timestamp for sample in samples], dtype=np.int64),
            np.array([sample.end_timestamp for sample in samples], dtype=np.int64),
            values.reshape(len(samples), len(METRICS)),
        )

    def close(self) -> None:
        """Release the GPU's counters."""
        self._collector.disable()


def check_counters(has_gpu: Callable[[], bool]) -> None:
    """Try to sample once. Raises ConfigError with the remedy if that fails."""
    if not has_gpu():  # first: without a GPU no installation helps
        raise unavailable(
            "there is no CUDA device here, and DRAM counters need one; leave it out, or run on "
            "a machine with an NVIDIA GPU"
        )
    collector = _collector_class()
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()  # CUPTI may find no device before CUDA is initialised
    _enabled(collector(0)).disable()


def _collector_class() -> Any:
    install = "pip install 'nwor-bench[counters]'"
    try:
        installed = version("cupti-python")
    except PackageNotFoundError as error:
        raise unavailable(f"the package cupti-python is not installed; {install}") from error
    if tuple(int(part) for part in installed.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise unavailable(f"cupti-python {installed} is too old, {oldest} is needed; {install}")
    try:
        from cupti import pm_sampling
    except (ImportError, OSError, RuntimeError) as error:
        raise unavailable(f"cupti-python does not load ({error}); {install}") from error
    return pm_sampling.Collector


def _enabled(collector: Any) -> Any:
    """The collector, enabled. Raises ConfigError with the reason if CUPTI refuses."""
    try:
        collector.enable()
    except PermissionError as error:
        raise unavailable(PERMISSION) from error
    except Exception as error:  # CUPTI's own error types; the library may be the wrong one
        paths = (region.path for region in Process().memory_maps() if "libcupti.so" in region.path)
        raise unavailable(
            f"CUPTI refuses ({error}); the library in use is {next(paths, 'not loaded')}: put "
            "the folder of the libcupti that came with cupti-python in front of LD_LIBRARY_PATH, "
            "and stop other profilers"
        ) from error
    return collector


class ClockMatch(NamedTuple):
    """The events' clock on that of the samples."""

    offset_ns: int
    """The samples' time of the events' zero."""
    copy_ratio: float
    """Bytes counted for the copies that were found, over the bytes that they read."""
    copies: int
    """Copies that were found."""


def match_clocks(
    samples: PmSamples, copies: Sequence[tuple[float, float]], copy_bytes: int, guess_ns: int
) -> ClockMatch | None:
    """Find the copies in the samples; None if no copy is found.

    Args:
        samples: the samples.
        copies: start and end of each copy in ns since the events' zero.
        copy_bytes: bytes that each copy reads.
        guess_ns: the events' zero on the samples' clock, to within SEARCH_NS.
    """
    # Before they are floats: nanoseconds of CLOCK_REALTIME do not fit into a float64.
    middles = (samples.start_ns - guess_ns + (samples.end_ns - guess_ns)) / 2
    read = samples.values[:, 0]
    offsets, counted = [], 0.0
    for start, end in copies:
        middle = (start + end) / 2
        near = np.abs(middles - middle) <= SEARCH_NS + (end - start) / 2
        total = float(read[near].sum())
        if total >= copy_bytes / 2:
            offsets.append(float((read[near] * middles[near]).sum()) / total - middle)
            counted += total
    if not offsets:
        return None
    offset_ns = guess_ns + round(float(np.median(offsets)))
    return ClockMatch(offset_ns, counted / (copy_bytes * len(offsets)), len(offsets))


def counted_between(
    samples: PmSamples, offset_ns: int, starts_ns: Sequence[float], ends_ns: Sequence[float]
) -> NDArray[np.float64]:
    """Counts in each interval, [intervals, metrics]; NaN if samples are missing.

    Times are ns since the events' zero, which is `offset_ns` on the samples' clock. A sample that
    crosses an interval's border is divided in proportion to time.
    """
    starts, ends = np.asarray(starts_ns, float), np.asarray(ends_ns, float)
    if not len(samples.start_ns):
        return np.full((len(starts), len(METRICS)), np.nan)
    # Cumulative counts at both ends of every sample: they rise within a sample, not between two.
    borders = np.column_stack([samples.start_ns, samples.end_ns]).ravel() - offset_ns
    lengths = samples.end_ns - samples.start_ns
    columns = []
    for rising in (lengths, *samples.values.T):
        level = np.repeat(np.append(0.0, np.cumsum(rising)), 2)[1:-1]
        columns.append(np.interp(ends, borders, level) - np.interp(starts, borders, level))
    covered, *counts = columns
    result: NDArray[np.float64] = np.column_stack(counts)
    result[covered < COVERED * (ends - starts)] = np.nan
    return result


DONE = "NWOR_BENCH_CUPTI"
"""Set in the restarted process, so that it restarts once. Set it yourself to choose another CUPTI
through LD_LIBRARY_PATH."""


def cupti_folder() -> Path | None:
    """Folder of the libcupti that was installed with cupti-python; None if there is none."""
    spec = find_spec("cupti")
    if spec is None or spec.origin is None:
        return None
    site = Path(spec.origin).parent.parent
    return next((path.parent for path in sorted(site.glob("nvidia/*/lib/libcupti.so*"))), None)


def cupti_environment(environ: Mapping[str, str], folder: Path | None) -> dict[str, str] | None:
    """The environment for a restart; None if no restart is needed."""
    before = environ.get("LD_LIBRARY_PATH", "")
    if folder is None or DONE in environ or str(folder) in before.split(":"):
        return None
    both = ":".join(filter(None, [str(folder), before]))
    return {**environ, "LD_LIBRARY_PATH": both, DONE: "1"}


def run_under_own_cupti() -> None:
    """Restart this process with cupti-python's library in front, if needed."""
    environ = cupti_environment(os.environ, cupti_folder())
    if environ is not None:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)
