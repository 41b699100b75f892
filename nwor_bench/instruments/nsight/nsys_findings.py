"""Which windows of an Nsight Systems export means are taken over, and what it lacks. Pure."""

from collections.abc import Sequence

from nwor_bench.instruments.nsight.nsys_export import NsysExport
from nwor_bench.instruments.nsight.nsys_windows import NsysWindow
from nwor_bench.records.types import SETTLING


def settled(windows: Sequence[NsysWindow]) -> list[NsysWindow]:
    """Windows that a mean is taken over: of all requests, with an end, none of a batch's first.

    The host's first windows of a batch wait for the prefill; the last ones have fewer requests.
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
    """A sentence if there are windows and none that a mean is taken over."""
    if not windows or settled(windows):
        return None
    return (
        f"none of the {len(windows)} windows of the export counts: a mean leaves out the first "
        f"{SETTLING} of a batch, its last and those of fewer requests. Profile longer batches: "
        "write a larger --max-new-tokens"
    )


def nothing_of_the_gpu(export: NsysExport) -> str | None:
    """A sentence if no CUDA was traced, since most columns are empty then."""
    if export.calls is not None or export.work is not None:
        return None
    return (
        "Nsight Systems traced no call of CUDA: the columns on launches, waits, busy and idle time "
        "are empty. On a machine with a GPU look for CUDA errors in its messages above; a version "
        "older than the driver may not trace it"
    )


def lost_calls(export: NsysExport, windows: Sequence[NsysWindow]) -> str | None:
    """A sentence if CUDA's calls were traced, and some windows have none on record."""
    lost = sum(w.host_ms is not None and w.counts is None for w in windows)
    if export.calls is None or not lost:
        return None
    return (
        f"{lost} of {len(windows)} windows lie after the last call of CUDA that Nsight Systems has "
        "on record, and their columns are empty: it lost what came later. A version older than "
        "CUDA does so at a call that it does not know (seen while a process warms up): take a "
        "newer one, or capture a later range (--capture block)"
    )
