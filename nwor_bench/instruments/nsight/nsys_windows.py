"""Windows of an Nsight Systems export: calls, device time, idle time, bandwidth. Pure.

- Host: a window lasts from the start of its range to the start of the next one in its batch.
- Device: a window is the work launched by the host calls in that time. It lasts until the next
  window's work begins; time without work is idle. Work in a CUDA graph belongs to the graph's
  launch, and gaps between a graph's nodes are idle.
- The last window of a batch has no end: values that need one are None.
- Nsight Systems may stop recording (seen: 2023.4 at a call that CUDA 12.4 does not have). Values of
  windows after the last recorded call of their process are None, not 0.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from nwor_bench.instruments.launches import HostCall, count_calls, kind_of
from nwor_bench.instruments.nsight.nsys_export import (
    PROCESS_ID,
    DeviceWork,
    MetricSample,
    NsysExport,
    NvtxRange,
)
from nwor_bench.records.types import SETTLING


@dataclass(frozen=True)
class NsysWindow:
    """One window; values that were not traced are None.

    Attributes:
        cell: label such as `stage x graph`, from its batch (the A/A arm differs from off x off).
        batch, window: numbers as in batches.csv and windows.csv; batch is None outside a batch.
        requests: requests of its step.
        host_ms: time from its start to the next window's.
        counts: host calls by kind (see `launches`).
        wait_ms: host time in `host_syncs` and in copies that wait for the GPU.
        gpu_operations: kernels, copies and fills on the GPU, inside and outside graphs.
        busy_ms, idle_ms: GPU time with and without work, until the next window's work.
        metrics: mean of each sampled GPU metric, by NVIDIA's name.
        process: process id of the worker (rank).
    """

    cell: str | None
    batch: int | None
    window: int | None
    requests: int | None
    host_ms: float | None
    counts: dict[str, int] | None
    wait_ms: float | None
    gpu_operations: int | None
    busy_ms: float | None
    idle_ms: float | None
    metrics: dict[str, float] | None
    process: int | None = None

    def row(self) -> dict[str, object]:
        """The values as one flat row."""
        plain = {
            "cell": self.cell,
            "batch": self.batch,
            "window": self.window,
            "process": self.process,
            "requests": self.requests,
            "host_ms": self.host_ms,
            "wait_ms": self.wait_ms,
            "busy_ms": self.busy_ms,
            "idle_ms": self.idle_ms,
            "gpu_operations": self.gpu_operations,
        }
        return {**plain, **(self.counts or {}), **(self.metrics or {})}


def windows_of(export: NsysExport) -> list[NsysWindow]:
    """All windows of the export, process by process, each in order of time."""
    by_process: dict[int | None, list[NvtxRange]] = {}
    for window in export.ranges:
        if window.name == "window":
            by_process.setdefault(window.process, []).append(window)
    batches = [r for r in export.ranges if r.name == "batch"]
    found: list[NsysWindow] = []
    for process, windows in by_process.items():
        found += _windows_of_one(export, process, windows, batches)
    return found


def _windows_of_one(
    export: NsysExport,
    process: int | None,
    windows: Sequence[NvtxRange],
    batches: Sequence[NvtxRange],
) -> list[NsysWindow]:
    """The windows of one process, with its calls and work."""
    places = [_batch_of(window, batches) for window in windows]
    requests = _requests([r for r in export.ranges if r.process == process], windows)
    ends = _host_ends(windows, places)
    calls = None if export.calls is None else export.calls.get(process)
    traced = ends if calls is None else _heard(ends, calls[-1].start_ns)
    counts, waits = _counts(calls, windows, traced), _waits(calls, windows, traced)
    own = None if export.work is None else [w for w in export.work if w.process == process]
    work = _work_of(own or None, windows, ends)
    found = []
    for place, window in enumerate(windows):
        span = None if traced[place] is None else _device_span(work, place, places)
        busy = _busy_ns(work[place], span) if work is not None else None
        batch = places[place]
        end = ends[place]
        found.append(
            NsysWindow(
                cell=window.category if batch is None else batch.category,
                batch=None if batch is None else batch.payload,
                window=window.payload,
                requests=requests[place],
                host_ms=None if end is None else (end - window.start_ns) / 1e6,
                counts=counts[place],
                wait_ms=waits[place],
                gpu_operations=None if span is None or work is None else len(work[place]),
                busy_ms=None if busy is None else busy / 1e6,
                idle_ms=None if span is None or busy is None else (span[1] - span[0] - busy) / 1e6,
                metrics=_metrics(export.samples, span),
                process=None if process is None else process & PROCESS_ID,
            )
        )
    return found


def _heard(ends: Sequence[int | None], until: int) -> list[int | None]:
    """The ends; None if no call was recorded at or after them."""
    return [None if end is None or end > until else end for end in ends]


def _requests(ranges: Sequence[NvtxRange], windows: Sequence[NvtxRange]) -> list[int | None]:
    """Requests of each window's step, from the payload of its range `sample`."""
    samples = [r for r in ranges if r.name == "sample"]
    starts = [r.start_ns for r in samples]
    found = []
    for window in windows:
        place = bisect_left(starts, window.start_ns)
        inside = place < len(samples) and starts[place] < window.end_ns
        found.append(samples[place].payload if inside else None)
    return found


def _batch_of(window: NvtxRange, batches: Iterable[NvtxRange]) -> NvtxRange | None:
    return next((b for b in batches if b.start_ns <= window.start_ns < b.end_ns), None)


def _host_ends(
    windows: Sequence[NvtxRange], places: Sequence[NvtxRange | None]
) -> list[int | None]:
    """End of each window: the start of the next one in its batch; None for the last."""
    following = [*windows[1:], None]
    batches = [*places[1:], None]
    return [
        None if after is None or batch is not places[place] else after.start_ns
        for place, (after, batch) in enumerate(zip(following, batches, strict=True))
    ]


def _counts(
    calls: Sequence[HostCall] | None, windows: Sequence[NvtxRange], ends: Sequence[int | None]
) -> list[dict[str, int] | None]:
    if calls is None:
        return [None for _ in windows]
    starts = [window.start_ns for window in windows]
    closed = [end if end is not None else start for start, end in zip(starts, ends, strict=True)]
    counts = count_calls(calls, starts, closed)
    return [None if end is None else own for own, end in zip(counts, ends, strict=True)]


def _waits(
    calls: Sequence[HostCall] | None, windows: Sequence[NvtxRange], ends: Sequence[int | None]
) -> list[float | None]:
    """Host time in ms in calls that wait for the GPU, for each window."""
    if calls is None:
        return [None for _ in windows]
    waiting = [
        call
        for call in calls
        if call.end_ns is not None and (call.to_pageable or kind_of(call.name) == "host_syncs")
    ]
    starts = [call.start_ns for call in waiting]
    found: list[float | None] = []
    for window, end in zip(windows, ends, strict=True):
        if end is None:
            found.append(None)
            continue
        own = waiting[bisect_left(starts, window.start_ns) : bisect_left(starts, end)]
        found.append(sum(call.end_ns - call.start_ns for call in own if call.end_ns) / 1e6)
    return found


def _work_of(
    work: Sequence[DeviceWork] | None, windows: Sequence[NvtxRange], ends: Sequence[int | None]
) -> list[list[DeviceWork]] | None:
    """Device work launched by each window's calls; None if no device work was traced."""
    if work is None:
        return None
    found: list[list[DeviceWork]] = [[] for _ in windows]
    starts = [window.start_ns for window in windows]
    for item in work:
        if item.called_ns is None:
            continue
        place = bisect_right(starts, item.called_ns) - 1
        if place < 0:
            continue
        end = ends[place]
        if item.called_ns < (windows[place].end_ns if end is None else end):
            found[place].append(item)
    return found


def _device_span(
    work: list[list[DeviceWork]] | None, place: int, batches: Sequence[NvtxRange | None]
) -> tuple[int, int] | None:
    """Start of the window's work, and start of the next window's work; None if unknown."""
    if work is None or place + 1 >= len(work) or batches[place] is not batches[place + 1]:
        return None
    if not work[place] or not work[place + 1]:
        return None
    start = min(item.start_ns for item in work[place])
    end = min(item.start_ns for item in work[place + 1])
    return (start, end) if end > start else None


def _busy_ns(work: Sequence[DeviceWork], span: tuple[int, int] | None) -> int | None:
    """Time within the span in which at least one kernel or copy runs."""
    if span is None:
        return None
    total, reached = 0, span[0]
    for item in sorted(work, key=lambda item: item.start_ns):
        start, end = max(item.start_ns, reached), min(item.end_ns, span[1])
        if end > start:
            total += end - start
            reached = end
    return total


def _metrics(
    samples: Sequence[MetricSample] | None, span: tuple[int, int] | None
) -> dict[str, float] | None:
    if samples is None or span is None:
        return None
    inside: dict[str, list[float]] = {}
    for sample in samples:
        if span[0] <= sample.at_ns < span[1]:
            inside.setdefault(sample.name, []).append(sample.value)
    return {name: fmean(values) for name, values in inside.items()}


def settled(windows: Sequence[NsysWindow]) -> list[NsysWindow]:
    """Windows in the steady state, over which means are taken.

    Leaves out the first windows of a batch, where the host waits for the prefill; the last window,
    which has no end; and windows with fewer requests than the batch.
    """
    full: dict[tuple[int | None, int | None], int] = {}
    for w in windows:
        full[w.process, w.batch] = max(full.get((w.process, w.batch), 0), w.requests or 0)
    return [
        w
        for w in windows
        if w.host_ms is not None
        and (w.requests or 0) == full[w.process, w.batch]
        and (w.window or 0) >= SETTLING
    ]


def nothing_settled(windows: Sequence[NsysWindow]) -> str | None:
    """A warning if no window is in the steady state; else None."""
    if not windows or settled(windows):
        return None
    return (
        f"none of the export's {len(windows)} windows counts: means leave out each batch's first "
        f"{SETTLING} windows, its last one, and those with fewer requests. Profile longer batches: "
        "use a larger --max-new-tokens"
    )


def nothing_of_the_gpu(export: NsysExport) -> str | None:
    """A warning if no CUDA call was traced (most columns are then empty); else None."""
    if export.calls is not None or export.work is not None:
        return None
    return (
        "Nsight Systems traced no CUDA call: the columns on launches, waits, busy and idle time "
        "are empty. On a machine with a GPU look for CUDA errors in its messages above; a version "
        "older than the driver may not trace CUDA"
    )


def lost_calls(export: NsysExport, windows: Sequence[NsysWindow]) -> str | None:
    """A warning if CUDA calls were traced but some windows have none; else None."""
    lost = sum(w.host_ms is not None and w.counts is None for w in windows)
    if export.calls is None or not lost:
        return None
    return (
        f"{lost} of {len(windows)} windows come after the last CUDA call that Nsight Systems "
        "recorded, so their columns are empty. A version older than CUDA stops at a call that it "
        "does not know (seen during warm-up): use a newer version, or capture a later range "
        "(--capture block)"
    )
