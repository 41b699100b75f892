"""Which groups of interleaved windows count, and why others do not. Pure.

One rule for the records of a sweep and for the windows of a server.
"""

from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass
from math import isfinite

from nwor_bench.records.fallback_reasons import LeftOut
from nwor_bench.records.types import WindowRecord
from nwor_bench.records.window_order import WindowPlace, places_of_group
from nwor_bench.stats.paired import abba_effect


@dataclass(frozen=True)
class Compared:
    """A group that counts."""

    windows: Sequence[WindowRecord]
    """Windows that are compared, in the order in which they ran."""
    treated: Sequence[bool]
    """For each of them, True if it is of the cell that is not the reference."""
    host: float
    """Mean log time of that cell's windows less that of the reference's, on the host's clock."""
    device: float | None
    """`host` on the device's clock; None if there is none."""


def judge_group(
    members: Sequence[tuple[WindowRecord, WindowPlace]],
    *,
    used: Container[int],
    size: Callable[[WindowRecord], Hashable],
    drafts: Sequence[int] | None,
    fell_back: Callable[[WindowRecord], bool] = lambda window: window.fallback_reason is not None,
) -> Compared | LeftOut:
    """Compare the two cells of a group, or say why it does not count.

    Args:
        members: its windows, in the order in which they ran; cell 0 is the reference.
        used: positions of a run that are compared (`window_order.compared`).
        size: what must be the same in all compared windows.
        drafts: draft count that each cell's requests must verify; None: any.
        fell_back: True for a window that did not run as its cell says.
    """
    if not _is_whole([place for _, place in members]):
        return LeftOut.INTERRUPTED
    chosen = [(window, place) for window, place in members if place.position in used]
    windows = [window for window, _ in chosen]
    if any(map(fell_back, windows)):
        return LeftOut.FALLBACK
    if len(set(map(size, windows))) > 1:
        return LeftOut.BATCH_SIZE
    if drafts is not None and any(
        w.draft_tokens != w.num_reqs * drafts[p.cell] for w, p in members
    ):
        return LeftOut.DRAFTS
    treated = [place.cell != 0 for _, place in chosen]
    host, device = (log_effect(treated, windows, clock) for clock in ("wall_ms", "device_ms"))
    untimed = all(window.device_ms is None for window in windows)
    if host is None or (device is None and not untimed):
        return LeftOut.UNTIMED
    return Compared(windows, treated, host, device)


def _is_whole(places: Sequence[WindowPlace]) -> bool:
    """True for four whole runs, A B B A."""
    first, length = places[0], places[0].run_length
    second = next((place.cell for place in places if place.run == 1), first.cell)
    whole = places_of_group((first.cell, second), first.group, length)
    return length > 1 and first.cell != second and list(places) == whole


def log_effect(
    treated: Sequence[bool], windows: Sequence[WindowRecord], clock: str
) -> float | None:
    """Mean log time of treated windows less that of the others; None if a time is missing.

    Args:
        clock: the field of `WindowRecord` with the time.
    """
    times = [getattr(window, clock) for window in windows]
    if not all(time is not None and isfinite(time) and time > 0 for time in times):
        return None
    return abba_effect(zip(treated, times, strict=True))
