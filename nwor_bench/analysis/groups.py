"""Groups of neighbouring windows in which two cells are interleaved: A B B A or B A A B.

The first window of each run is dropped, because it follows a switch, and if draft counts alternate
the last one too (`window_order.compared`). A group's effect is the mean log time of B's windows
less that of A's; the order A B B A cancels what drifts linearly. Pure.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import log
from statistics import fmean

from nwor_bench.analysis.invariants import output_tokens
from nwor_bench.records.cell import Cell, NworMode
from nwor_bench.records.fallback_reasons import LeftOut
from nwor_bench.records.types import WindowRecord
from nwor_bench.records.window_groups import judge_group, log_effect
from nwor_bench.records.window_order import WindowPlace, compared


@dataclass(frozen=True)
class Pair:
    """Two cells that a group compares."""

    reference: Cell
    """A: off x off if it is one of the two, else control, or the same draft count in mode off."""

    treated: Cell
    """B."""

    @property
    def by_drafts(self) -> bool:
        """True if draft counts alternate. One count staged and not alternates modes."""
        counts = self.treated.drafts is not None or self.reference.drafts is not None
        return counts and self.treated.stock_twin != self.reference

    @property
    def is_over_stock(self) -> bool:
        """True if it gives B's ratio: over off x off, of a staged draft count over its twin."""
        twin = self.treated.stock_twin
        return self.reference.is_baseline if twin is None else self.reference == twin


@dataclass(frozen=True)
class Group:
    """One group that counts."""

    pair: Pair
    block: int
    batch: int
    number: int
    """Number of the group in its batch."""

    run_length: int
    """Windows of a run, the dropped first one included."""

    num_reqs: int
    """Requests in each window."""

    host: float
    """B's mean log time less A's, on the host's clock."""

    device: float | None
    """`host` on the device's clock; None if there is none."""

    work: float | None
    """`host` of the GPU's own work (`WindowRecord.work_ms`); None if it was not timed."""

    tokens: float | None
    """Log of B's mean output tokens a window over A's; None if a cell gave none (all requests had
    finished). Each run's first window counts here: a switch costs time, not tokens."""

    pace: float
    """Log of B's mean time a window over A's: `device`, or else `host`, with arithmetic means."""

    switch: float | None = None
    """Mean log time of the runs' first windows less that of the compared ones, on the clock that
    decides: what a switch costs. None if first windows are compared, or have no time."""


@dataclass(frozen=True)
class FoundGroups:
    """The groups of a batch, or of several, in the order in which they ran."""

    counted: tuple[Group, ...]
    left_out: dict[Pair, Counter[LeftOut]]


def find_groups(windows: Iterable[WindowRecord]) -> FoundGroups:
    """The groups among interleaved windows, in the order in which they ran."""
    counted: list[Group] = []
    left_out: dict[Pair, Counter[LeftOut]] = {}
    inside = (window for window in windows if window.group is not None)
    for _, members in groupby(inside, key=lambda w: (w.block, w.batch, w.group)):
        in_group = list(members)
        pair = pair_of({window.cell for window in in_group})
        if pair is None:
            continue  # cut before its second cell ran: nothing was compared
        judged = _group(pair, in_group)
        if isinstance(judged, Group):
            counted.append(judged)
        else:
            left_out.setdefault(pair, Counter())[judged] += 1
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


def _group(pair: Pair, windows: Sequence[WindowRecord]) -> Group | LeftOut:
    in_turn = sorted(windows, key=lambda window: (window.run or 0, window.position or 0))
    members = [(window, _place(pair, window)) for window in in_turn]
    length = members[0][1].run_length
    used = compared(length, counts=pair.by_drafts)
    has_counts = pair.reference.drafts is not None
    judged = judge_group(
        members,
        used=used,
        size=_size,
        drafts=(pair.reference.fixed_drafts, pair.treated.fixed_drafts) if has_counts else None,
        fell_back=_fell_back,
    )
    if isinstance(judged, LeftOut):
        return judged
    first = judged.windows[0]
    clock = "wall_ms" if judged.device is None else "device_ms"
    begins = [] if used[0] == 0 else [window for window, place in members if not place.position]
    is_first = [True] * len(begins) + [False] * len(judged.windows)
    alike = [w for w, _ in members if w.fallback_reason is None and _size(w) == _size(first)]
    return Group(
        pair=pair,
        block=first.block,
        batch=first.batch,
        number=first.group or 0,
        run_length=length,
        num_reqs=first.num_reqs,
        host=judged.host,
        device=judged.device,
        work=log_effect(judged.treated, judged.windows, "work_ms"),
        tokens=_log_ratio(pair, [(w.cell, output_tokens(w)) for w in alike]),
        pace=_log_ratio(pair, [(w.cell, getattr(w, clock)) for w in judged.windows]) or 0.0,
        switch=log_effect(is_first, [*begins, *judged.windows], clock) if begins else None,
    )


def _place(pair: Pair, window: WindowRecord) -> WindowPlace:
    """A window's place in its group, in which the reference is cell 0."""
    cell, length = int(window.cell == pair.treated), window.run_length or 0
    return WindowPlace(cell, window.group or 0, window.run or 0, length, window.position or 0)


def _fell_back(window: WindowRecord) -> bool:
    """True for a staged window that was written directly, and a control window that held none."""
    is_control = window.cell.nwor_mode is NworMode.CONTROL
    return window.fallback_reason is not None or (is_control and not window.control_tokens)


def _size(window: WindowRecord) -> tuple[int, int]:
    drafts = window.draft_tokens - window.num_reqs * window.cell.fixed_drafts
    return (window.num_reqs, drafts)


def _log_ratio(pair: Pair, values: Sequence[tuple[Cell, float]]) -> float | None:
    """Log of B's mean over A's; None if a mean is 0."""
    ours = fmean(value for cell, value in values if cell == pair.treated)
    theirs = fmean(value for cell, value in values if cell == pair.reference)
    return log(ours / theirs) if ours and theirs else None


_NO_REFERENCE = 2


def _rank(cell: Cell) -> int:
    if cell.is_baseline:
        return 0
    refers = cell.nwor_mode is NworMode.CONTROL or (cell.drafts and cell.stock_twin is None)
    return 1 if refers else _NO_REFERENCE
