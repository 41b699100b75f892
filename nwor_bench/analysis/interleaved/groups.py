"""Groups of neighbouring windows in which two cells take turns: A B B A or B A A B.

The first window of each run is dropped: it follows a switch. A group's effect is the mean log time
of B's windows less that of A's; the order A B B A cancels what drifts linearly. Pure, and free of
a run's records as a whole, so that a live server can use it too.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from math import isfinite, log
from statistics import fmean

from nwor_bench.records.cell import Cell, NworMode
from nwor_bench.records.types import WindowRecord
from nwor_bench.workload.window_order import RUNS

SETTLED = 1
"""Position of the first window of a run that counts."""


class LeftOut(StrEnum):
    """Why a group does not count."""

    INCOMPLETE = "incomplete"
    FALLBACK = "fallback in a stage window"
    IDLE_CONTROL = "control did not act"
    UNEQUAL = "unequal batch size"
    UNTIMED = "window without a time"


@dataclass(frozen=True)
class Pair:
    """Two cells that a group compares."""

    reference: Cell
    """A: off x off where it is one of the two, else control."""

    treated: Cell
    """B."""


@dataclass(frozen=True)
class Group:
    """One group that counts."""

    pair: Pair
    block: int
    batch: int
    number: int
    """Of the group in its batch."""

    run_length: int
    """Windows of a run, the dropped first one included."""

    num_reqs: int
    """Requests in each window."""

    host: float
    """B's mean log time less A's, on the host's clock."""

    device: float | None
    """The same on the device's clock; None where there is none."""


@dataclass(frozen=True)
class FoundGroups:
    """The groups of a batch, or of several, in the order in which they ran."""

    counted: tuple[Group, ...]
    left_out: dict[Pair, Counter[LeftOut]]


def find_groups(windows: Iterable[WindowRecord]) -> FoundGroups:
    """The groups among interleaved windows, which stand in the order in which they ran."""
    counted: list[Group] = []
    left_out: dict[Pair, Counter[LeftOut]] = {}
    inside = (window for window in windows if window.group is not None)
    for _, members in groupby(inside, key=lambda w: (w.block, w.batch, w.group)):
        own = list(members)
        pair = pair_of({window.cell for window in own})
        if pair is None:
            continue  # cut before its second cell had its turn: nothing was compared
        found = _group(pair, own)
        if isinstance(found, Group):
            counted.append(found)
        else:
            left_out.setdefault(pair, Counter())[found] += 1
    if any(group.device is not None for group in counted):
        for group in [group for group in counted if group.device is None]:
            left_out.setdefault(group.pair, Counter())[LeftOut.UNTIMED] += 1
        counted = [group for group in counted if group.device is not None]
    return FoundGroups(tuple(counted), left_out)


def pair_of(cells: Iterable[Cell]) -> Pair | None:
    """Which of two cells is the reference; None unless there are two, one of them known as such."""
    both = sorted(cells, key=_rank)
    if len(both) != 2 or _rank(both[0]) == _rank(both[1]) or _rank(both[0]) == _NO_REFERENCE:
        return None
    return Pair(*both)


def abba_effect(times: Sequence[Sequence[float]], treated: Sequence[bool]) -> float:
    """B's mean log time less A's.

    Args:
        times: of each run's windows that count, all runs equally long.
        treated: True for the runs of B.
    """
    means = [(fmean(map(log, run)), is_b) for run, is_b in zip(times, treated, strict=True)]
    return fmean(m for m, is_b in means if is_b) - fmean(m for m, is_b in means if not is_b)


def _group(pair: Pair, members: Sequence[WindowRecord]) -> Group | LeftOut:
    runs = [
        list(own) for _, own in groupby(sorted(members, key=_turn), key=lambda window: window.run)
    ]
    if not _is_complete(runs):
        return LeftOut.INCOMPLETE
    used = [run[SETTLED:] for run in runs]
    windows = [window for run in used for window in run]
    if any(window.fallback_reason is not None for window in windows):
        return LeftOut.FALLBACK
    if any(w.cell.nwor_mode is NworMode.CONTROL and not w.control_tokens for w in windows):
        return LeftOut.IDLE_CONTROL
    if len({(window.num_reqs, window.draft_tokens) for window in windows}) > 1:
        return LeftOut.UNEQUAL
    host, device = _times(used, "wall_ms"), _times(used, "device_ms")
    untimed = all(window.device_ms is None for window in windows)
    if host is None or (device is None and not untimed):
        return LeftOut.UNTIMED
    treated = [run[0].cell == pair.treated for run in used]
    first = windows[0]
    return Group(
        pair=pair,
        block=first.block,
        batch=first.batch,
        number=first.group or 0,
        run_length=len(runs[0]),
        num_reqs=first.num_reqs,
        host=abba_effect(host, treated),
        device=None if device is None else abba_effect(device, treated),
    )


def _turn(window: WindowRecord) -> tuple[int, int]:
    return (window.run or 0, window.position or 0)


def _is_complete(runs: Sequence[Sequence[WindowRecord]]) -> bool:
    """Four whole runs, A B B A or B A A B."""
    if [run[0].run for run in runs] != list(range(RUNS)):
        return False
    length = runs[0][0].run_length or 0
    for run in runs:
        cells = {window.cell for window in run}
        places = [window.position for window in run]
        if len(cells) != 1 or places != list(range(length)):
            return False
        if any(window.run_length != length for window in run):
            return False
    first, second, third, last = (run[0].cell for run in runs)
    return length > SETTLED and first == last != second == third


def _times(runs: Sequence[Sequence[WindowRecord]], clock: str) -> list[list[float]] | None:
    """The windows' times; None if one is missing."""
    times = [[getattr(window, clock) for window in run] for run in runs]
    every = [time for run in times for time in run]
    return times if all(t is not None and isfinite(t) and t > 0 for t in every) else None


_NO_REFERENCE = 2


def _rank(cell: Cell) -> int:
    if cell.is_baseline:
        return 0
    return 1 if cell.nwor_mode is NworMode.CONTROL else _NO_REFERENCE
