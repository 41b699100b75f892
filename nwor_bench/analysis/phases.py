"""Time of a window's phases, and the share of deciding acceptance."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from nwor_bench.analysis.invariants import full_windows, windows_by_batch
from nwor_bench.records.cell import Cell, cell_order
from nwor_bench.records.lines import BatchKey
from nwor_bench.records.store import RunData
from nwor_bench.records.types import BatchRecord, Phase, WindowRecord

PHASES = ("forward_ms", "sample_ms", "mask_ms", "commit_ms")


@dataclass(frozen=True)
class CellPhases:
    """Medians over a cell's windows with all requests; None if not measured.

    Attributes:
        cell: the cell that the windows belong to.
        device_ms: forward, sample, mask and commit, between events on the device.
        rest_ms: such a window's time less these: the drafter, and what the GPU does or waits for
            between two windows. No event separates them.
        window_ms: a window from start to start; this and the next two in whole batches, if any.
        hook_ms, scv_host_ms: host time that the hooks added to a window, and its part that decided
            acceptance, waiting included.
        launches, host_syncs: device launches and host waits per window for deciding acceptance.
        paths: timed windows by how they were decided: host, device, capture, graph.
    """

    cell: Cell
    device_ms: dict[str, float | None]
    rest_ms: float | None
    window_ms: float | None
    hook_ms: float | None
    scv_host_ms: float | None
    launches: float | None
    host_syncs: float | None
    paths: dict[str, int]

    @property
    def deciding_share(self) -> float | None:
        """Host time of deciding as a share of the window."""
        if self.scv_host_ms is None or not self.window_ms:
            return None
        return self.scv_host_ms / self.window_ms


def cell_phases(run: RunData) -> list[CellPhases]:
    """One entry for each cell with timed phases, in the order of the cells."""
    windows = windows_by_batch(run)
    marked = full_windows((b for b in run.batches if b.phase == Phase.PROBE), windows)
    interleaved = (b for b in run.batches if b.phase == Phase.INTERLEAVED)
    marked += [w for w in full_windows(interleaved, windows) if w.work_ms is not None]
    cells = sorted({window.cell for window in marked}, key=cell_order)
    return [_phases_of(run, cell, windows, [w for w in marked if w.cell == cell]) for cell in cells]


def _phases_of(
    run: RunData,
    cell: Cell,
    windows: dict[BatchKey, list[WindowRecord]],
    marked: Sequence[WindowRecord],
) -> CellPhases:
    timed_batches = [b for b in run.batches if b.cell == cell and b.phase == Phase.TIMED]
    timed = full_windows(timed_batches, windows) or marked
    count = sum(batch.windows for batch in timed_batches)
    paths: dict[str, int] = {}
    for window in timed:
        if window.scv_path:
            paths[window.scv_path] = paths.get(window.scv_path, 0) + 1
    return CellPhases(
        cell=cell,
        device_ms={name: _median(marked, name) for name in PHASES},
        rest_ms=_middle(_rest(window) for window in marked),
        window_ms=_median(timed, "wall_ms"),
        hook_ms=_median(timed, "hook_ms"),
        scv_host_ms=_median(timed, "scv_host_ms"),
        launches=_per_window(timed_batches, "scv_launches", count),
        host_syncs=_per_window(timed_batches, "scv_host_syncs", count),
        paths=paths,
    )


def _rest(window: WindowRecord) -> float | None:
    """What no phase explains; None if the window or its forward was not timed."""
    whole = window.wall_ms if window.device_ms is None else window.device_ms
    if whole is None or window.forward_ms is None:
        return None
    return whole - sum(getattr(window, name) or 0.0 for name in PHASES)


def _median(windows: Sequence[WindowRecord], name: str) -> float | None:
    return _middle(getattr(window, name) for window in windows)


def _middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _per_window(batches: Sequence[BatchRecord], counter: str, windows: int) -> float | None:
    """A counter over the windows; None if no batch counted it."""
    counts = [batch.scv_counters[counter] for batch in batches if counter in batch.scv_counters]
    return sum(counts) / windows if counts and windows else None
