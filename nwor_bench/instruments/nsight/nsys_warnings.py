"""Steady-state windows of an Nsight Systems export, and warnings about missing data. Pure."""

from collections.abc import Sequence

from nwor_bench.instruments.nsight.nsys_export import NsysExport
from nwor_bench.instruments.nsight.nsys_windows import NsysWindow
from nwor_bench.records.types import SETTLING


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
